"""no_leaks: what was opened inside must be closed at the end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from reap.children import seedbed_fd, seedbed_pid


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Fails with the names of threads, processes, file descriptors or shared-memory files left behind.

    >>> with no_leaks():
    ...     Collector("CartPole-v1", frames_per_batch=10).shutdown()
    """
    before = _everything()
    yield
    gc.collect()
    after = _everything()
    left = {what: sorted(after[what] - before[what]) for what in after if after[what] - before[what]}
    assert not left, "left behind: " + "; ".join(f"{what}: {', '.join(names)}" for what, names in left.items())


def _everything() -> dict[str, set[str]]:
    return {
        "threads": {f"{t.name} ({t.ident})" for t in threading.enumerate()},
        "processes": {f"{p.name} (pid {p.pid})" for p in multiprocessing.active_children()} | _children(),
        "descriptors": _descriptors(),
        "shared memory": {p.name for p in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set(),
    }


def _children() -> set[str]:
    """Direct children by pid, however they were started (Linux); not the helper that is kept to start more."""
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {f"pid {pid}" for pid in task.read_text().split() if int(pid) != seedbed_pid()}
    return found


def _descriptors() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if (
                    not target.endswith("/fd") and int(fd) != seedbed_fd()
                ):  # not the listing's own, nor the kept helper's
                    found.add(f"{fd} → {target}")
    return found
