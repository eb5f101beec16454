"""PerLanePolicy: a policy of whole TensorDicts, where lanes come as they are ready.

Such a policy finds at each step what it wrote at the last one. The last one of a lane may be many rows ago and at
another position: so it is kept by lane, and each finds its own.
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
    """`policy`, with a memory of so many lanes; those whose episode ended find zeros."""

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
            done, frame = self._last  # no frame: what came was the answer to a reset
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
            column[count:] = column[0]  # nobody's, but looked through with the others when the rollout ends
        assert row.mask is not None
        self._last = row.done, row.mask

    def end(self, slot: Slot, steps: int) -> None:
        done, mask = slot.arrays[_DONE], slot.arrays[MASK]
        self._last = done[steps - 1, :, 0].copy(), mask[steps - 1].copy()  # before the slot is filled anew
        super().end(slot, steps)

    def forget(self, lanes: Sequence[int]) -> None:
        """All lanes begin anew: there is no other reset here."""
        self._kept.clear()
        self._last = None

    def _forget(self, lanes: Tensor) -> None:
        for memory in self._kept.values():
            memory[lanes.to(memory.device)] = 0
