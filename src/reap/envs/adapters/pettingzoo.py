"""PettingZoo: several agents in one world. A world is one PettingZoo env.

    group   one lane per world; agents are a dimension: ("agents", "observation") [n, …], ("agents", "action") [n, …],
            ("next", "agents", "reward") [n, 1], flags of each agent, and ("agents", "mask") [n]: which agents can act
    lanes   one lane per agent: each has its own rows, ids and ends; rows of an absent agent are masked out, and a new
            episode begins in its lane when the agent comes back or the world is reset

    turns   one agent acts at a time (AEC worlds): one lane per agent, see pettingzoo_aec.py

A world ends when all its agents have left, or when one step has terminated or truncated every agent it still lists.
Agents may leave and come back, also in the step that ended them. An absent agent's observations and rewards are zero,
never stale. Agents need equal spaces. AEC worlds that PettingZoo can make parallel work in all three modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from reap.core.env import Env, Rows
from reap.core.slot import FLAGS, Row
from reap.envs.adapters.gymnasium_state import restore_env, saved_world
from reap.envs.adapters.pettingzoo_aec import Agents, TurnLanes
from reap.envs.base import EnvBase
from reap.envs.spaces import Actions, Observations
from reap.errors import ReapError, SpecMismatch, UsageError, WrongArgument, missing, raised_by
from reap.spec import EnvSpec, Key, Leaf


class _Present(NamedTuple):
    """The agents that are present, in the env's order."""

    names: list[str]
    numbers: list[int]
    at: Any  # the numbers as an index into a column; a slice if they are consecutive
    number_set: frozenset[int]  # the numbers, to compare with those of another step


