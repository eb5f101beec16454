"""Exploration types, per thread.

tensordict keeps the interaction type in one process-wide variable, so a collecting thread that sets it would change
how every other thread's policy samples. Here a thread can have its own: `exploring(type)` lays a thread-local value
over the shared one. Threads that never enter it, and code that sets the shared one, see exactly what they saw before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensordict.nn import InteractionType, probabilistic

from reap.errors import UsageError

ExplorationType = InteractionType

_shared = probabilistic._interaction_type
_install = threading.Lock()


class _Overlay(threading.local):
    stack: list[Any]

    def __init__(self) -> None:
        self.stack = []


_overlay = _Overlay()


class _ThreadAware:
    """Stands where tensordict's variable stood: a thread inside `exploring` has its own value, others share."""

    def get_mode(self) -> Any:
        return _overlay.stack[-1] if _overlay.stack else _shared.get_mode()

    def set_mode(self, type: Any) -> None:
        if _overlay.stack:
            _overlay.stack[-1] = type
        else:
            _shared.set_mode(type)


@contextlib.contextmanager
def exploring(kind: InteractionType | None) -> Iterator[None]:
    """Sample as `kind` in this thread, for the length of the block."""
    if not isinstance(probabilistic._interaction_type, _ThreadAware):
        with _install:
            probabilistic._interaction_type = _ThreadAware()
    _overlay.stack.append(kind)
    try:
        yield
    finally:
        _overlay.stack.pop()


def exploration_type(given: InteractionType | str | None) -> InteractionType:
    """The option as a value: nothing means RANDOM, names are accepted."""
    if given is None:
        return InteractionType.RANDOM
    try:
        if not isinstance(given, (str, InteractionType)):  # tensordict's own search compares, which arrays do not like
            raise ValueError
        return InteractionType(given)
    except ValueError:
        names = ", ".join(t.value for t in InteractionType)
        raise UsageError(f"exploration_type must be one of {names}, got {given!r}") from None
