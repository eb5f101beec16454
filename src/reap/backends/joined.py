"""The layout of a slot that workers fill together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reap.core.slot import Layout
from reap.errors import SpecMismatch


def joined(layouts: Sequence[Layout]) -> Layout:
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
