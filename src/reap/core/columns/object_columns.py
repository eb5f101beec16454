"""Object columns: one step of a loose column (text, objects, ragged tensors), as the policy reads it.

It holds one reference per lane. A mutable value is copied at each of these handovers:

    env ──copy──► slot ──copy──► policy
                    └───copy──► batch     (only successors: the following row's root is the same object)

Strings, numbers and other immutable values are not copied, arrays and tensors are cloned, all else is deep-copied.
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
    """Return a private copy of `value`, or `value` itself if it is immutable."""
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
    """One step of a loose column, with the `clone` and `to` of a tensor, which copy the values when called.

    They return a list with one value per lane, or the single value if the env is not batched.
    """

    __slots__ = ("_array", "_batched", "leaf")

    dtype = None

    def __init__(self, leaf: Leaf, array: np.ndarray[Any, Any], batched: bool) -> None:
        self.leaf, self._array, self._batched = leaf, array, batched

    @property
    def shape(self) -> tuple[int, ...]:
        """The lane dimension, or () if the env is not batched."""
        return self._array.shape if self._batched else ()

    def __getitem__(self, lanes: slice) -> ObjectColumn:
        """Return this column for some of the lanes."""
        return ObjectColumn(self.leaf, self._array[lanes], self._batched)

    def clone(self) -> Any:
        """Return copies of the values, which foreign code may keep or change."""
        values = [private_copy(filled(self.leaf, value)) for value in self._array]
        return values if self._batched else values[0]

    def to(self, device: torch.device) -> Any:
        """Return copies of the values; ragged tensors are moved to `device`."""
        values = self.clone()
        if not self.leaf.ragged:
            return values
        return [value.to(device) for value in values] if self._batched else values.to(device)


def filled(leaf: Leaf, value: Any) -> Any:
    """Return `value`, or the leaf's blank if there is none; other columns hold zeros there."""
    kind: type = Tensor if leaf.ragged else str if isinstance(leaf.space, gym.spaces.Text) else object
    return value if isinstance(value, kind) else leaf.blank()
