"""Values that an env returns: copying, comparing and naming them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reap.core.columns.object_columns import private_copy


def copied(value: Any) -> Any:
    """Return a copy that cannot be changed through the original."""
    if isinstance(value, Mapping):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(copied(v) for v in value)
    if isinstance(value, (np.ndarray, np.generic, int, float, bool)):
        return np.array(value, copy=True)
    return private_copy(value)


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal."""
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(equal, a, b))
    if getattr(type(a), "__eq__") is object.__eq__:  # noqa: B009
        return type(a) is type(b)  # objects that cannot be compared
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f"))


def kind(value: Any) -> str:
    """Return the kind of a value in a word."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
