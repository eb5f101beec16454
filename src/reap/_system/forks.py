"""Forks: what belongs to one process is not used by its copies.

    os.fork() ──► in the child, before anything else: everything that was `guarded` is told why it is not its own

A fork has copies of descriptors, not of what is at their other ends. What it read would be lost to its parent, what it
wrote would be done in its parent's name, and no thread is there that anybody could wait for. So in a fork every verb
refuses, and being closed or collected harms nobody. Nothing is asked while things are used: telling costs the fork.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn, Protocol

from reap.errors import WrongState


class Guarded(Protocol):
    """Something that is told when it is a copy in a fork."""

    def in_fork(self, why: str) -> None:
        """Refuse from now on, and say `why`."""


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_owner = 0  # the process that `_guarded` is of


def guard(thing: Guarded) -> None:
    """Tell `thing` in every fork of this process."""
    global _owner
    if not _owner:
        os.register_at_fork(after_in_child=_tell)
    _owner = os.getpid()
    _guarded.add(thing)


def _tell() -> None:
    global _owner
    parent, _owner = _owner, os.getpid()
    why = (
        f"it belongs to process {parent}, and this is a fork of it (process {os.getpid()}), which would take what is "
        f"its parent's; make one here, after the fork"
    )
    things = list(_guarded)
    _guarded.clear()
    for thing in things:
        thing.in_fork(why)


def renew(thing: Any, **makers: Callable[[], Any]) -> None:
    """Make these attributes of `thing` anew in every fork: locks, which a thread may have held that is not there."""
    _renewed[thing] = makers
    guard(_RENEWING)


class _Renewing:
    """Tells whatever `renew` was called with."""

    def in_fork(self, why: str) -> None:
        for thing, makers in list(_renewed.items()):
            for name, make in makers.items():
                setattr(thing, name, make())
        guard(self)


_renewed: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()
_RENEWING = _Renewing()


_ENDS = {"close", "shutdown", "async_shutdown", "in_fork"}  # these know whose `thing` is, and end nothing of another's


def refuse_all(thing: Any, why: str) -> None:
    """From now on every public method of `thing` raises, but those that end it: a new one cannot be forgotten."""
    kind = type(thing)

    def refused(*_: object, **__: object) -> NoReturn:
        raise WrongState(f"this {kind.__name__} cannot be used here: {why}")

    for name in dir(kind):
        is_verb = isinstance(inspect.getattr_static(kind, name), FunctionType)
        if is_verb and not name.startswith("_") and name not in _ENDS:
            setattr(thing, name, refused)
