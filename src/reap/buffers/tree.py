"""SumTree: draw indices in proportion to their priority. Whole arrays at each level, no loop over items.

    top      ≤ 4096 nodes               one running sum, one binary search
    …        two children each          all items go down together: left, or right with the left's mass taken off
    leaves   one priority per row       0: never drawn

A node is (sum, smallest): two children are one cache line. A sum is always made anew from its children: no error piles
up, however many updates there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_TOP = 4096
Array = np.ndarray[Any, Any]


class SumTree:
    """Priorities of `size` items, their sum and the smallest positive one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._levels: list[Array] = []
        while True:
            size += size % 2
            self._levels.append(np.tile([0.0, np.inf], (size, 1)))
            if size <= _TOP:
                break
            size //= 2

    def __getitem__(self, index: Array) -> Array:
        found: Array = self._levels[0][index, 0]
        return found

    def __setitem__(self, index: Array, priority: Array | float) -> None:
        self._levels[0][index] = _nodes(priority)
        for level, below in zip(self._levels[1:], self._levels):
            index = index >> 1
            pairs = below.reshape(-1, 4).take(index, axis=0)
            pairs[:, 0] += pairs[:, 2]
            np.minimum(pairs[:, 1], pairs[:, 3], out=pairs[:, 1])
            level[index] = pairs[:, :2]

    def fill(self, first: int, end: int, priority: Array | float) -> None:
        """Items [first, end): one value, or one each."""
        self._levels[0][first:end] = _nodes(priority)
        for level, below in zip(self._levels[1:], self._levels):
            first, end = first // 2, (end + 1) // 2
            pairs = below[2 * first : 2 * end].reshape(-1, 4)
            level[first:end, 0] = pairs[:, 0] + pairs[:, 2]
            np.minimum(pairs[:, 1], pairs[:, 3], out=level[first:end, 1])

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._levels[-1][:, 0].sum())

    @property
    def least(self) -> float:
        """The smallest priority above zero."""
        return float(self._levels[-1][:, 1].min())

    def draw(self, uniform: Array) -> Array:
        """Items in proportion to their priority, for numbers in [0, 1)."""
        running = self._levels[-1][:, 0].cumsum()
        mass = uniform * running[-1]
        # Rounding may put the mass at the very end: then the last node that has any is meant.
        index: Array = np.minimum(running.searchsorted(mass, "right"), running.searchsorted(running[-1], "left"))
        before = np.concatenate([[0.0], running])
        mass -= before.take(index)
        for level in self._levels[-2::-1]:
            sums = level.reshape(-1)
            index *= 4
            left = sums.take(index)
            right = (mass >= left) & (sums.take(index + 2) > 0)
            mass -= left * right
            index >>= 1
            index += right
        return index


def _nodes(priority: Array | float) -> Array:
    priority = np.asarray(priority, np.float64)
    return np.stack([priority, np.where(priority > 0, priority, np.inf)], -1)
