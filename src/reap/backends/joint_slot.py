"""What workers fill together: the layout of a common slot, and the last observations in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reap.core.slot import Finals, Layout
from reap.errors import SpecMismatch


def common_layout(layouts: Sequence[Layout]) -> Layout:
    """One layout with the lanes of all."""
    first = layouts[0]
    for w, layout in enumerate(layouts):
        for key in {**first.columns, **layout.columns}:
            one, other = first.columns.get(key), layout.columns.get(key)
            if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise SpecMismatch(f"workers 0 and {w} differ in {key}: {one} and {other}")
        if layout.steps != first.steps:
            raise SpecMismatch(f"workers 0 and {w} differ in steps per batch: {first.steps} and {layout.steps}")
    look = replace(first.look, dims=None)  # how lanes are arranged is the collector's affair
    return Layout(first.columns, first.steps, sum(layout.lanes for layout in layouts), batched=True, look=look)


def joined_finals(parts: Sequence[Finals | None], lanes: Sequence[int], layout: Layout) -> Finals | None:
    """Return the last observations of all workers, who have so many lanes each; None where they are in the columns."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    first = np.cumsum([0, *lanes])
    return Finals(
        lane=np.concatenate([part.lane + start for part, start in zip(known, first)]),
        step=np.concatenate([part.step for part in known]),
        values={key: np.concatenate([part.values[key] for part in known]) for key in known[0].values},
        steps=layout.steps,
        size=layout.batch_size,
    )
