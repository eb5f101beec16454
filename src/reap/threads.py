"""Threads: waiting for one that was told to end, for so long and no longer."""

from __future__ import annotations

import sys
import threading
import traceback

from reap.errors import WorkerSilent


def join(thread: threading.Thread, timeout: float, who: str) -> None:
    """Wait for a thread that was told to end, unless it is this one; `WorkerSilent`, with its stack, if it does not."""
    if threading.current_thread() is thread or not thread.ident:
        return
    thread.join(timeout)
    if thread.is_alive():
        raise WorkerSilent(f"{who} did not end within {timeout:.1f} s. Its stack:\n{stack_of(thread.ident)}")


def stack_of(thread: int) -> str:
    """Where the thread with this number is right now."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(none)"