class _World(Agents):
    """One parallel env. Errors of its calls say which call failed."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._present = _Present([], [], slice(0, 0), frozenset())

    def reset(self, seed: int | None) -> Mapping[str, Any]:
        try:
            observations, _ = self.env.reset(seed=seed)
        except Exception as cause:
            raise raised_by("env.reset raised", cause) from cause
        return observations  # type: ignore[no-any-return]

    def step(self, acting: _Present, actions: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
        names, numbers, at, _ = acting
        chosen = dict(zip(names, actions[at] if at.__class__ is slice else [actions[i] for i in numbers]))
        try:
            return self.env.step(chosen)[:4]  # type: ignore[no-any-return]
        except Exception as cause:
            raise raised_by("env.step raised", cause) from cause

    def check_flags(self, left: Iterable[int], terminations: Mapping[str, Any], truncations: Mapping[str, Any]) -> None:
        """Raise SpecMismatch if an agent in `left` was neither terminated nor truncated."""
        for name in [self.names[i] for i in left]:
            if not terminations.get(name, False) and not truncations.get(name, False):
                raise SpecMismatch(
                    f"agent {name!r} was removed from env.agents, but was neither terminated nor truncated"
                )

    def is_over(self, terminations: Mapping[str, Any], truncations: Mapping[str, Any]) -> bool:
        """Whether no agent goes on after this step: all have left, or it ended every agent that is still listed."""
        return all(terminations.get(name, False) or truncations.get(name, False) for name in self.present.names)

    @property
    def present(self) -> _Present:
        """The agents present now: the same object as long as the agents are the same."""
        names = getattr(self.env, "agents", ())  # some have none before a reset
        if names != self._present.names:
            numbers = [self.index[name] for name in names]
            start, end = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
            at = slice(start, end) if numbers == list(range(start, end)) else np.array(numbers, np.int64)
            self._present = _Present(list(names), numbers, at, frozenset(numbers))
        return self._present


class GroupLanes(Env):
    """Mode "group": each world is a lane, and its agents are a dimension of the group's leaves."""

    has_after_step = True

    def __init__(self, envs: Sequence[Any], *, group: str = "agents", categorical: bool = False, batched: bool = False):
        self._worlds = [_World(env) for env in envs]
        self._settings: dict[str, Any] = {"group": group, "categorical": categorical}
        first = self._worlds[0]
        if len({id(env) for env in envs}) < len(envs):
            raise UsageError("several lanes are the same env object; give a factory that makes a new one each time")
        for lane, world in enumerate(self._worlds[1:], 1):
            first.agree(world, lane)
        self._observations = Observations(first.observation_space, categorical=categorical)
        self._actions = Actions(first.action_space, categorical=categorical)
        count = len(first.names)

        def grouped(leaves: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
            return {
                (group, *key): Leaf((count, *leaf.shape), leaf.dtype, leaf.space, leaf.one_hot)
                for key, leaf in leaves.items()
            }

        flags: dict[Key, Leaf] = {(group, flag): Leaf((count, 1), torch.bool) for flag in FLAGS}
        self.spec = EnvSpec(
            observation={**grouped(self._observations.leaves), **flags, (group, "mask"): Leaf((count,), torch.bool)},
            action=grouped(self._actions.leaves),
            reward={(group, "reward"): Leaf((count, 1), torch.float32)},
            lanes=len(self._worlds),
            batched=batched,
        )
        self._leaves = len(self._observations.leaves)
        self._group = group
        self._departed: list[tuple[int, frozenset[int]]] = []  # in this step: lane, and the agents that left it
        self._decode: Callable[..., Sequence[Any]] = self._actions.decoder(self._actions.leaves)

    @property
    def parallel_envs(self) -> list[Any]:
        """The PettingZoo env of each lane."""
        return [world.env for world in self._worlds]

    def joined(self, others: Sequence[GroupLanes]) -> GroupLanes:
        """Join these worlds and those of `others` into one batched env."""
        envs = [world.env for lanes in (self, *others) for world in lanes._worlds]
        return GroupLanes(envs, batched=True, **self._settings)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        count = len(self._worlds[0].names)
        single: dict[Key, Leaf] = {}
        for key, leaf in action.items():
            if leaf.shape[:1] != (count,):
                raise SpecMismatch(f"policy writes {key} as {leaf}; {count} agents need [{count}, …]")
            single[key[1:]] = Leaf(leaf.shape[1:], leaf.dtype)
        self._decode = self._actions.decoder(single)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        for i, lane in enumerate(lanes):
            world = self._worlds[lane]
            try:
                observations = world.reset(None if seeds is None else int(seeds[i]))
                for array in into[: self._leaves + 4]:
                    array[lane] = 0
                present = world.present
                self._write(observations, world, present, into, lane)
                into[self._leaves + 3][lane, present.at] = True
            except ReapError as error:
                error.at(lane=lane)
                raise

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        ended = []
        done, terminated, truncated, mask = row.next[self._leaves : self._leaves + 4]
        (reward,) = row.rewards
        self._departed.clear()
        count = len(self._worlds[0].names)
        for lane in lanes:
            world = self._worlds[lane]
            try:
                acting = world.present
                names, _, at, _ = acting
                actions = self._decode(*[array[lane] for array in row.action])
                observations, rewards, terminations, truncations = world.step(acting, actions)
                if len(observations) < count:
                    for array in row.next[: self._leaves]:
                        array[lane] = 0
                self._write(observations, world, acting, row.next, lane)
                # There may be many agents: write once per column, not per agent, and not at all if nothing happened.
                terminated[lane] = truncated[lane] = mask[lane] = done[lane] = False
                if len(names) < count:
                    reward[lane] = 0
                    done[lane] = True  # absent agents count as done
                    done[lane, at] = False
                _put_numbers(reward[lane], at, _in_order(rewards, names, 0.0))
                any_terminated, any_truncated = any(terminations.values()), any(truncations.values())
                if any_terminated:
                    terminated[lane, at, 0] = done[lane, at, 0] = _in_order(terminations, names, False)
                if any_truncated:
                    truncated[lane, at, 0] = _in_order(truncations, names, False)
                    done[lane, at] |= truncated[lane, at]
                alive = world.present
                mask[lane, alive.at] = True
                if alive is not acting:
                    for back in alive.number_set - acting.number_set:
                        done[lane, back] = False
                    left = acting.number_set - alive.number_set
                    world.check_flags(left, terminations, truncations)
                    self._departed.append((lane, left))
                some_ended = any_terminated or any_truncated
                ends = not alive.names or (some_ended and world.is_over(terminations, truncations))
                if ends:
                    mask[lane] = False  # even if the env still lists agents that have ended
            except ReapError as error:
                error.at(lane=lane)
                raise
            if ends:
                row.truncated[lane] = bool(truncated[lane].any())
                row.terminated[lane] = not row.truncated[lane]
                row.done[lane] = True
                ended.append(lane)
        return ended

    def after_step(self, row: Row) -> None:
        for lane, agents in self._departed:
            for array in row.after[: self._leaves]:
                for agent in agents:
                    array[lane, agent] = 0  # an agent that left has no current observation any more

    def _write(
        self, observations: Mapping[str, Any], world: _World, present: _Present, arrays: Rows, lane: int
    ) -> None:
        names, _, at, _ = present
        shape, dtype = self._observations.plain
        if shape and at.__class__ is slice and names and list(observations) == names:  # in order: one write
            values = list(observations.values())
            try:
                if [value.shape for value in values].count(shape) == len(values):
                    np.concatenate(values, out=arrays[0][lane, at].reshape(-1, *shape[1:]), casting="no")
                    return
            except (TypeError, AttributeError):
                pass  # not all are arrays, or a dtype differs: one by one
        views = [array[lane] for array in arrays[: self._leaves]]
        index, write, only = world.index, self._observations.write, views[0]
        for name, observation in observations.items():
            if observation.__class__ is np.ndarray and observation.dtype is dtype and observation.shape == shape:
                only[index[name]] = observation
            else:
                write(observation, views, index[name])

    def open_state(self) -> Any:
        return [saved_world(world.env, lane) for lane, world in enumerate(self._worlds)]

    def load_open_state(self, state: Any) -> None:
        for world, one in zip(self._worlds, state):
            restore_env(one, world.env)

    def close(self) -> None:
        for world in self._worlds:
            world.env.close()


def _in_order(values: Mapping[str, Any], names: list[str], missing: Any) -> list[Any]:
    return list(values.values()) if list(values) == names else [values.get(name, missing) for name in names]


def _put_numbers(column: np.ndarray[Any, Any], at: Any, values: Sequence[Any]) -> None:
    try:
        column[at, 0] = values
    except (TypeError, ValueError):  # an array of one number counts as a number
        column[at, 0] = [np.asarray(value).item() for value in values]


class AgentLanes(Env):
    """Mode "lanes": each agent of one world is a lane."""

    def __init__(self, env: Any, *, categorical: bool = False) -> None:
        self._world = world = _World(env)
        self._observations = Observations(world.observation_space, categorical=categorical)
        self._actions = Actions(world.action_space, categorical=categorical)
        self.spec = EnvSpec(
            observation=self._observations.leaves,
            action=self._actions.leaves,
            lanes=len(world.names),
            batched=True,
            rows="masked",
            single_steps=False,
            single_resets=False,
        )
        self._decode: Callable[..., Sequence[Any]] = self._actions.decoder(self._actions.leaves)
        self._over = False  # no agent goes on, even if the env still lists some

    @property
    def parallel_envs(self) -> list[Any]:
        """The one PettingZoo env."""
        return [self._world.env]

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._decode = self._actions.decoder(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        world = self._world
        whole = seeds is not None or len(lanes) == self.spec.lanes
        alive = world.present.number_set
        if alive and not whole and not self._over:
            # Other agents go on: a lane that ended waits and observes zeros, unless its agent is back already.
            for lane in lanes:
                if lane not in alive:
                    for array in into:
                        array[lane] = 0
            return
        observations = world.reset(None if seeds is None else int(seeds[0]))
        self._over = False
        for array in into[: len(self._observations.leaves)]:
            array[...] = 0
        for name, observation in observations.items():
            self._observations.write(observation, into, world.index[name])

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        world = self._world
        acting = world.present
        observations, rewards, terminations, truncations = world.step(acting, self._decode(*row.action))
        for array in row.next[: len(self._observations.leaves)]:
            array[...] = 0
        for name, observation in observations.items():
            self._observations.write(observation, row.next, world.index[name])
        row.reward[...] = 0
        row.mask[...] = False  # type: ignore[index]
        ended = []
        for name, i in zip(acting.names, acting.numbers):
            row.mask[i] = True  # type: ignore[index]
            row.reward[i] = rewards.get(name, 0.0)
            terminated, truncated = terminations.get(name, False), truncations.get(name, False)
            if terminated or truncated:
                row.terminated[i], row.truncated[i], row.done[i] = terminated, truncated, True
                ended.append(i)
        world.check_flags(acting.number_set - world.present.number_set, terminations, truncations)
        self._over = bool(ended) and world.is_over(terminations, truncations)
        return ended

    def open_state(self) -> Any:
        return saved_world(self._world.env)

    def load_open_state(self, state: Any) -> None:
        restore_env(state, self._world.env)

    def close(self) -> None:
        self._world.env.close()


class PettingZooEnv(EnvBase):
    """A PettingZoo env.

    >>> env = PettingZooEnv(pistonball_v6.parallel_env())

    Args:
        env: a parallel env or an AEC env.
        mode: "group": agents are a dimension of nested leaves; "lanes": each agent is a lane; "turns": each agent is a
            lane, and they act one after another. By default "turns" for AEC envs that PettingZoo cannot make
            parallel, else "group".
        group: the key under which the group's leaves are nested.
        categorical_action_encoding: encode discrete spaces as an index instead of one-hot.
    """

    def __init__(
        self,
        env: Any,
        *,
        mode: Literal["group", "lanes", "turns"] | None = None,
        group: str = "agents",
        categorical_action_encoding: bool = False,
        device: Any = None,
    ) -> None:
        if mode not in (None, "group", "lanes", "turns"):
            raise UsageError(f"mode must be 'group', 'lanes' or 'turns', got {mode!r}")
        if isinstance(env, type):
            raise WrongArgument(f"PettingZooEnv takes an env, got the class {env.__name__}: call it")
        if not is_pettingzoo(env):
            raise WrongArgument(f"PettingZooEnv takes a PettingZoo env, got {type(env).__name__}")
        lanes: Env
        if mode == "turns" or (mode is None and turn_based(env) and not _parallelizable(env)):
            if not turn_based(env):
                raise UsageError(f"mode='turns' is for AEC envs; in {env} all agents act at once")
            lanes = TurnLanes([env], categorical=categorical_action_encoding)
        elif mode == "lanes":
            lanes = AgentLanes(as_parallel(env), categorical=categorical_action_encoding)
        else:
            lanes = GroupLanes([as_parallel(env)], group=group, categorical=categorical_action_encoding)
        super().__init__(lanes, device=device)


def is_pettingzoo(thing: Any) -> bool:
    """Whether this is a PettingZoo env of either kind, without importing PettingZoo."""
    return hasattr(thing, "possible_agents") and callable(getattr(thing, "observation_space", None))


def turn_based(env: Any) -> bool:
    """Whether this is an AEC env, whose agents act one after another."""
    return hasattr(env, "agent_selection") or hasattr(env, "agent_iter")


def _parallelizable(env: Any) -> bool:
    return bool(env.metadata.get("is_parallelizable", False))


def as_parallel(env: Any) -> Any:
    """Return a parallel env unchanged, and an AEC env converted to a parallel one."""
    if not turn_based(env):
        return env
    if not _parallelizable(env):
        raise UsageError(f"{env} is turn-based and PettingZoo cannot make it parallel; use mode='turns'")
    try:
        from pettingzoo.utils.conversions import aec_to_parallel
    except ImportError:
        raise missing("pettingzoo", "pettingzoo") from None
    return aec_to_parallel(env)
