"""Exploration types that each thread can set for itself.

tensordict keeps the interaction type in one process-wide variable, so a collecting thread that sets it would change
how every other thread's policy samples. Here a thread can have its own: `exploring(type)` lays a thread-local value
over the shared one. Threads that never enter it, and code that sets the shared one, see exactly what they saw before.

While any thread is inside `exploring`, a `_ThreadAware` replaces tensordict's variable; the last one to leave puts it
back. If a version of tensordict keeps the variable in another way, `exploring` sets it for the whole process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensordict.nn import InteractionType, set_interaction_type

from reap._foreign import tensordict_internals
from reap._system.forks import renew
from reap.errors import UsageError

ExplorationType = InteractionType

#: the types that ask for one and the same action for the same observation
FIXED = (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN, InteractionType.MEDIAN)
_SHARED = object()  # marks a thread that has no type of its own


class _Own(threading.local):
    """Holds a thread's own exploration type, if it has one."""

    exploration: Any = _SHARED

    def __init__(self) -> None:
        self.key = object()


_own = _Own()


class _ThreadAware:
    """Replaces tensordict's variable: a thread inside `exploring` has its own value, the others share one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside: dict[object, None] = {}  # keys of threads that have a type of their own
        renew(self, lock=threading.Lock, inside=dict)

    def get_mode(self) -> Any:
        own = _own.exploration
        return tensordict_internals.shared_interaction_type.get_mode() if own is _SHARED else own

    def set_mode(self, type: Any) -> None:
        if _own.exploration is _SHARED:
            tensordict_internals.shared_interaction_type.set_mode(type)
        else:
            _own.exploration = type


_aware = _ThreadAware()


@contextlib.contextmanager
def exploring(exploration: InteractionType | None) -> Iterator[None]:
    """Set the exploration type for this thread, inside the block."""
    shared = tensordict_internals.shared_interaction_type
    if shared is None:
        with set_interaction_type(exploration):
            yield
        return
    variables, place = tensordict_internals.interaction_variables, tensordict_internals.INTERACTION_TYPE
    before = _own.exploration
    try:
        if before is _SHARED:
            with _aware.lock:  # else a thread that leaves could put the variable back just after this one enters
                _aware.inside[_own.key] = None
                variables[place] = _aware
        _own.exploration = exploration
        yield
    finally:
        _own.exploration = before
        if before is _SHARED:
            with _aware.lock:
                if _own.key in _aware.inside:  # not if an interrupt came before it was added
                    del _aware.inside[_own.key]
                if not _aware.inside:
                    variables[place] = shared


def exploration_type(given: InteractionType | str | None) -> InteractionType:
    """Return the option as an InteractionType: None means RANDOM, and names are accepted."""
    if given is None:
        return InteractionType.RANDOM
    try:
        if not isinstance(given, (str, InteractionType)):  # tensordict's look-up compares, which fails for arrays
            raise ValueError
        return InteractionType(given)
    except ValueError:
        names = ", ".join(t.value for t in InteractionType)
        raise UsageError(f"exploration_type must be one of {names}, got {given!r}") from None
