"""Transforms: called with every sample in their order; their inverses, in the other order, with what is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reap.buffers import arguments
from reap.buffers.multistep import MultiStep
from reap.errors import UsageError, WrongArgument


class Transforms:
    """The transforms of a buffer. A `MultiStep` looks up rows by itself: it is `ahead`, and nothing is left to do."""

    def __init__(self, given: Sequence[Any]) -> None:
        for transform in given:
            if not callable(transform):
                raise WrongArgument(
                    f"transform is something that can be called with a sample, got {arguments.shown(transform)}"
                )
        if any(isinstance(transform, MultiStep) for transform in given[1:]):
            raise UsageError(
                "MultiStep looks up rows by itself: it is the first transform, and the only one of its kind"
            )
        self.all = tuple(given)
        self.ahead: MultiStep | None = given[0] if given and isinstance(given[0], MultiStep) else None
        self._called = self.all[self.ahead is not None :]

    def inserted(self, index: int, transform: Any) -> Transforms:
        """These and one more, before the one at `index`."""
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise WrongArgument(f"index is a whole number, got {arguments.shown(index)}")
        given = list(self.all)
        given.insert(max(-len(given), min(int(index), len(given))), transform)
        return Transforms(given)

    def __call__(self, sample: Any) -> Any:
        """The sample as the user gets it."""
        for transform in self._called:
            sample = transform(sample)
        return sample

    def inverse(self, data: Any) -> Any:
        """What the user writes as it is stored."""
        for transform in reversed(self.all):
            if (inverse := getattr(transform, "inv", None)) is not None:
                data = inverse(data)
        return data
