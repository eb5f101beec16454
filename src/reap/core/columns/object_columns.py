"""Object columns: what a loose column (text, objects, tensors of their own shape) holds at one step.

One reference per lane. A value is copied whenever it crosses a border, unless it cannot change:

    env ──copy──► slot ──copy──► policy
                    └───copy──► batch     (successors: the same object is the following row's root)

Strings, numbers and other immutables travel as they are, arrays and tensors are copied, anything else is deep-copied.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from reap.errors import SpecMismatch
from reap.spec import Leaf

_UNCHANGING = frozenset({str, bytes, int, float, bool, complex, type(None)})


def private_copy(value: Any) -> Any:
    """Return a copy that nobody else can change; the value itself, if nobody can change that."""
    kind = value.__class__
    if kind in _UNCHANGING or isinstance(value, np.generic):
        return value
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception as cause:
        raise SpecMismatch(
            f"a {kind.__name__} among the observations cannot be copied ({cause!r}); give it a __deepcopy__"
        ) from cause


class ObjectColumn:
    """One step of a loose column, read when it is needed: `clone` and `to` as a tensor has them.

    With lanes they give a list, one value per lane; without, the value.
    """

    __slots__ = ("_array", "_batched", "leaf")

    dtype = None

    def __init__(self, leaf: Leaf, array: np.ndarray[Any, Any], batched: bool) -> None:
        self.leaf, self._array, self._batched = leaf, array, batched

    @property
    def shape(self) -> tuple[int, ...]:
        """Return how many values there are."""
        return self._array.shape if self._batched else ()

    def __getitem__(self, lanes: slice) -> ObjectColumn:
        """Return the same column of some lanes."""
        return ObjectColumn(self.leaf, self._array[lanes], self._batched)

    def clone(self) -> Any:
        """The values, for foreign code to keep or change."""
        values = [private_copy(filled(self.leaf, value)) for value in self._array]
        return values if self._batched else values[0]

    def to(self, device: torch.device) -> Any:
        """The values, tensors of them on `device`."""
        values = self.clone()
        if not self.leaf.ragged:
            return values
        return [value.to(device) for value in values] if self._batched else values.to(device)


def filled(leaf: Leaf, value: Any) -> Any:
    """A value, or the leaf's blank where there is none: a lane at rest shows zero, as all columns do."""
    kind: type = Tensor if leaf.ragged else str if isinstance(leaf.space, gym.spaces.Text) else object
    return value if isinstance(value, kind) else leaf.blank()
