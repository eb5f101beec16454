"""Buckets: the policy acts only on the occupied positions of a wide row, rounded up to one of a few sizes.

    row of 16 positions, 3 of them hold lanes   [ 5 0 7 · · · · · · · · · · · · · ]
    what the policy sees                        [ 5 0 7 · ]                             4: the next of 1 2 4 8 16

There are few sizes, so a policy that is recorded once for each size is recorded only a few times.
"""

from __future__ import annotations

from collections.abc import Callable

from reap.core.policy import Policy, PolicyWrapper
from reap.core.slot import Row


def powers_of_two(most: int) -> list[int]:
    """Return the powers of two below `most`, then `most` itself."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


class Bucketed(PolicyWrapper):
    """Runs `policy` on the first positions of rows of `width`; `filled()` returns how many positions hold a lane."""

    def __init__(self, policy: Policy, width: int, filled: Callable[[], int]) -> None:
        super().__init__(policy)
        self._width, self._filled = width, filled
        sizes = powers_of_two(width)
        self._size_for = [next(size for size in sizes if size >= count) for count in range(width + 1)]

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.policy.remembers

    def act(self, row: Row) -> None:
        size = self._size_for[self._filled()]
        if size == self._width:
            self.policy.act(row)
            return
        self.policy.act(row.narrow.get(size) or _narrowed(row, size))
        for column in row.outputs:
            column[size:] = column[0]  # these belong to no lane, but checks at the end of the rollout read them too


def _narrowed(row: Row, size: int) -> Row:
    """Return the first `size` positions of a row as a row for policies; it is cut once and cached in the row."""
    narrow = row.narrow[size] = Row()
    narrow.inputs = tuple(value[:size] for value in row.inputs)
    narrow.outputs = tuple(column[:size] for column in row.outputs)
    return narrow
