"""PufferLib-style envs: they write into buffers they are given, and the slot's own rows can be those buffers.

    bound once      env.step ──► the env's buffers ──► copied to the row
    rebindable      env.bind(the row's arrays); env.step ──► the row            the env's write is the only write

A PufferLib env resets inside `step` and overwrites the last observation of an episode. It cannot give true data and is
refused, unless the user accepts `lost_finals="repeat"`: the successor at an episode's end is then a repetition of the
observation acted on, and `("next", "final_lost")` marks the row. An env that keeps the last observation has two members
beside PufferLib's:

    autoreset = False
    def reset_lanes(self, mask): …      # bool [N]: begin new episodes there, write those rows of self.observations

and, to write into slots directly, a third, called before every step:

    def bind(self, observations, rewards, terminals, truncations): …      # contiguous, [N, …]; write all of them

An env with `bind` promises to write every observation and reward at every step: otherwise the slot's old contents would
be taken for them (flags are cleared beforehand). `rebind=True` makes the same promise for an env without `bind`; its
attributes of these names are then assigned. Between calls the env holds buffers of its own, never a slot's.

No adapter can detect that some C envs of PufferLib reset at a time limit without setting any flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from reap.core.env import Env, Rows
from reap.core.resume import CannotResume, has_own_state, packed, unpacked
from reap.core.slot import Row
from reap.envs.base import EnvBase
from reap.envs.spaces import Actions, Observations
from reap.errors import SpecMismatch, UsageError, WrongArgument, reraise
from reap.seeding import fresh_seed, next_seed
from reap.spec import EnvSpec, Key, Leaf

LOST: Key = ("final_lost",)
BUFFERS = ("observations", "rewards", "terminals", "truncations")
_UNTOUCHED = 0xA5  # fills a buffer, to detect that nothing was written to it


def is_puffer(thing: Any) -> bool:
    """Whether this env has PufferLib's buffers, without importing pufferlib."""
    needed = ("single_observation_space", "single_action_space", "num_agents", *BUFFERS)
    return all(hasattr(thing, name) for name in needed)


