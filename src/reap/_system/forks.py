"""Forks: objects of one process refuse to work in its copies.

    os.fork() ──► in the child, before anything else: `in_fork(why)` is called on every object that was `guarded`

A fork has copies of descriptors, but shares what is at their other ends. What it read would be lost to its parent, what
it wrote would be done in its parent's name, and the threads that would answer do not exist. So in a fork every method
refuses, and closing or collecting the object does no harm. Using an object costs nothing extra: only the fork pays.
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
    """An object that is notified when it becomes a copy in a fork."""

    def in_fork(self, why: str) -> None:
        """Refuse every use from now on, with `why` in the error."""


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_owner = 0  # the pid of the process that filled `_guarded`


def guard(thing: Guarded) -> None:
    """Call `thing.in_fork` in every fork of this process."""
    global _owner
    if not _owner:
        os.register_at_fork(after_in_child=_tell)
    _owner = os.getpid()
    _guarded.add(thing)


def _tell() -> None:
    global _owner
    parent, _owner = _owner, os.getpid()
    why = (
        f"it belongs to process {parent}; this is a fork of it (process {os.getpid()}), which must not use "
        f"its parent's workers. Create a new one here, after the fork"
    )
    things = list(_guarded)
    _guarded.clear()
    for thing in things:
        thing.in_fork(why)


def renew(thing: Any, **makers: Callable[[], Any]) -> None:
    """Rebuild these attributes of `thing` in every fork. For locks: a thread that the fork lacks may have held one."""
    _renewed[thing] = makers
    guard(_RENEWING)


class _Renewing:
    """Rebuilds the attributes that `renew` was called with."""

    def in_fork(self, why: str) -> None:
        for thing, makers in list(_renewed.items()):
            for name, make in makers.items():
                setattr(thing, name, make())
        guard(self)


_renewed: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()
_RENEWING = _Renewing()


_ENDS = {"close", "shutdown", "async_shutdown", "in_fork"}  # these check whose `thing` is, and spare what is another's


def refuse_use(thing: Any, why: str) -> None:
    """Make every public method of `thing` raise, except those that end it; methods added later are included."""
    kind = type(thing)

    def refused(*_: object, **__: object) -> NoReturn:
        raise WrongState(f"this {kind.__name__} cannot be used here: {why}")

    for name in dir(kind):
        is_verb = isinstance(inspect.getattr_static(kind, name), FunctionType)
        if is_verb and not name.startswith("_") and name not in _ENDS:
            setattr(thing, name, refused)
