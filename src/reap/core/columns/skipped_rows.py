"""Skipped rows: removes rows without a frame, where an env spent a step on a reset, after the last step.

lane 0   a0 a1 ·  b0 b1          a0 a1 b0 b1 ·
lane 1   c0 ·  d0 d1 d2    ──►   c0 d0 d1 d2 ·
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_WIDE = 128  # from this many lanes on, NumPy is faster row by row than with `accumulate`
_BLOCK = 16384  # frames moved at a time, few enough to stay in the cache


def running(op: np.ufunc, rows: Array, out: Array) -> Array:
    """Compute `op.accumulate` along the first axis into `out`, and return it."""
    if len(rows) == 0 or rows.shape[1] < _WIDE:
        op.accumulate(rows, axis=0, out=out, dtype=out.dtype)
        return out
    out[0] = rows[0]
    for t in range(1, len(rows)):
        op(out[t - 1], rows[t], out=out[t])
    return out


def close_gaps(mask: Array, columns: Sequence[Array], when: Array, where: Array) -> tuple[Array, Array]:
    """Move the frames of each lane together, in `columns` and `mask`.

    Returns the steps to which the frames at (`when`, `where`) moved, and the number of frames of each lane. Frames only
    move to earlier rows, so working in blocks from the first row on overwrites nothing that is still to be read.
    """
    steps, lanes = mask.shape
    gap, lane = np.divmod(np.flatnonzero(~mask), lanes)
    order = _by_lane(lane, lanes)
    gap, lane = gap[order], lane[order]
    gaps = np.bincount(lane, minlength=lanes)
    first = np.cumsum(gaps) - gaps
    earlier = np.arange(len(gap)) - first[lane]  # earlier gaps of the same lane
    order = _by_lane(where, lanes)
    end, of = when[order], where[order]
    moved = np.empty_like(when)
    moved[order] = end - (np.searchsorted(lane * steps + gap, of * steps + end) - first[of])
    ahead = np.zeros(mask.shape, np.int32)  # for each place, how far behind it the frame lies that belongs there
    ahead[gap - earlier, lane] = (earlier + 1) * lanes
    running(np.maximum, ahead, ahead)
    np.less(np.arange(steps)[:, None], steps - gaps, out=mask)
    block = min(steps, max(1, _BLOCK // lanes))
    place = np.arange(block * lanes).reshape(block, lanes)
    source = np.empty_like(place)
    rows = [column.reshape(mask.size, *column.shape[2:]) for column in columns]  # these are copies in a shared slot
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
    """Return the order that sorts by lane and keeps the order of time within each lane."""
    return np.argsort(lane.astype(np.int16) if lanes < 2**15 else lane, kind="stable")  # int16: NumPy uses radix sort


def clear_rest(mask: Array, columns: Sequence[Array]) -> None:
    """Write zeros to rows without a frame."""
    step, lane = np.divmod(np.flatnonzero(~mask), mask.shape[1])  # `nonzero` of two dimensions takes 3 times as long
    for column in columns:
        column[step, lane] = 0
