"""PerLanePolicy: a policy of whole TensorDicts for asynchronous lanes, which act whenever they are ready.

Such a policy finds at each step what it wrote at the last one. A lane's last step may be many rows ago and at another
position of the row, so what was written is kept by lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap.core.policy import PolicyWrapper, TensorDictPolicy
from reap.core.slot import MASK, Row, Slot
from reap.spec import LANE_AT, Key

Array = np.ndarray[Any, Any]
_DONE: Key = ("next", "done")


class PerLanePolicy(PolicyWrapper):
    """Runs `policy` with a memory of what it wrote for each lane; lanes whose episode ended find zeros."""

    policy: TensorDictPolicy

    def __init__(self, policy: TensorDictPolicy, lanes: int) -> None:
        super().__init__(policy)
        self.inputs, self._lanes = (*policy.inputs, LANE_AT), lanes
        self._kept: dict[Key, Tensor] = {}
        self._last: tuple[Array, Array] | None = None  # of the last row: where episodes ended, and where frames are

    def act(self, row: Row) -> None:
        *inputs, ready = row.inputs
        count = int((ready >= 0).sum())
        lanes = ready[:count]
        if self._last is not None:
            done, frame = self._last  # a position without a frame held the answer to a reset
            self._forget(lanes[torch.from_numpy(done[:count] | ~frame[:count])])
        kept = {key: memory[lanes.to(memory.device)] for key, memory in self._kept.items()}
        values, now = self.policy.answer(tuple(value[:count] for value in inputs), kept, (count,))
        for key, value in now.items():
            if isinstance(value, Tensor):
                if key not in self._kept:
                    self._kept[key] = value.new_zeros((self._lanes, *value.shape[1:]))
                self._kept[key][lanes.to(value.device)] = value.detach()
        decided = Row()
        decided.outputs = tuple(column[:count] for column in row.outputs)
        self.policy.write(values, decided)
        for column in row.outputs:
            column[count:] = column[0]  # these belong to no lane, but checks at the end of the rollout read them too
        assert row.mask is not None
        self._last = row.done, row.mask

    def end(self, slot: Slot, steps: int) -> None:
        done, mask = slot.arrays[_DONE], slot.arrays[MASK]
        self._last = done[steps - 1, :, 0].copy(), mask[steps - 1].copy()  # copies: the slot will be refilled
        super().end(slot, steps)

    def forget(self, lanes: Sequence[int]) -> None:
        """Forget every lane: resets between rollouts always reset all asynchronous lanes."""
        self._kept.clear()
        self._last = None

    def _forget(self, lanes: Tensor) -> None:
        for memory in self._kept.values():
            memory[lanes.to(memory.device)] = 0
