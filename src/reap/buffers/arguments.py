"""Arguments of buffers and their parts, checked where they are given: which it is, what is expected, what was given."""

from __future__ import annotations

import math
import numbers
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reap.core.device.devices import named_device
from reap.errors import UsageError, WrongArgument
from reap.spec import Key, as_key

LARGEST = 2**31 - 1  # rows of a sample, steps ahead: beyond it nothing can be right


def whole(value: Any, name: str, least: int, most: int | None = None) -> int:
    """A whole number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < least:
        raise _wrong(value, name, f"a whole number >= {least}")
    if most is not None and value > most:
        raise _wrong(value, name, f"a whole number <= {most:,}")
    return int(value)


def number(
    value: Any, name: str, least: float, *, above: bool = False, most: float | None = None, endless: bool = False
) -> float:
    """A number, from `least` on, or `above` it; finite, if it is not `endless`."""
    what = f"a number {'>' if above else '>='} {least:g}" + ("" if most is None else f" and <= {most:g}")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise _wrong(value, name, what)
    try:
        found = float(value)
    except OverflowError:
        raise _wrong(value, name, f"{what} that fits a float") from None
    if math.isnan(found) or found < least or (above and found == least) or (most is not None and found > most):
        raise _wrong(value, name, what)
    if math.isinf(found) and not endless:
        raise _wrong(value, name, f"{what}, and finite")
    return found


def flag(value: Any, name: str, *, optional: bool = False) -> Any:
    """True or False; or None, where it is `optional`."""
    if isinstance(value, (bool, np.bool_)) or (optional and value is None):
        return value
    raise _wrong(value, name, "True or False")


def key(value: Any, name: str) -> Key:
    """A column's key: a name, or several, one in another."""
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, (tuple, list)) or not parts or not all(isinstance(p, str) and p for p in parts):
        raise _wrong(value, name, "a column's key, a string or a tuple of strings")
    return as_key(value)


def function(value: Any, name: str) -> Any:
    """Something that can be called; or None."""
    if value is not None and not callable(value):
        raise _wrong(value, name, "something that can be called")
    return value


def generator(value: Any, name: str) -> torch.Generator | None:
    """Where random numbers come from; None: torch's own."""
    if value is not None and not isinstance(value, torch.Generator):
        raise _wrong(value, name, "a torch.Generator")
    return value


def device(value: Any, name: str) -> torch.device:
    """A device, by name or as it is; None and "auto" are the CPU."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return torch.device("cpu")
    if not isinstance(value, (str, torch.device)):
        raise _wrong(value, name, "a device, like 'cpu' or 'cuda:0'")
    found = named_device(name, value)
    assert found is not None
    return found


def directory(value: Any, name: str) -> Path:
    """The name of a directory."""
    try:
        found = Path(value)
    except TypeError:
        raise WrongArgument(f"{name} is the name of a directory, got {shown(value)}") from None
    if "\0" in str(found):
        raise UsageError(f"{name} is the name of a directory, got {value!r:.80}")
    return found


def _wrong(value: Any, name: str, expected: str) -> UsageError:
    """A number that is none of those is a wrong value, everything else a wrong kind."""
    kind = UsageError if isinstance(value, (numbers.Number, str, np.bool_)) else WrongArgument
    return kind(f"{name} is {expected}, got {shown(value)}")


def shown(value: Any) -> str:
    """What was given, in a few words; there are objects that cannot even say that."""
    try:
        return " ".join(f"{value!r:.80}".split())
    except Exception:
        return f"an object of {type(value).__name__}"
