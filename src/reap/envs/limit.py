"""StepLimit: episodes cut after so many steps, with the count as a column.

Wraps any env; the loop knows nothing of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from reap.core.env import Env, Rows, Wrapped
from reap.core.slot import Row
from reap.errors import UsageError
from reap.spec import Key, Leaf

STEP_COUNT: Key = ("step_count",)


class StepLimit(Wrapped):
    """Truncates after `limit` steps and reports `step_count`: 0 at a reset, counted up by each step."""

    def __init__(self, env: Env, limit: int) -> None:
        if STEP_COUNT in env.spec.observation:
            raise UsageError("max_frames_per_traj adds 'step_count', which the env has already; leave one of them out")
        self._limit = limit
        spec = env.spec
        observation = {**spec.observation, STEP_COUNT: Leaf((1,), torch.int64)}
        if not spec.single_resets:
            raise UsageError("max_frames_per_traj resets single lanes, which this env cannot do")
        super().__init__(env, dataclasses.replace(spec, observation=observation, side=spec.side | {STEP_COUNT}))
        self._at = len(spec.observation)  # our leaf's place in a row; others may wrap us and add theirs behind it
        self._count = np.zeros(spec.lanes, np.int64)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into[: self._at], seeds)
        self._count[list(lanes)] = 0
        into[self._at][list(lanes)] = 0

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        ended = self._env.step(lanes, row)
        count = self._count
        if row.mask is not None:  # only frames count
            count[[lane for lane in lanes if row.mask[lane]]] += 1
        elif len(lanes) == len(count):
            count += 1
        else:
            count[list(lanes)] += 1
        row.next[self._at][:, 0] = count
        over = count >= self._limit
        if over.any():
            for lane in np.flatnonzero(over).tolist():
                if lane in lanes:
                    row.truncated[lane] = row.done[lane] = True
                    if lane not in ended:
                        ended.append(lane)
            ended.sort()
        return ended
