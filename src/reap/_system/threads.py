"""Threads: waiting for one that was told to end, for so long and no longer."""

from __future__ import annotations

import sys
import threading
import time
import traceback

from reap._system.interrupts import Interrupts
from reap.errors import WorkerSilent

CTRL_C = 0.05  # seconds for which Ctrl-C may wait while a thread is waited for


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
    """Where the thread with this number is right now."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(none)"