class PufferLanes(Env):
    """A native PufferLib env, one lane for each of its agents."""

    def __init__(
        self,
        env: Any,
        *,
        lost_finals: Literal["error", "repeat"] = "error",
        rebind: bool = False,
        categorical: bool = False,
    ) -> None:
        name = type(env).__name__
        if getattr(env, "emulated", False) or getattr(env, "driver_env", env) is not env:
            raise UsageError(f"{name} is a PufferLib wrapper; pass the native env inside it")
        if lost_finals not in ("error", "repeat"):
            raise WrongArgument(f"lost_finals must be 'error' or 'repeat', got {lost_finals!r}")
        self.env = env
        self._autoreset = bool(getattr(env, "autoreset", True))
        if self._autoreset and lost_finals == "error":
            raise UsageError(
                f"{name} resets inside step, and the last observation of an episode is lost; give it autoreset = False "
                f"and reset_lanes(mask), or accept repeated ones: PufferLibEnv(env, lost_finals='repeat')"
            )
        if not self._autoreset and not callable(getattr(env, "reset_lanes", None)):
            raise UsageError(f"{name} has autoreset = False but no reset_lanes(mask) to begin new episodes with")
        self._count = int(env.num_agents)
        self._observations = Observations(env.single_observation_space, categorical=categorical)
        self._actions = Actions(env.single_action_space, categorical=categorical)
        shape, dtype = self._observations.plain
        if shape is None:
            raise UsageError(f"{name}'s observations must be a Box with a shape, not {env.single_observation_space}")
        self._decode: Callable[..., Any] = self._actions.decoder(self._actions.leaves, batch=True)
        self._bind: Callable[..., None] | None = getattr(env, "bind", self._assign if rebind else None)
        self._own_buffers = (
            np.full((self._count, *shape, np.dtype(dtype).itemsize), _UNTOUCHED, np.uint8).view(dtype)[..., 0],
            np.zeros(self._count, np.float32),
            np.zeros(self._count, np.bool_),
            np.zeros(self._count, np.bool_),
        )
        self._seed, self._started, self._closed = fresh_seed(), False, False
        self._last_observations = np.zeros((self._count, *shape), dtype)  # used only if finals are lost
        self._reset_by_env: set[int] = set()  # lanes that the env reset in its last step
        marks = {LOST: Leaf((1,), torch.bool)} if self._autoreset else {}
        self.spec = EnvSpec(
            observation={**self._observations.leaves, **marks},
            action=self._actions.leaves,
            lanes=self._count,
            batched=True,
            single_steps=False,
            single_resets=not self._autoreset,
            side=frozenset(marks),
        )

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._decode = self._actions.decoder(action, batch=True)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        chosen = list(lanes)
        every = len(chosen) == self._count
        try:
            if seeds is None and self._reset_by_env.issuperset(chosen):
                into[0][chosen] = self._last_observations[chosen]
            else:
                if every and (self._autoreset or seeds is not None or not self._started):
                    self._reset_all(seeds)
                elif not self._autoreset:
                    mask = np.zeros(self._count, np.bool_)
                    mask[chosen] = True
                    self.env.reset_lanes(mask)
                else:
                    raise UsageError(f"{type(self.env).__name__} cannot reset single lanes")
                self._observations.write_batch(self.env.observations, into[:1], slice(None) if every else chosen)
        except Exception as cause:
            reraise("env.reset", cause)
        if self._autoreset:
            into[1][chosen] = False
            self._last_observations[chosen] = into[0][chosen]
            self._reset_by_env.difference_update(chosen)

    def _reset_all(self, seeds: Sequence[int] | None) -> None:
        if self._bind is not None and not self._started:
            self._bind(*self._own_buffers)
        # Always pass a seed: without one some of PufferLib's envs repeat the same random numbers.
        self._seed = next_seed(self._seed) if seeds is None else int(seeds[0])
        self.env.reset(self._seed % 2**31)
        if self._bind is not None and not self._started and (self._own_buffers[0].view(np.uint8) == _UNTOUCHED).all():
            raise UsageError(
                f"{type(self.env).__name__} ignores buffers assigned after construction; do not set rebind"
            )
        self._started = True

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        bind, seen = self._bind, row.next[0]
        buffers = seen, row.reward, row.terminated, row.truncated
        try:
            if bind is not None:
                bind(*buffers)
            observation, reward, terminated, truncated, _ = self.env.step(self._decode(*row.action))
            if bind is None:
                self._observations.write_batch(observation, row.next[:1], slice(None))
                row.reward[...] = reward
            elif any(a is not b for a, b in zip((observation, reward, terminated, truncated), buffers)):
                raise SpecMismatch("env.step returned other arrays than the buffers it was given to write to")
        except Exception as cause:
            reraise("env.step", cause)
        finally:
            if bind is not None:
                bind(*self._own_buffers)
        masks = getattr(self.env, "masks", None)
        if masks is not None and not masks.all():
            raise UsageError(
                f"agents {np.flatnonzero(~masks).tolist()} have left; PufferLibEnv needs an env whose agents all stay"
            )
        done = np.logical_or(terminated, truncated)
        ended: list[int] = np.flatnonzero(done).tolist()
        if ended:
            row.terminated[...], row.truncated[...], row.done[...] = terminated, truncated, done
        if self._autoreset:
            self._repeat_finals(ended, row)
        return ended

    def _repeat_finals(self, ended: list[int], row: Row) -> None:
        """Keep the reset observations of ended lanes, put repeated ones into `row.next`, and mark the rows."""
        seen, lost = row.next[0], row.next[1]
        repeated = self._last_observations[ended]
        self._last_observations[...] = seen
        seen[ended] = repeated
        lost[...] = False
        lost[ended] = True
        self._reset_by_env = set(ended)

    def _assign(self, *buffers: np.ndarray[Any, Any]) -> None:
        for name, buffer in zip(BUFFERS, buffers):
            setattr(self.env, name, buffer)

    def open_state(self) -> Any:
        env = self.env
        if not has_own_state(env):
            raise CannotResume(
                f"{type(env).__name__} may keep its state in memory of its own, as PufferLib's envs do; "
                f"implement get_state() and set_state(state) so that its episodes can be resumed"
            )
        own = [packed(array) for array in (self._last_observations, *self._own_buffers)]
        return {"env": packed(env.get_state()), "arrays": own, "seed": self._seed, "begun": sorted(self._reset_by_env)}

    def load_open_state(self, state: Any) -> None:
        self.env.set_state(unpacked(state["env"]))
        for mine, kept in zip((self._last_observations, *self._own_buffers), state["arrays"]):
            mine[...] = unpacked(kept)
        self._seed, self._reset_by_env, self._started = int(state["seed"]), set(state["begun"]), True

    def close(self) -> None:
        if not self._closed:  # C code frees its memory on every call
            self._closed = True
            self.env.close()


class PufferLibEnv(EnvBase):
    """A native PufferLib env, or one written to its interface; each agent is a lane.

    >>> collector = Collector(PufferLibEnv(env, lost_finals="repeat"), policy, frames_per_batch=4096 * 64)

    Args:
        env: an env with PufferLib's buffers and spaces; see `reap.envs.adapters.puffer` for further members.
        lost_finals: what to do with an env that resets inside `step`: "error" refuses it, "repeat" repeats the
            observations acted on and marks them.
        rebind: assign the slot's arrays to the env's buffer attributes; the env must write them in full at every step.
        categorical_action_encoding: encode discrete spaces as an index instead of one-hot.
    """

    def __init__(
        self,
        env: Any,
        *,
        lost_finals: Literal["error", "repeat"] = "error",
        rebind: bool = False,
        categorical_action_encoding: bool = False,
        device: Any = None,
    ) -> None:
        if not is_puffer(env):
            raise WrongArgument(
                f"PufferLibEnv takes an env with single_observation_space, single_action_space, num_agents and the "
                f"buffers {', '.join(BUFFERS)}; {type(env).__name__} lacks some of them"
            )
        lanes = PufferLanes(env, lost_finals=lost_finals, rebind=rebind, categorical=categorical_action_encoding)
        super().__init__(lanes, device=device)
