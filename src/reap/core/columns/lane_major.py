"""Contiguous batches without new memory: copies their large columns into blocks that are lent and reused, like slots.

    a slot, `[T, N, …]` in memory  ── copy ──►  lanes first in memory  ── lend ──►  the consumer
                                                 ▲                                     │
                                                 └──────── no longer referenced ───────┘

New memory costs as much as the copy: the system clears each page when it is first written to. If the consumer drops its
batches, two blocks take turns. If it keeps them, further batches get new memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from reap.core.slot import Layout, Pool, Slot, aligned
from reap.spec import Key, Leaf, numpy_dtype

Arrays = Mapping[Key, "np.ndarray[Any, Any]"]

LARGE = 1 << 20  # bytes of a column: smaller ones come from the heap, whose pages are reused anyway
_RESERVE = -1  # the index of the slot that a pool returns when all others are lent
_BLOCKS = 2  # one for the batch in the consumer's hands, one for the next


class LaneMajorCopies:
    """Makes copies of columns with lanes first in memory, for the batches of one collector."""

    def __init__(self) -> None:
        self.idle_for: Layout | None = None  # the layout of the last rollout, if it has no large columns
        self._layout: Layout | None = None  # the layout of the last rollout
        self._pool: Pool | None = None

    def of(self, arrays: Arrays, layout: Layout) -> Arrays:
        """Return the columns `[T, N, …]` of a rollout; large ones are copies that have lanes first in memory."""
        if layout is not self._layout:
            if self._layout is None or not layout.same_as(self._layout):
                large = _large(layout)
                columns = Layout(large, layout.steps, layout.lanes, batched=layout.batched)
                self._pool = Pool(columns, _BLOCKS, _lane_major_slot) if large else None
            self._layout = layout
            self.idle_for = layout if self._pool is None else None
        if self._pool is None:
            return arrays
        slot = self._pool.acquire()
        if slot.index == _RESERVE:  # the consumer holds all blocks
            self._pool.release(slot)
            return arrays
        try:
            for key, mine in slot.arrays.items():
                layout.tensor(key, mine).copy_(layout.tensor(key, arrays[key]))
        except BaseException:  # Ctrl-C
            self._pool.release(slot)
            raise
        return {**arrays, **self._pool.lend(slot)}


def _large(layout: Layout) -> dict[Key, Leaf]:
    """Return the columns of at least `LARGE` bytes that are delivered in another order than they have in memory."""
    if not layout.batched or layout.lanes == 1 or layout.steps == 1:
        return {}
    rows = layout.frames
    found = {}
    for key, leaf in layout.columns.items():
        if leaf.loose or leaf.once or key in layout.look.hidden:
            continue
        if rows * leaf.nbytes >= LARGE:
            found[key] = leaf
    return found


def _lane_major_slot(layout: Layout, index: int) -> Slot:
    """Return a slot whose columns are `[T, N, …]` as usual, each in memory of its own in which lanes come first.

    The reserve has no columns: batches that would use it are copied like small columns.
    """
    arrays = {}
    for key, leaf in layout.columns.items() if index != _RESERVE else ():
        shape, dtype = (layout.lanes, layout.steps, *leaf.shape), np.dtype(numpy_dtype(leaf.dtype))
        with layout.needing_memory():
            memory = aligned(np.empty, math.prod(shape) * dtype.itemsize)
        whole = memory.view(dtype).reshape(shape)
        arrays[key] = whole.swapaxes(0, 1)
    return Slot(layout, index, arrays)
