"""Lifecycle: whether a collector may be used here and now, who is collecting, and how it is closed once.

never built ─► open ─► closed, and why
                └────► in a fork: a copy, which refuses everything
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from reap._system.processes import LEAVE
from reap.backends.base import Backend
from reap.errors import WrongState


class Lifecycle:
    """The life of one collector, whose class is called `owner`."""

    def __init__(self, owner: str, why_closed: str | None = None) -> None:
        self._owner = owner
        self.why_closed = why_closed  # None while it is open
        self.why_foreign: str | None = None  # why it is not this process's own
        self.ended = self._closing = False  # whether all is closed, and whether somebody is at it
        self.failed = False  # whether it was closed because something went wrong
        self.busy: int | None = None  # the thread that collects
        self.collecting = threading.RLock()  # held by that thread. An Event could lose its lock by Ctrl-C

    def check_owner(self) -> None:
        """Raise if this is a copy, in a fork."""
        if self.why_foreign is not None:
            raise WrongState(f"this {self._owner} cannot be used here: {self.why_foreign}")

    def check_open(self) -> None:
        """Raise if it is closed."""
        if self.why_closed is not None:
            raise WrongState(f"this {self._owner} is closed: {self.why_closed}; make a new one")

    def closed_meanwhile(self) -> WrongState:
        """Return the error for whoever waited while it was closed."""
        why = self.why_closed or "it was broken off"
        return WrongState(f"this {self._owner} was closed while it was at work: {why}")

    def send_away(self, backend: Backend, close_env: bool) -> None:
        """Another thread that waits for a batch leaves, or gets it, before what it waits on is closed.

        One that makes it in this process closes the env itself.
        """
        if self.busy not in (None, threading.get_ident()):
            backend.breaker()()
            away = backend.close_ends_take or not close_env
            if away and self.collecting.acquire(timeout=LEAVE):
                self.collecting.release()

    def close(self, why: str, end: Callable[[bool], Any], *, failed: bool) -> None:
        """Call `end`, once; it is told whether anybody began to close before."""
        if self.ended or self._closing:
            return
        first = self.why_closed is None
        try:
            self._closing, self.why_closed, self.failed = True, self.why_closed or why, self.failed or failed
            end(first)
            self.ended = True
        except KeyboardInterrupt:  # what is left is closed by whoever asks next, or when nobody has it any more
            raise
        except BaseException:
            self.ended = True
            raise
        finally:
            self._closing = False


NEVER_BUILT = Lifecycle("collector", "it was never built")
NEVER_BUILT.ended = True  # there is nothing to close
