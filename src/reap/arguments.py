"""Checks of arguments. An error names the argument, what was given and what is expected."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from reap.errors import UsageError, WrongArgument, nearest

LONGEST = 1e6  # seconds: eleven days; the system's own timers reach little further
MOST = 2**40  # the largest count of anything held in memory
MOST_LANES = 2**16  # and of workers


def whole(name: str, value: Any, *, least: int | None = 1, most: int | None = MOST, none: bool = False) -> int | None:
    """Return a whole number as an int; also accepts floats such as 1e6, and NumPy's numbers."""
    if value is None and none:
        return None
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value != int(value):
        raise WrongArgument(f"{name} must be a whole number, got {value!r}")
    if least is not None and value < least:
        raise UsageError(f"{name} must be at least {least}, got {int(value)}")
    if most is not None and value > most:
        raise UsageError(f"{name} must be at most {most:,}, got {int(value):,}")
    return int(value)


def count(name: str, value: Any, *, least: int = 1) -> None:
    """Refuse anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number ≥ {least}, got {value!r}")


def seconds(name: str, value: Any, *, none: bool = True, zero: bool = False, most: float = LONGEST) -> float | None:
    """Return a timeout in seconds as a float; None means no limit."""
    if value is None and none:
        return None
    expected = f"a number of seconds {'≥' if zero else '>'} 0"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise WrongArgument(f"{name} must be {expected}{' or None' if none else ''}, got {value!r}")
    time = float(value)
    if not (time >= 0 if zero else time > 0):  # NaN is neither
        raise UsageError(f"{name} must be {expected}, got {value!r}")
    if time > most:
        raise UsageError(f"{name} must be at most {most:,.0f} seconds{', or None' * none}, got {value!r}")
    return time


def flag(name: str, value: Any, *, none: bool = False) -> None:
    """Refuse anything but True and False, or 1 and 0, which scripts also write."""
    if (value is None and none) or (isinstance(value, (bool, int, np.bool_)) and value in (0, 1)):
        return
    raise WrongArgument(f"{name} must be True or False{' or None' if none else ''}, got {value!r}")


def one_of(name: str, value: Any, choices: Iterable[str], *, none: bool = False) -> None:
    """Refuse anything but one of these words."""
    known = list(choices)
    if (value is None and none) or (isinstance(value, str) and value in known):
        return
    hint = nearest(value, known) if isinstance(value, str) else ""
    raise UsageError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}{hint}")


def function(name: str, value: Any, *, none: bool = True) -> None:
    """Refuse what is not callable."""
    if not callable(value) and not (value is None and none):
        raise WrongArgument(f"{name} must be callable, got {type(value).__name__}")


def mapping(name: str, value: Any, *, none: bool = True) -> None:
    """Refuse anything but a mapping with string keys."""
    if value is None and none:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise WrongArgument(f"{name} must be a mapping from names{' or None' if none else ''}, got {value!r}")
