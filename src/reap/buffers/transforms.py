"""Transforms: called in order with every sample; their inverses, in reverse order, with all data that is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reap.buffers import arguments
from reap.buffers.multistep import MultiStep
from reap.errors import UsageError, WrongArgument


class Transforms:
    """The transforms of a buffer. A `MultiStep`, which reads rows by itself, is kept in `multistep` and not called."""

    def __init__(self, given: Sequence[Any]) -> None:
        for transform in given:
            if not callable(transform):
                raise WrongArgument(f"transform must be callable with a sample, got {arguments.shown(transform)}")
        if any(isinstance(transform, MultiStep) for transform in given[1:]):
            raise UsageError("MultiStep reads rows itself: it must be the first transform, and the only MultiStep")
        self.all = tuple(given)
        self.multistep: MultiStep | None = given[0] if given and isinstance(given[0], MultiStep) else None
        self._called = self.all[self.multistep is not None :]

    def inserted(self, index: int, transform: Any) -> Transforms:
        """Return these transforms and one more before the one at `index`."""
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise WrongArgument(f"index must be a whole number, got {arguments.shown(index)}")
        given = list(self.all)
        given.insert(max(-len(given), min(int(index), len(given))), transform)
        return Transforms(given)

    def __call__(self, sample: Any) -> Any:
        """Return the transformed sample."""
        for transform in self._called:
            sample = transform(sample)
        return sample

    def inverse(self, data: Any) -> Any:
        """Return the data that is stored when the user writes `data`."""
        for transform in reversed(self.all):
            if (inverse := getattr(transform, "inv", None)) is not None:
                data = inverse(data)
        return data
