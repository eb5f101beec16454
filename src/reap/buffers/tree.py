"""SumTree: draws indices in proportion to their priority. Each level is one array; there is no loop over items.

    top      ≤ 4096 sums                one running sum, one binary search
    …        8 children each            the chosen nodes' children are one cache line: gather, running sum, count
    leaves   one priority per row       0: never drawn

A sum is always recomputed from its children, so that rounding errors do not accumulate over updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_TOP = 4096
_FAN, _EIGHT = 8, np.ones(8)
_BLOCK = 64  # leaves that share one entry of `_mins`, their smallest positive priority
_BELOW = 1 - 2**-52
_ONES = np.int64(0x0101010101010101)  # times 8 flags of one byte each: the number of set flags, in the highest byte
Array = np.ndarray[Any, Any]


class SumTree:
    """Holds the priorities of `size` items, their sums and the smallest positive priority."""

    def __init__(self, size: int) -> None:
        self.size = size
        size = -(-size // _BLOCK) * _BLOCK
        self._mins = np.full(size // _BLOCK, np.inf)
        self._sums = [np.zeros(size)]
        while size > _TOP:
            size = -(-size // (_FAN * _FAN)) * _FAN
            self._sums.append(np.zeros(size))

    def __getitem__(self, index: Array) -> Array:
        found: Array = self._sums[0].take(index)
        return found

    def __setitem__(self, index: Array, priority: Array) -> None:
        leaves, blocks = self._sums[0], index // _BLOCK
        lost = leaves.take(index) <= self._mins.take(blocks)  # overwrites its block's smallest: recompute that below
        leaves[index] = priority
        np.minimum.at(self._mins, blocks, np.where(priority > 0, priority, np.inf))
        if lost.any():
            self._refresh_minima(blocks[lost])
        for sums, below in zip(self._sums[1:], self._sums):
            index = index // _FAN
            sums[index] = below.reshape(-1, _FAN).take(index, axis=0) @ _EIGHT

    def fill(self, first: int, end: int, priority: Array | float) -> None:
        """Set the priorities of items [first, end) to one value, or to one value each."""
        if first == end:
            return
        self._sums[0][first:end] = priority
        self._refresh_minima(np.arange(first // _BLOCK, (end - 1) // _BLOCK + 1))
        for sums, below in zip(self._sums[1:], self._sums):
            first, end = first // _FAN, -(-end // _FAN)
            sums[first:end] = below[first * _FAN : end * _FAN].reshape(-1, _FAN) @ _EIGHT

    def _refresh_minima(self, blocks: Array) -> None:
        leaves = self._sums[0].reshape(-1, _BLOCK).take(blocks, axis=0)
        self._mins[blocks] = np.where(leaves > 0, leaves, np.inf).min(1)

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._sums[-1].sum())

    @property
    def least(self) -> float:
        """The smallest priority above zero."""
        return float(self._mins.min())

    def draw(self, uniform: Array) -> Array:
        """Return items drawn in proportion to their priority, one for each number in [0, 1)."""
        running = self._sums[-1].cumsum()
        mass = np.minimum(uniform * running[-1], running[-1] * _BELOW)
        index: Array = running.searchsorted(mass, "right")
        mass -= np.where(index > 0, running.take(index - 1), 0.0)
        rows = np.arange(0, _FAN * len(mass), _FAN)
        for sums in self._sums[-2::-1]:
            running = sums.reshape(-1, _FAN).take(index, axis=0).cumsum(1)
            # Rounding may put the mass at or beyond the end. Just below the end, it falls to the last child above zero.
            np.minimum(mass, running[:, -1] * _BELOW, out=mass)
            child = (running <= mass[:, None]).view(np.int64)[:, 0] * _ONES >> 56
            mass -= np.where(child > 0, running.take(rows + child - 1), 0.0)
            index = index * _FAN + child
        return index
