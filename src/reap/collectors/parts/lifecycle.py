"""Lifecycle: whether a collector may be used, which thread is collecting, and how the collector is closed once.

never built ─► open ─► closed, with the reason
                └────► in a fork: a copy, which refuses every use
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from reap._system.processes import LEAVE
from reap.backends.base import Backend
from reap.errors import WrongState


class Lifecycle:
    """The state of one collector. `owner`: the name of its class, for messages."""

    def __init__(self, owner: str, why_closed: str | None = None) -> None:
        self._owner = owner
        self.why_closed = why_closed  # None while it is open
        self.why_foreign: str | None = None  # in a forked copy: why it cannot be used there
        self.ended = self._closing = False  # whether everything is closed, and whether a thread is closing it
        self.failed = False  # whether an error closed it
        self.busy: int | None = None  # the thread that collects
        self.collecting = threading.RLock()  # held by that thread. With an Event, Ctrl-C could leave its lock taken

    def check_owner(self) -> None:
        """Raise if this is a copy in a forked process."""
        if self.why_foreign is not None:
            raise WrongState(f"this {self._owner} cannot be used here: {self.why_foreign}")

    def check_open(self) -> None:
        """Raise if the collector is closed."""
        if self.why_closed is not None:
            raise WrongState(f"this {self._owner} is closed: {self.why_closed}; make a new one")

    def closed_meanwhile(self) -> WrongState:
        """Return the error for a caller that was taking a batch while another thread closed the collector."""
        why = self.why_closed or "the rollout was interrupted"
        return WrongState(f"this {self._owner} was closed while it was collecting: {why}")

    def break_off_other_thread(self, backend: Backend, close_env: bool) -> None:
        """Break off a batch that another thread is taking, and wait for that thread, before the backend is closed.

        A thread that collects in this process is not waited for: it closes the env itself when it leaves it.
        """
        if self.busy not in (None, threading.get_ident()):
            backend.canceller()()
            away = backend.close_ends_take or not close_env
            if away and self.collecting.acquire(timeout=LEAVE):
                self.collecting.release()

    def close(self, why: str, end: Callable[[bool], Any], *, failed: bool) -> None:
        """Call `end` once; its argument says whether this is the first attempt to close."""
        if self.ended or self._closing:
            return
        first = self.why_closed is None
        try:
            self._closing, self.why_closed, self.failed = True, self.why_closed or why, self.failed or failed
            end(first)
            self.ended = True
        except KeyboardInterrupt:  # the next call of `close` closes what is left, at the latest in `__del__`
            raise
        except BaseException:
            self.ended = True
            raise
        finally:
            self._closing = False


NEVER_BUILT = Lifecycle("collector", "it was never built")
NEVER_BUILT.ended = True  # there is nothing to close
