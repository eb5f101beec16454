"""The slot that several workers fill together: its common layout, and the final observations in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reap.core.slot import Finals, Layout
from reap.errors import SpecMismatch


def common_layout(layouts: Sequence[Layout]) -> Layout:
    """Return one layout that holds the lanes of all `layouts`, which must agree in columns and steps."""
    first = layouts[0]
    for w, layout in enumerate(layouts):
        for key in {**first.columns, **layout.columns}:
            one, other = first.columns.get(key), layout.columns.get(key)
            if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise SpecMismatch(f"workers 0 and {w} differ in {key}: {one} and {other}")
        if layout.steps != first.steps:
            raise SpecMismatch(f"workers 0 and {w} differ in steps per batch: {first.steps} and {layout.steps}")
    look = replace(first.look, dims=None)  # the collector decides how lanes are arranged
    return Layout(first.columns, first.steps, sum(layout.lanes for layout in layouts), batched=True, look=look)


def joined_finals(parts: Sequence[Finals | None], lanes: Sequence[int], layout: Layout) -> Finals | None:
    """Join the final observations of all workers, which have `lanes` lanes each; None if they lie in the columns."""
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
