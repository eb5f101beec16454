"""Gymnasium's vector envs as lanes: every autoreset mode is converted to the one form that `Env` guarantees.

SAME_STEP   the env has reset already: the true last observation is taken from info, and the reset observation is kept
            until the loop resets the lane
DISABLED    the loop's reset is passed on, with `options={"reset_mask": …}`
NEXT_STEP   the same, if single lanes can be reset (Gymnasium's Sync- and AsyncVectorEnv). If they cannot, the env
            spends its next step on the reset; that step is no frame and is skipped: the lane's later rows move up
            and `("collector", "mask")` is False at its end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from reap.core.env import Env, Rows
from reap.core.resume import packed, unpacked
from reap.core.slot import Row
from reap.envs.adapters.gymnasium_state import restore_vector_env, saved_vector_env
from reap.envs.info import InfoKeys, info_entry, info_leaves, recorded_at_end, records_episodes
from reap.envs.spaces import Actions, Observations, checked_space, fit
from reap.errors import SpecMismatch, UsageError, raised_by, reraise
from reap.spec import EnvSpec, Key, Leaf, numpy_dtype, show


class VectorLanes(Env):
    """A `gymnasium.vector.VectorEnv`, one lane for each of its envs."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        categorical: bool = False,
        info_keys: InfoKeys = (),
    ) -> None:
        self.env = env
        self._count = env.num_envs
        mode = env.metadata.get("autoreset_mode", getattr(env, "autoreset_mode", None))
        if mode is None:
            raise UsageError(
                f"{type(env).__name__} does not say how it resets; set metadata['autoreset_mode'] to an AutoresetMode"
            )
        self.mode = AutoresetMode(mode)
        base = env.unwrapped
        if isinstance(base, AsyncVectorEnv) and not base.shared_memory and self.mode is AutoresetMode.NEXT_STEP:
            raise UsageError(
                "AsyncVectorEnv(shared_memory=False) forgets in NEXT_STEP mode that a lane was reset and spends a step "
                "on it; use shared_memory=True or another autoreset_mode"
            )
        self._resets_lanes = isinstance(base, (SyncVectorEnv, AsyncVectorEnv)) or self.mode is AutoresetMode.DISABLED
        self._observations = Observations(
            checked_space(env, "single_observation_space"), categorical=categorical, loose=True
        )
        shape, dtype = self._observations.plain
        self._plain = None if shape is None else ((self._count, *shape), dtype)  # one array: a bare row assignment
        self._actions = Actions(checked_space(env, "single_action_space"), categorical=categorical)
        self._info = info_leaves(info_keys, self._observations.leaves, env)
        self._options: type[dict[str, Any]] = _SharedOptions if records_episodes(env) else dict
        self._decode: Callable[..., Any] = self._actions.decoder(self._actions.leaves, batch=True)
        skipping = self.mode is AutoresetMode.NEXT_STEP and not self._resets_lanes
        self.spec = EnvSpec(
            observation={**self._observations.leaves, **self._info},
            action=self._actions.leaves,
            lanes=self._count,
            batched=True,
            rows="skipping" if skipping else "whole",
            single_steps=False,
            single_resets=self._resets_lanes,
            side=frozenset(self._info),
        )
        self._fresh: dict[int, tuple[Any, ...]] = {}  # SAME_STEP: lane → leaves of its reset observation
        self._resets_next: Any = None  # NEXT_STEP: mask of the lanes whose next step is their reset, or None
        self._ended = np.zeros(self._count, np.bool_)  # NEXT_STEP: lanes that ended and wait for the loop's reset
        self._just_ended: list[int] = []  # lanes that ended in the last step: the list that `step` returned

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._decode = self._actions.decoder(action, batch=True)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        if lanes is self._just_ended and seeds is None and self.spec.rows == "skipping":
            self._resets_next, self._ended = self._ended, np.zeros(self._count, np.bool_)
            self._just_ended = []
            return
        chosen = list(lanes)
        if seeds is None:  # lanes that the env resets by itself need no call
            rest = self._needing_reset_call(chosen)
            # An env that cannot reset single lanes gets one reset of all lanes, if all are due and any needs a call.
            whole = len(chosen) == self._count and not self._resets_lanes
            if not (rest and whole):
                self._take_own_resets(chosen if not rest else sorted({*chosen}.difference(rest)), into)
                chosen = rest
            if not chosen:
                return
        every = len(chosen) == self._count
        if not every and not self._resets_lanes:
            raise UsageError(
                f"{type(self.env.unwrapped).__name__} cannot reset single lanes, which max_frames_per_traj and "
                f"reset(index) need; let it honour options['reset_mask'] and declare AutoresetMode.DISABLED"
            )
        seed = None if seeds is None else self._seed_argument(chosen, seeds)
        try:
            if every:
                observation, info = self.env.reset(seed=seed)
            else:
                mask = np.zeros(self._count, np.bool_)
                mask[chosen] = True
                observation, info = self.env.reset(seed=seed, options=self._options(reset_mask=mask))
        except Exception as cause:
            raise raised_by("env.reset raised", cause) from cause
        at: Any = slice(None) if every else chosen
        self._observations.write_batch(observation, into, at)
        self._write_info(info, into, at)
        for lane in chosen if self._fresh else ():
            self._fresh.pop(lane, None)
        self._ended[chosen] = False
        if self._resets_next is not None:
            self._resets_next[chosen] = False

    def _seed_argument(self, lanes: list[int], seeds: Sequence[int]) -> Any:
        """Return the `seed` argument with which `env.reset` seeds these lanes."""
        if not isinstance(self.env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            return int(seeds[0])  # such envs have one generator for all lanes
        seed: list[int | None] = [None] * self._count
        for lane, one in zip(lanes, seeds):
            seed[lane] = int(one)
        return seed

    def _needing_reset_call(self, lanes: list[int]) -> list[int]:
        """Return the lanes that the env does not reset by itself."""
        if self.spec.rows == "skipping":
            asked = np.asarray(lanes)
            found: list[int] = asked[~self._ended[asked]].tolist()
            return found
        return [lane for lane in lanes if lane not in self._fresh]

    def _take_own_resets(self, lanes: list[int], into: Rows) -> None:
        """Reset lanes that the env has reset already (write what it kept), or will reset with its next step."""
        if self.spec.rows == "skipping":
            self._ended[lanes] = False
            if self._resets_next is None:
                self._resets_next = np.zeros(self._count, np.bool_)
            self._resets_next[lanes] = True
            return
        for lane in lanes:
            for array, value in zip(into, self._fresh.pop(lane)):
                array[lane : lane + 1] = value

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        try:
            observation, reward, terminated, truncated, info = self.env.step(self._decode(*row.action))
            if observation.__class__ is np.ndarray and (observation.shape, observation.dtype) == self._plain:
                row.next[0][...] = observation
            else:
                self._observations.write_batch(observation, row.next, slice(None))
            row.reward[...] = reward
            if self._info:
                self._write_info(info, row.next, slice(None))
        except Exception as cause:
            reraise("env.step", cause)
        if self._resets_next is not None:
            np.logical_not(self._resets_next, out=row.mask)
            self._resets_next = None
        done = np.logical_or(terminated, truncated)
        ended: list[int] = done.nonzero()[0].tolist()
        if not ended:
            return []
        row.terminated[...], row.truncated[...], row.done[...] = terminated, truncated, done
        self._ended, self._just_ended = done, ended
        if self.mode is AutoresetMode.SAME_STEP:
            for lane in ended:
                self._fresh[lane] = tuple(array[lane : lane + 1].copy() for array in row.next)
                self._observations.write(_final(info, lane), row.next, lane)
                self._write_final_info(info, row.next, lane)
        return ended

    def _write_final_info(self, whole: Mapping[str, Any], arrays: Rows, lane: int) -> None:
        info: Any = whole.get("final_info", {})
        one_per_lane = isinstance(info, np.ndarray)  # one dict per lane
        info = (info[lane] or {}) if one_per_lane else info
        for array, (key, leaf) in zip(arrays[len(self._observations.leaves) :], self._info.items()):
            value = info_entry(info, key)
            if value is None and recorded_at_end(whole, key):
                continue  # the main info, written before, reports the episode that ended
            value = value if value is None or one_per_lane else value[lane]
            array[lane] = 0 if value is None else fit(value, leaf.shape, numpy_dtype(leaf.dtype), f"info {show(key)}")

    def _write_info(self, info: Mapping[str, Any], arrays: Rows, at: Any) -> None:
        first = len(self._observations.leaves)
        for array, (key, leaf) in zip(arrays[first:], self._info.items()):
            values, given = info_entry(info, key), info.get(f"_{key[0]}")
            if values is None:
                array[at] = 0
                continue
            whole = fit(values, (self._count, *leaf.shape), numpy_dtype(leaf.dtype), f"info {show(key)}")
            if given is not None:
                whole = whole.copy()
                whole[~np.asarray(given)] = 0
            array[at] = whole[at]

    def open_state(self) -> Any:
        resetting = None if self._resets_next is None else torch.from_numpy(self._resets_next.copy())
        ended = torch.from_numpy(self._ended.copy())
        return {"env": saved_vector_env(self.env), "kept": packed(self._fresh), "resetting": resetting, "ended": ended}

    def load_open_state(self, state: Any) -> None:
        restore_vector_env(state["env"], self.env)
        self._fresh, self._just_ended = unpacked(state["kept"]), []
        self._ended = state["ended"].numpy().copy()
        self._resets_next = None if state["resetting"] is None else state["resetting"].numpy().copy()

    def close(self) -> None:
        self.env.close()


class _SharedOptions(dict[str, Any]):
    """Reset options whose `pop` removes nothing. Gymnasium's vector envs pop `reset_mask`, but RecordEpisodeStatistics
    reads it afterwards and would otherwise reset its counts in every lane.
    """

    def pop(self, key: str, *default: Any) -> Any:
        return self.get(key, *default)


def _final(info: Mapping[str, Any], lane: int) -> Any:
    """Return one lane's true last observation, from any of the info keys under which vector envs report it."""
    for key in ("final_obs", "final_observation"):
        if key in info:
            return _of_lane(info[key], lane)
    raise SpecMismatch(f"lane {lane} ended in SAME_STEP mode but info has no 'final_obs'; it holds {sorted(info)}")


def _of_lane(batch: Any, lane: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _of_lane(value, lane) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_of_lane(value, lane) for value in batch)
    return batch[lane]
