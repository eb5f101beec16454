"""StepLimit: truncate episodes after a number of steps, and report the step count as a column.

It wraps any env; the rollout loop does not know about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from reap.core.device.device_env import DeviceEnv, WrappedOnDevice
from reap.core.env import Env, Rows
from reap.core.slot import Row
from reap.core.wrapped import Wrapped
from reap.errors import UsageError
from reap.spec import EnvSpec, Key, Leaf, show

STEP_COUNT: Key = ("step_count",)


class StepLimit(Wrapped):
    """Truncates after `limit` steps and reports the count as `key`: 0 at a reset, counted up by each step.

    Errors name what the user asked for the limit with: the option `max_frames_per_traj`, or the transform `transform`.
    """

    def __init__(self, env: Env, limit: int, key: Key = STEP_COUNT, *, transform: str | None = None) -> None:
        who = transform or "max_frames_per_traj"
        if key in env.spec.observation:
            way = "leave one of them out" if transform is None else "give it another key"
            raise UsageError(f"{who} adds {show(key)}, which the env has already; {way}")
        self._limit = limit
        spec = env.spec
        observation = {**spec.observation, key: Leaf((1,), torch.int64)}
        if not spec.single_resets:
            way = ""
            if spec.ready_of is not None and transform is None:
                way = ": give max_frames_per_traj to the AsyncEnvPool itself"
            elif spec.ready_of is not None:
                way = f": wrap each env of the pool, TransformedEnv(env, {transform}(…))"
            raise UsageError(f"{who} needs an env that resets single lanes, which this one cannot do{way}")
        super().__init__(env, dataclasses.replace(spec, observation=observation, side=spec.side | {key}))
        self._count_leaf = len(spec.observation)  # in a row; wrappers around this one append their leaves
        self._count = np.zeros(spec.lanes, np.int64)
        self._skips_rows = spec.rows != "whole"
        places = {key: n for n, key in enumerate(spec.observation)}
        groups = [key[:-1] for key in places if len(key) > 1 and key[-1] == "truncated"]
        self._groups = [(places[(*group, "truncated")], places[(*group, "done")]) for group in groups]

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into[: self._count_leaf], seeds)
        self._count[list(lanes)] = 0
        into[self._count_leaf][list(lanes)] = 0

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        ended = self._env.step(lanes, row)
        count = self._count
        if row.mask is not None and self._skips_rows:  # only frames count
            count[[lane for lane in lanes if row.mask[lane]]] += 1
        elif ended and self._env.reports_cuts:  # a lane that ended without being done has failed, and made no frame
            count[[lane for lane in lanes if row.done[lane] or lane not in ended]] += 1
        elif len(lanes) == len(count):
            count += 1
        else:
            count[list(lanes)] += 1
        row.next[self._count_leaf][:, 0] = count
        over = count >= self._limit
        if over.any():
            for lane in np.flatnonzero(over).tolist():
                if lane in lanes:
                    row.truncated[lane] = row.done[lane] = True
                    for truncated, done in self._groups:  # agents that had not ended yet are truncated
                        row.next[truncated][lane] |= ~row.next[done][lane]
                        row.next[done][lane] = True
                    if lane not in ended:
                        ended.append(lane)
            ended.sort()
        return ended

    def open_state(self) -> Any:
        return {"env": self._env.open_state(), "count": torch.from_numpy(self._count.copy())}

    def load_open_state(self, state: Any) -> None:
        self._env.load_open_state(state["env"])
        self._count[...] = state["count"]

    def on_device(self) -> DeviceEnv | None:
        there = self._env.on_device()
        return None if there is None else DeviceStepLimit(there, self.spec, self._limit)


class DeviceStepLimit(WrappedOnDevice):
    """`StepLimit` for an env whose rows are tensors on its own device."""

    def __init__(self, env: DeviceEnv, spec: EnvSpec, limit: int) -> None:
        super().__init__(env, spec)
        self._limit, self.holders = limit, [*env.holders, self]
        self.count = torch.zeros(spec.lanes, dtype=torch.int64, device=env.device)

    def reset(self, lanes: Sequence[int], into: Sequence[Any], seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into[: self._own], seeds)
        chosen = torch.as_tensor(list(lanes), device=self.device)
        self.count[chosen] = 0
        into[self._own][chosen] = 0

    def step(self, lanes: Sequence[int], row: Any) -> list[int]:
        self._env.step(lanes, row)
        self.count += 1
        row.next[self._own].copy_(self.count[:, None])
        row.truncated |= self.count >= self._limit
        torch.logical_or(row.terminated, row.truncated, out=row.done)
        return []

    def after_step(self, row: Any) -> None:
        self._env.after_step(row)
        self.count.masked_fill_(row.done, 0)
        row.after[self._own].copy_(self.count[:, None])

    def open_state(self) -> Any:
        return {"env": self._env.open_state(), "count": self.count.cpu()}

    def load_open_state(self, state: Any) -> None:
        self._env.load_open_state(state["env"])
        self.count.copy_(state["count"])
