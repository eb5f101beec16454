"""Threads: joining one with a deadline, stopping them when Python exits, and finishing slow shutdowns in one."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Protocol

from reap._system.interrupts import Interrupts
from reap.errors import WorkerSilent

LINGER = 0.3  # seconds an error waits for shutdowns to finish: most do at once
_LONGEST = 15.0  # seconds that background shutdowns are waited for
CTRL_C = 0.05  # seconds that Ctrl-C may be delayed during `join`
_endings: set[threading.Thread] = set()


class _Stoppable(Protocol):
    def stop(self, timeout: float) -> None:
        """End the thread; raise `WorkerSilent` if that takes longer."""


_stopped_at_exit: weakref.WeakKeyDictionary[_Stoppable, int] = weakref.WeakKeyDictionary()  # with the pid of each


def join(thread: threading.Thread, timeout: float, who: str) -> None:
    """Wait for a thread that was told to end, unless it is the caller's; `WorkerSilent`, with its stack, if it is late.

    Ctrl-C is let in between short joins: one that breaks off `Thread.join` may make the thread look as if it had ended.
    """
    if threading.current_thread() is thread or not thread.ident:
        return
    deadline, interrupts = time.monotonic() + timeout, Interrupts()
    with interrupts.held():
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, CTRL_C))
            interrupts.let_in()
    if thread.is_alive():
        raise WorkerSilent(f"{who} did not end within {timeout:.1f} s. Its stack:\n{stack_of(thread.ident)}")


def stack_of(thread: int) -> str:
    """Return the current stack of the thread with this ident."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(none)"


def stop_at_exit(thing: _Stoppable) -> None:
    """Stop the thread of `thing` when Python exits, which would cut off a daemon thread in the middle of native code.

    A fork does not have the thread, so there `thing` is not stopped.
    """
    atexit.unregister(_stop_all)  # registered once only
    atexit.register(_stop_all)
    _stopped_at_exit[thing] = os.getpid()


def _stop_all() -> None:
    for thing, owner in list(_stopped_at_exit.items()):
        if owner == os.getpid():
            with contextlib.suppress(WorkerSilent):
                thing.stop(1.0)


def run_shutdown(ending: Callable[[], None], linger: float | None = None) -> None:
    """Shut something down: call `ending`, which takes a few seconds at most.

    With `linger`, what takes longer than that many seconds goes on in a background thread (see `wait_for_shutdowns`).
    That is for callers with an error to raise, which a child that ignores signals, or closes its env slowly, must not
    delay.
    """
    if linger is not None:
        thread = threading.Thread(target=ending, name="reap-ending", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread: do it in this one
            thread.start()
            atexit.unregister(wait_for_shutdowns)  # registered once only
            atexit.register(wait_for_shutdowns)  # late, to run before the exit handlers of what the shutdown needs
            _endings.add(thread)
            thread.join(linger)
            if not thread.is_alive():
                _endings.discard(thread)
            return
    ending()


def wait_for_shutdowns() -> None:
    """Wait for background shutdowns to finish; a few seconds at most."""
    until = time.monotonic() + _LONGEST
    for thread in list(_endings):
        if thread is not threading.current_thread():  # in a finalizer it may be the calling one
            thread.join(max(0.0, until - time.monotonic()))
            if not thread.is_alive():
                _endings.discard(thread)
