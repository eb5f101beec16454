"""Skipped rows: rows without a frame, where an env spent a step on a reset. They are closed after the last step.

lane 0   a0 a1 ·  b0 b1          a0 a1 b0 b1 ·
lane 1   c0 ·  d0 d1 d2    ──►   c0 d0 d1 d2 ·
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_WIDE = 128  # lanes from which NumPy is faster row by row than by `accumulate`
_BLOCK = 16384  # frames moved at once: they stay in the cache


def running(op: np.ufunc, rows: Array, out: Array) -> Array:
    """`op.accumulate` along the first axis."""
    if len(rows) == 0 or rows.shape[1] < _WIDE:
        op.accumulate(rows, axis=0, out=out, dtype=out.dtype)
        return out
    out[0] = rows[0]
    for t in range(1, len(rows)):
        op(out[t - 1], rows[t], out=out[t])
    return out


def close_gaps(mask: Array, columns: Sequence[Array], when: Array, where: Array) -> tuple[Array, Array]:
    """Move the frames of each lane together, in `columns` and `mask`.

    Returns at which steps those at `when` are now, and how many frames each lane has. Rows only move up, so that going
    down in blocks nothing is written before it is read.
    """
    steps, lanes = mask.shape
    gap, lane = np.divmod(np.flatnonzero(~mask), lanes)
    order = _by_lane(lane, lanes)
    gap, lane = gap[order], lane[order]
    gaps = np.bincount(lane, minlength=lanes)
    first = np.cumsum(gaps) - gaps
    earlier = np.arange(len(gap)) - first[lane]  # gaps of the same lane
    order = _by_lane(where, lanes)
    end, of = when[order], where[order]
    moved = np.empty_like(when)
    moved[order] = end - (np.searchsorted(lane * steps + gap, of * steps + end) - first[of])
    ahead = np.zeros(mask.shape, np.int32)  # how far the frame that belongs at a place is from it
    ahead[gap - earlier, lane] = (earlier + 1) * lanes
    running(np.maximum, ahead, ahead)
    np.less(np.arange(steps)[:, None], steps - gaps, out=mask)
    block = min(steps, max(1, _BLOCK // lanes))
    place = np.arange(block * lanes).reshape(block, lanes)
    source = np.empty_like(place)
    rows = [column.reshape(mask.size, *column.shape[2:]) for column in columns]  # copies where workers share a slot
    held = [np.empty((block, *column.shape[1:]), column.dtype) for column in columns]
    for t in range(0, steps, block):
        count = min(block, steps - t)
        np.add(ahead[t : t + count], place[:count], out=source[:count])
        for column, whole, part in zip(columns, rows, held):
            np.take(whole, source[:count], axis=0, out=part[:count], mode="clip")
            column[t : t + count] = part[:count]
        place += block * lanes
    return moved, steps - gaps


def _by_lane(lane: Array, lanes: int) -> Array:
    """The order by lane, and in time within each."""
    return np.argsort(lane.astype(np.int16) if lanes < 2**15 else lane, kind="stable")  # short numbers: a radix sort


def clear_rest(mask: Array, columns: Sequence[Array]) -> None:
    """Write zeros where no frame is."""
    step, lane = np.divmod(np.flatnonzero(~mask), mask.shape[1])  # `nonzero` of two dimensions takes thrice as long
    for column in columns:
        column[step, lane] = 0
