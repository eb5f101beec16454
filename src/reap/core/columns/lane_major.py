"""Contiguous batches without fresh memory: their large columns are copied into memory that is lent, as slots are.

    a slot, `[T, N, …]` in memory  ── copy ──►  lanes first in memory  ── lend ──►  the consumer
                                                 ▲                                     │
                                                 └────── nobody looks at it any more ──┘

Fresh memory costs as much as the copy: the system clears each page when it is first written to. A consumer that drops
its batches makes two blocks take turns; what one that keeps them gets beside these is fresh, and its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from reap.core.slot import Layout, Pool, Slot, aligned
from reap.spec import Key, Leaf, numpy_dtype

Arrays = Mapping[Key, "np.ndarray[Any, Any]"]

LARGE = 1 << 20  # bytes of a column: less comes from the heap, whose pages stay
_RESERVE = -1  # the index of the slot that a pool gives where all others are lent
_BLOCKS = 2  # one for the batch in the consumer's hands, one for the next


class LaneMajorCopies:
    """Copies of columns with lanes first in memory, for the batches of one collector."""

    def __init__(self) -> None:
        self.idle_for: Layout | None = None  # rollouts that have no large columns
        self._layout: Layout | None = None  # of the rollouts so far
        self._pool: Pool | None = None

    def of(self, arrays: Arrays, layout: Layout) -> Arrays:
        """The columns of a rollout: large ones as copies `[T, N, …]` with lanes first in memory, others as they are."""
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
        if slot.index == _RESERVE:  # the consumer holds all there may be
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
    """The columns worth it, of those that are delivered in another order than they lie in."""
    if not layout.batched or layout.lanes == 1 or layout.steps == 1:
        return {}
    rows = layout.lanes * layout.steps
    found = {}
    for key, leaf in layout.columns.items():
        if leaf.loose or leaf.once or key in layout.look.hidden:
            continue
        if rows * int(np.prod(leaf.shape, dtype=np.int64)) * numpy_dtype(leaf.dtype).itemsize >= LARGE:
            found[key] = leaf
    return found


def _lane_major_slot(layout: Layout, index: int) -> Slot:
    """A slot whose columns are `[T, N, …]` as ever, each in memory of its own in which lanes come first.

    The reserve has none: what a consumer gets in place of it is copied as small columns are.
    """
    arrays = {}
    for key, leaf in layout.columns.items() if index != _RESERVE else ():
        shape, dtype = (layout.lanes, layout.steps, *leaf.shape), np.dtype(numpy_dtype(leaf.dtype))
        with layout.needing_memory():
            memory = aligned(np.empty, math.prod(shape) * dtype.itemsize)
        whole = memory.view(dtype).reshape(shape)
        arrays[key] = whole.swapaxes(0, 1)
    return Slot(layout, index, arrays)
