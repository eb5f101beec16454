"""Where processes are right now: those that a worker has started for its lanes, found without asking the worker."""

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

STACK_FILE = "reap-stack"  # where a child's faulthandler writes, as its descriptors show it
_AT_A_TIME = 16
_PATIENCE = 1.0  # seconds for a stack to come
T = TypeVar("T")


def all_at_once(asked: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Ask for many stacks, each of which may take a moment."""
    if not asked:
        return {}
    with ThreadPoolExecutor(min(len(asked), _AT_A_TIME), "reap-stacks") as pool:
        return dict(zip(asked, pool.map(lambda ask: ask(), asked.values())))


def processes_below(pid: int) -> dict[int, str]:
    """Processes of reap's that descend from this one, and what each is called (Linux; elsewhere none)."""
    found: dict[int, str] = {}
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{child}/comm").read_text().strip()
            # The name comes after the handler: who has it does not die of the signal.
            if name.startswith("reap-") and name != SERVER_NAME:
                found[child] = name
        found |= processes_below(child)
    return found


def ask_process(pid: int) -> str:
    """Where every thread of a process of reap's is right now, whoever has started it; empty if it does not say."""
    with contextlib.suppress(OSError):
        files = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if STACK_FILE in os.readlink(fd)]
        if not files:
            return ""
        with open(files[0], "rb") as file:
            before = os.fstat(file.fileno()).st_size
            os.kill(pid, signal.SIGUSR1)
            return told_after(lambda: os.pread(file.fileno(), 1 << 20, before), _PATIENCE)
    return ""


def told_after(read: Callable[[], bytes], patience: float) -> str:
    """Return what a signal handler of another process writes: read until it is there, and has stopped growing."""
    until, text = time.monotonic() + patience, b""
    while time.monotonic() < until:  # a signal handler in another process: there is nothing to wait on
        before, text = text, read()
        if text and text == before:
            break
        time.sleep(0.02)
    return text.decode(errors="replace").strip()
