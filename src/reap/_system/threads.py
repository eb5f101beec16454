"""Threads: waiting for one that was told to end, for so long and no longer; ends that go on in the background."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable

from reap._system.interrupts import Interrupts
from reap.errors import WorkerSilent

LINGER = 0.3  # seconds for which an error waits until those that are to be ended have: most do at once
_LONGEST = 15.0  # seconds for which ends in the background are waited for
CTRL_C = 0.05  # seconds for which Ctrl-C may wait while a thread is waited for
_endings: set[threading.Thread] = set()


def join(thread: threading.Thread, timeout: float, who: str) -> None:
    """Wait for a thread that was told to end, unless it is this one; `WorkerSilent`, with its stack, if it does not.

    Ctrl-C is let in now and then: a `Thread.join` that it breaks off may take the thread for one that has ended.
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
    """Return where the thread with this number is right now."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(none)"


def see_to(ending: Callable[[], None], linger: float | None = None) -> None:
    """End something: call `ending`, which takes a few seconds at most.

    With `linger`, what takes longer than so many seconds goes on in a thread (see `wait_for_ends`): something is to be
    told, and a child that is deaf, or closes its env slowly, shall not hold that up.
    """
    if linger is not None:
        thread = threading.Thread(target=ending, name="reap-ending", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread: we do it ourselves
            thread.start()
            atexit.unregister(wait_for_ends)  # once is enough
            atexit.register(wait_for_ends)  # as late as can be: it comes before others close what is needed for it
            _endings.add(thread)
            thread.join(linger)
            if not thread.is_alive():
                _endings.discard(thread)
            return
    ending()


def wait_for_ends() -> None:
    """Wait for what is being ended while its error was told; a few seconds at most."""
    until = time.monotonic() + _LONGEST
    for thread in list(_endings):
        if thread is not threading.current_thread():  # in a finalizer it may be
            thread.join(max(0.0, until - time.monotonic()))
            if not thread.is_alive():
                _endings.discard(thread)
