"""Stacks of processes, such as those a worker has started for its lanes, obtained without involving the worker."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from reap._system.fork_server.orphans import SERVER_NAME, children_of

STACK_FILE = "reap-stack"  # the file a child's faulthandler writes to, as its descriptors show it
_AT_A_TIME = 16
_PATIENCE = 1.0  # seconds a stack may take to arrive
T = TypeVar("T")


def call_all(asked: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Call all these functions at once, since each stack may take a moment; return the results by key."""
    if not asked:
        return {}
    with ThreadPoolExecutor(min(len(asked), _AT_A_TIME), "reap-stacks") as pool:
        return dict(zip(asked, pool.map(lambda ask: ask(), asked.values())))


def processes_below(pid: int) -> dict[int, str]:
    """Return reap's processes that descend from this one, with their names (Linux; none elsewhere)."""
    found: dict[int, str] = {}
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{child}/comm").read_text().strip()
            # A child takes its name after it installs the handler: one with a name does not die of the signal.
            if name.startswith("reap-") and name != SERVER_NAME:
                found[child] = name
        found |= processes_below(child)
    return found


def process_stacks(pid: int) -> str:
    """Return the stacks of all threads of a reap process, whichever process started it; empty if it gives none."""
    with contextlib.suppress(OSError):
        files = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if STACK_FILE in os.readlink(fd)]
        if not files:
            return ""
        with open(files[0], "rb") as file:
            before = os.fstat(file.fileno()).st_size
            os.kill(pid, signal.SIGUSR1)
            return polled_text(lambda: os.pread(file.fileno(), 1 << 20, before), _PATIENCE)
    return ""


def polled_text(read: Callable[[], bytes], patience: float) -> str:
    """Return what another process's signal handler writes: poll until there is text that has stopped growing."""
    until, text = time.monotonic() + patience, b""
    while time.monotonic() < until:  # the writer is a signal handler in another process: there is nothing to wait on
        before, text = text, read()
        if text and text == before:
            break
        time.sleep(0.02)
    return text.decode(errors="replace").strip()
