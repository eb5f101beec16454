"""PettingZoo's AEC worlds, where one agent acts at a time. Each agent is a lane with its own, correct stream of rows.

    step r      agent 0 moves   lane 0 makes no frame yet; its observation and the policy's outputs are kept
    step r+1    agent 1 moves   now it is agent 0's turn again: lane 0 makes a frame from all that was kept:
                                (its observation, its action) → (its observation now, its reward since then)

- `("next", observation)` is the agent's observation when its turn comes again, or at its end. The reward is the sum
  since its action, as `last()` counts it, and done is the agent's own.
- A step advances every world by one turn; a lane whose frame is not complete makes none in that step. Such steps are
  removed: the lane's later rows move up, and `("collector", "mask")` is False behind them.
- An action whose frame is not complete when a batch ends makes a frame of the next batch. No frame is lost or doubled.
- The policy computes actions for every lane; only the action of the agent whose turn it is, is used. A waiting lane
  shows its agent's last observation. A lane whose agent has had no turn yet, or has ended, shows zeros and an action
  mask of ones: any action will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap.core.env import Env, Rows
from reap.core.resume import packed, unpacked
from reap.core.slot import Row
from reap.envs.adapters.gymnasium_state import restore_env, saved_world
from reap.envs.spaces import Actions, Observations
from reap.errors import ReapError, SpecMismatch, UsageError, WorkerRaised, raised_by
from reap.spec import EnvSpec, Key, Leaf, numpy_dtype

AGENT: Key = ("agent",)


class Agents:
    """The agents of one PettingZoo env in a fixed order, and the spaces that all of them share."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.names: list[str] = list(env.possible_agents)
        if not self.names:
            raise UsageError("this PettingZoo env has no possible_agents")
        self.index = {name: i for i, name in enumerate(self.names)}
        first = self.names[0]
        self.observation_space, self.action_space = env.observation_space(first), env.action_space(first)
        for name in self.names[1:]:
            for what, mine in (("observation_space", self.observation_space), ("action_space", self.action_space)):
                theirs = getattr(env, what)(name)
                if theirs != mine:
                    raise SpecMismatch(f"agent {name!r} has {what} {theirs}, {first!r} has {mine}; they must be equal")

    def agree(self, other: Agents, lane: int) -> None:
        """Raise SpecMismatch unless the env `other`, which begins at `lane`, has the same agents and spaces."""
        if other.names != self.names:
            raise SpecMismatch(f"lane {lane} has agents {other.names}, lane 0 has {self.names}")
        for what in ("observation_space", "action_space"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if theirs != mine:
                name = repr(self.names[0])
                raise SpecMismatch(
                    f"agent {name} in lane {lane} has {what} {theirs}, agent {name} in lane 0 has {mine}; "
                    f"they must be equal"
                )


class _TurnWorld(Agents):
    """One AEC env. Errors of its calls say which call failed."""

    def reset(self, seed: int | None) -> None:
        try:
            self.env.reset(seed=seed)
        except Exception as cause:
            raise raised_by("env.reset raised", cause) from cause

    def step(self, action: Any) -> None:
        try:
            self.env.step(action)
        except Exception as cause:
            raise raised_by("env.step raised", cause) from cause

    def last_reports(self) -> Iterator[tuple[int, Any, Any, bool, bool]]:
        """Yield what `last()` returns, for agents that have ended (which are then removed) and for the one to act."""
        env = self.env
        while env.agents:
            name = env.agent_selection
            seen, reward, terminated, truncated, _ = env.last()
            yield self.index[name], seen, reward, bool(terminated), bool(truncated)
            if not (terminated or truncated):
                return
            self.step(None)


class TurnLanes(Env):
    """AEC worlds, with one lane for each agent of each world: first the agents of world 0."""

    def __init__(self, envs: Sequence[Any], *, categorical: bool = False) -> None:
        if len({id(env) for env in envs}) < len(envs):
            raise UsageError("several lanes are the same env object; give a factory that makes a new one each time")
        self._worlds = [_TurnWorld(env) for env in envs]
        first, *others = self._worlds
        self._agents = len(first.names)
        for w, world in enumerate(others, 1):
            first.agree(world, w * self._agents)
        self._categorical = categorical
        self._observations = Observations(first.observation_space, categorical=categorical)
        self._actions = Actions(first.action_space, categorical=categorical)
        seen = self._observations.leaves
        # The agent's number, for networks that all agents share; if the env has this key itself, its own is used.
        self._agent_leaf: dict[Key, Leaf] = {} if AGENT in seen else {AGENT: Leaf((), torch.int64)}
        lanes = len(envs) * self._agents
        self.spec = EnvSpec(
            observation={**seen, **self._agent_leaf},
            action=self._actions.leaves,
            lanes=lanes,
            batched=True,
            rows="skipping",
            single_steps=False,
            single_resets=False,
            side=frozenset(self._agent_leaf),
        )
        self._blank = [1 if key[-1] == "action_mask" else 0 for key in seen]
        self._observed = [np.zeros((lanes, *leaf.shape), numpy_dtype(leaf.dtype)) for leaf in seen.values()]
        self._turn = np.zeros(len(envs), np.int64)  # by world: the lane whose turn it is
        self._waiting = np.zeros(lanes, np.bool_)  # lanes that have acted and whose frame is not complete yet
        self._kept_outputs: list[np.ndarray[Any, Any]] = []  # the policy's outputs when they acted
        self._output_shapes: list[Any] | None = None
        self._decode: Callable[..., Sequence[Any]] = self._actions.decoder(self._actions.leaves)

    def joined(self, others: Sequence[TurnLanes]) -> TurnLanes:
        """Join these worlds and those of `others` into one env."""
        envs = [world.env for lanes in (self, *others) for world in lanes._worlds]
        return TurnLanes(envs, categorical=self._categorical)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._decode = self._actions.decoder(action)
        self._output_shapes = None

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        whole = seeds is not None or len(lanes) == self.spec.lanes
        first = {lane // self._agents: i for i, lane in reversed(list(enumerate(lanes)))}
        for w, i in first.items():
            world, begin = self._worlds[w], w * self._agents
            mine = slice(begin, begin + self._agents)
            try:
                if whole or not world.env.agents:
                    self._clear(mine)
                    world.reset(None if seeds is None else int(seeds[i]))
                    self._first_turn(world, w)
                else:  # other agents go on: lanes that ended wait
                    self._clear([lane for lane in lanes if lane // self._agents == w])
            except ReapError as error:
                error.at(lane=begin)
                raise
            for array, now in zip(into, self._observed):
                array[mine] = now[mine]
            if self._agent_leaf:
                into[len(self._observed)][mine] = range(self._agents)

    def _clear(self, lanes: Any) -> None:
        self._waiting[lanes] = False
        for now, blank in zip(self._observed, self._blank):
            now[lanes] = blank

    def _first_turn(self, world: _TurnWorld, w: int) -> None:
        for agent, seen, _, terminated, truncated in world.last_reports():
            if not (terminated or truncated):
                self._turn[w] = w * self._agents + agent
                self._observations.write(seen, self._observed, int(self._turn[w]))
                return
        raise SpecMismatch("after env.reset there is no agent to act")

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        if self._output_shapes is None:
            self._allocate_kept(row)
        turn = self._turn.copy()
        actions = self._decode(*[array[turn] for array in row.action])
        for kept, output in zip(self._kept_outputs, row.outputs):
            kept[turn] = output[turn]
        self._waiting[turn] = True
        frames: list[int] = []
        ended: list[int] = []
        lane = 0
        try:
            for w, world in enumerate(self._worlds):
                lane = int(turn[w])
                world.step(actions[w])
                self._complete_frames(world, w, row, frames, ended)
        except ReapError as error:
            error.at(lane=lane)
            raise
        except Exception as cause:
            raise WorkerRaised(f"env.last raised, or returned something unreadable: {cause!r}").at(lane=lane) from cause
        row.mask[...] = False  # type: ignore[index]
        row.mask[frames] = True  # type: ignore[index]
        for kept, output in zip(self._kept_outputs, row.outputs):
            output[frames] = kept[frames]
        for successor, now in zip(row.next, self._observed):
            successor[...] = now
        if self._agent_leaf:
            row.next[len(self._observed)].reshape(-1, self._agents)[...] = range(self._agents)
        return sorted(ended)

    def _complete_frames(self, world: _TurnWorld, w: int, row: Row, frames: list[int], ended: list[int]) -> None:
        """Complete the frames of the agents that ended and of the one to act next, if they have acted before."""
        begin = w * self._agents
        for agent, seen, reward, terminated, truncated in world.last_reports():
            lane = begin + agent
            over = terminated or truncated
            if over and not self._waiting[lane]:
                continue  # it ended before it ever acted: there is no frame to complete
            if over and seen is None:  # some envs have no observation for an agent that ended
                for now in self._observed:
                    now[lane] = 0
            else:
                self._observations.write(seen, self._observed, lane)
            if self._waiting[lane]:
                self._waiting[lane] = False
                frames.append(lane)
                row.reward[lane] = np.asarray(reward).item()
                if over:
                    row.terminated[lane], row.truncated[lane], row.done[lane] = terminated, truncated, True
                    ended.append(lane)
            if not over:
                self._turn[w] = lane
                return
        left = np.flatnonzero(self._waiting[begin : begin + self._agents])
        if len(left):
            name = world.names[left[0]]
            raise SpecMismatch(f"agent {name!r} was removed from env.agents, but was neither terminated nor truncated")

    def _allocate_kept(self, row: Row) -> None:
        """Allocate memory for the policy's outputs, unless it has their shapes and dtypes already."""
        self._output_shapes = [(output.shape, output.dtype) for output in row.outputs]
        if self._output_shapes == [(kept.shape, kept.dtype) for kept in self._kept_outputs]:
            return
        if self._waiting.any():
            raise UsageError("the policy's outputs changed in the middle of a turn-based game; reset the collector")
        self._kept_outputs = [np.zeros_like(output) for output in row.outputs]

    def open_state(self) -> Any:
        arrays = {"turn": self._turn, "waiting": self._waiting}
        kept = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        observed = [torch.from_numpy(array.copy()) for array in self._observed]
        worlds = [saved_world(world.env, w * self._agents) for w, world in enumerate(self._worlds)]
        return {"worlds": worlds, **kept, "now": observed, "kept": [packed(array) for array in self._kept_outputs]}

    def load_open_state(self, state: Any) -> None:
        for world, one in zip(self._worlds, state["worlds"]):
            restore_env(one, world.env)
        self._turn, self._waiting = (state[name].numpy().copy() for name in ("turn", "waiting"))
        for mine, now in zip(self._observed, state["now"]):
            mine[...] = now.numpy()
        self._kept_outputs, self._output_shapes = [unpacked(kept) for kept in state["kept"]], None

    def close(self) -> None:
        for world in self._worlds:
            world.env.close()
