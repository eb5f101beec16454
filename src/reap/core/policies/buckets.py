"""Buckets: of a wide row the policy decides only about as much as lanes stand in, rounded up to one of few sizes.

    row of 16 positions, 3 lanes stand in it    [ 5 0 7 · · · · · · · · · · · · · ]
    what the policy sees                        [ 5 0 7 · ]                             4: the next of 1 2 4 8 16

Few sizes, so that a policy that is recorded for each of them is recorded few times, and replayed ever after.
"""

from __future__ import annotations

from collections.abc import Callable

from reap.core.policy import Policy, PolicyWrapper
from reap.core.slot import Row


def powers(most: int) -> list[int]:
    """The powers of two below `most`, and `most`."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


class Bucketed(PolicyWrapper):
    """`policy`, on the first positions of rows of `width`; `filled` says in how many of them a lane stands."""

    def __init__(self, policy: Policy, width: int, filled: Callable[[], int]) -> None:
        super().__init__(policy)
        self._width, self._filled = width, filled
        sizes = powers(width)
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
            column[size:] = column[0]  # nobody's, but looked through with the others when the rollout ends


def _narrowed(row: Row, size: int) -> Row:
    """The first positions of a row, as policies see it; cut once."""
    narrow = row.narrow[size] = Row()
    narrow.inputs = tuple(value[:size] for value in row.inputs)
    narrow.outputs = tuple(column[:size] for column in row.outputs)
    return narrow
