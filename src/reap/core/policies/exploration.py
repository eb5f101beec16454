"""Exploration types, per thread.

tensordict keeps the interaction type in one process-wide variable, so a collecting thread that sets it would change
how every other thread's policy samples. Here a thread can have its own: `exploring(type)` lays a thread-local value
over the shared one. Threads that never enter it, and code that sets the shared one, see exactly what they saw before.

tensordict asks us while any thread is inside `exploring`, and itself again when the last one has left. Where it keeps
the variable in another way, `exploring` sets it for the whole process.
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

#: the types that ask for the same action whenever the observation is the same
FIXED = (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN, InteractionType.MEDIAN)
_SHARED = object()  # a thread that has no type of its own


class _Own(threading.local):
    """What a thread explores with, if it has a type of its own."""

    kind: Any = _SHARED

    def __init__(self) -> None:
        self.key = object()


_own = _Own()


class _ThreadAware:
    """Stands where tensordict's variable stands: a thread inside `exploring` has its own value, others share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside: dict[object, None] = {}  # threads that have a type of their own
        renew(self, lock=threading.Lock, inside=dict)

    def get_mode(self) -> Any:
        kind = _own.kind
        return tensordict_internals.shared_interaction_type.get_mode() if kind is _SHARED else kind

    def set_mode(self, type: Any) -> None:
        if _own.kind is _SHARED:
            tensordict_internals.shared_interaction_type.set_mode(type)
        else:
            _own.kind = type


_aware = _ThreadAware()


@contextlib.contextmanager
def exploring(kind: InteractionType | None) -> Iterator[None]:
    """Sample as `kind` in this thread, for the length of the block."""
    shared = tensordict_internals.shared_interaction_type
    if shared is None:
        with set_interaction_type(kind):
            yield
        return
    variables, place = tensordict_internals.interaction_variables, tensordict_internals.INTERACTION_TYPE
    before = _own.kind
    try:
        if before is _SHARED:
            with _aware.lock:  # or one that leaves would take it away from one that has just come
                _aware.inside[_own.key] = None
                variables[place] = _aware
        _own.kind = kind
        yield
    finally:
        _own.kind = before
        if before is _SHARED:
            with _aware.lock:
                if _own.key in _aware.inside:  # or it was broken off before
                    del _aware.inside[_own.key]
                if not _aware.inside:
                    variables[place] = shared


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
