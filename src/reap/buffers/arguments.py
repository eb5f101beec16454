"""Checks of the arguments of buffers. Errors name the argument, what is expected and what was given."""

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

LARGEST = 2**31 - 1  # rows of a sample or steps ahead: larger values are certainly wrong


def whole(value: Any, name: str, least: int, most: int | None = None) -> int:
    """Return `value` as an int, if it is a whole number from `least` to `most`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < least:
        raise _wrong(value, name, f"a whole number >= {least}")
    if most is not None and value > most:
        raise _wrong(value, name, f"a whole number <= {most:,}")
    return int(value)


def number(
    value: Any, name: str, least: float, *, above: bool = False, most: float | None = None, endless: bool = False
) -> float:
    """Return `value` as a float, if it is at least `least`, or `above` it, and finite unless `endless`."""
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
    """Return `value` if it is True or False, or None where that is `optional`."""
    if isinstance(value, (bool, np.bool_)) or (optional and value is None):
        return value
    raise _wrong(value, name, "True or False")


def key(value: Any, name: str) -> Key:
    """Return `value` as the key of a column, if it is a name or a tuple of nested names."""
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, (tuple, list)) or not parts or not all(isinstance(p, str) and p for p in parts):
        raise _wrong(value, name, "a column's key, a string or a tuple of strings")
    return as_key(value)


def function(value: Any, name: str) -> Any:
    """Return `value` if it is callable or None."""
    if value is not None and not callable(value):
        raise _wrong(value, name, "callable")
    return value


def generator(value: Any, name: str) -> torch.Generator | None:
    """Return `value` if it is a `torch.Generator`, or None for torch's global one."""
    if value is not None and not isinstance(value, torch.Generator):
        raise _wrong(value, name, "a torch.Generator")
    return value


def device(value: Any, name: str) -> torch.device:
    """Return `value`, a device or its name, as a device; None and "auto" are the CPU."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return torch.device("cpu")
    if not isinstance(value, (str, torch.device)):
        raise _wrong(value, name, "a device, like 'cpu' or 'cuda:0'")
    found = named_device(name, value)
    assert found is not None
    return found


def directory(value: Any, name: str) -> Path:
    """Return `value` as the path of a directory."""
    try:
        found = Path(value)
    except TypeError:
        raise WrongArgument(f"{name} must be the name of a directory, got {shown(value)}") from None
    if "\0" in str(found):
        raise UsageError(f"{name} must be the name of a directory, got {value!r:.80}")
    return found


def _wrong(value: Any, name: str, expected: str) -> UsageError:
    """Return the error for a wrong argument: `UsageError` for numbers and strings, `WrongArgument` for other types."""
    kind = UsageError if isinstance(value, (numbers.Number, str, np.bool_)) else WrongArgument
    return kind(f"{name} must be {expected}, got {shown(value)}")


def shown(value: Any) -> str:
    """Return a short repr of `value` for errors, or its type if its `repr` fails."""
    try:
        return " ".join(f"{value!r:.80}".split())
    except Exception:
        return f"an object of {type(value).__name__}"
