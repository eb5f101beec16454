"""Gaps: rows of a rollout without a frame, where an env spent a step on a reset. They are closed after the last step.

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


def close_gaps(mask: Array, columns: Sequence[Array], when: Array, where: Array) -> Array:
    """Move the frames of each lane together, in `columns` and `mask`; returns at which steps those at `when` are now.

    Rows only move up, so that going down in blocks nothing is written before it is read.
    """
    steps, lanes = mask.shape
    place = running(np.add, mask.view(np.int8), np.empty(mask.shape, np.int32))
    made = place[-1].copy()
    moved = place[when, where] - 1
    place *= lanes
    place += np.arange(-lanes, 0, dtype=np.int32)
    frames = np.flatnonzero(mask)
    source = np.zeros(mask.shape, np.intp)
    source.reshape(-1)[place.reshape(-1)[frames]] = frames
    np.less(np.arange(steps)[:, None], made, out=mask)
    block = max(1, _BLOCK // lanes)
    for column in columns:
        rows = column.reshape(mask.size, *column.shape[2:])  # a copy where workers share a slot
        held = np.empty((block, *column.shape[1:]), column.dtype)
        for t in range(0, steps, block):
            part = source[t : t + block]
            np.take(rows, part, axis=0, out=held[: len(part)], mode="clip")
            column[t : t + block] = held[: len(part)]
    return moved


def clear_rest(mask: Array, columns: Sequence[Array]) -> None:
    """Zeros where no frame is."""
    step, lane = np.nonzero(~mask)
    for column in columns:
        column[step, lane] = 0
