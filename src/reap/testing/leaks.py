"""no_leaks: what was opened inside must be closed at the end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from reap.children import kept_seedbed, wait_for_ends
from reap.fork_server import is_resource_tracker

_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


@contextlib.contextmanager
def no_leaks(*, sockets: bool = True) -> Iterator[None]:
    """Fails with the names of threads, processes, file descriptors or shared-memory files left behind.

    >>> with no_leaks():
    ...     Collector("CartPole-v1", frames_per_batch=10).shutdown()

    `sockets`: False leaves them out. Ray, in this process, opens and closes its own when it likes.
    """
    before = _everything()
    yield
    wait_for_ends()  # first: who ends something holds it
    gc.collect()
    after = _everything()
    # A process may be seen a moment after its end was told: it is reaped then. And a stranger's shared memory may be
    # seen a moment before he maps it.
    until = time.monotonic() + 1.0
    while any(after[one] - before[one] for one in ("processes", "shared memory")) and time.monotonic() < until:
        time.sleep(0.01)
        after = _everything()
    left = {what: sorted(after[what] - before[what]) for what in after if after[what] - before[what]}
    if not sockets and "descriptors" in left:
        left["descriptors"] = [name for name in left["descriptors"] if "socket:" not in name]
        left = {what: names for what, names in left.items() if names}
    assert not left, "left behind: " + "; ".join(f"{what}: {', '.join(names)}" for what, names in left.items())


def _everything() -> dict[str, set[str]]:
    return {
        "threads": {f"{t.name} ({t.ident})" for t in threading.enumerate()},
        "processes": {f"{p.name} (pid {p.pid})" for p in multiprocessing.active_children()} | _children(),
        "descriptors": _descriptors(),
        "shared memory": _shared_memory(),
    }


def _children() -> set[str]:
    """All that descends from this process, by pid (Linux); not the helper that is kept to start more."""
    pid, _ = kept_seedbed() or (None, None)
    return {f"pid {one}" for one in _descendants(os.getpid()) if one != pid}


def _descendants(ancestor: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{ancestor}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, task.read_text().split()):
                if is_resource_tracker(pid):
                    continue  # Python's own, one for all processes of a program
                below = _descendants(pid)
                if Path(f"/proc/{pid}/comm").read_text().strip() != "raylet":
                    found |= {pid} | below
                else:  # a cluster and the pool it keeps are Ray's own; actors are not
                    actors = {one for one in below if _is_actor(one)}
                    found |= actors.union(*map(_descendants, actors))
    return found


def _is_actor(pid: int) -> bool:
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0 ").decode(errors="replace")
        return title.startswith("ray::") and not title.startswith(_RAYS_OWN)
    return False


def _shared_memory() -> set[str]:
    """Files in /dev/shm, but for those that somebody who is no kin of ours has mapped."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir("/dev/shm"):
            with contextlib.suppress(OSError):
                found[entry.stat().st_ino] = entry.name
    if found:
        kin = _descendants(os.getpid()) | {os.getpid()}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if int(maps.parent.name) not in kin:
                    for line in maps.read_text().splitlines():
                        if (
                            "/dev/shm/" in line
                        ):  # by inode: semaphores are mapped under one name and listed under another
                            found.pop(int(line.split()[4]), None)
    return set(found.values())


def _descriptors() -> set[str]:
    found = set()
    _, kept = kept_seedbed() or (None, None)
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if not target.endswith("/fd") and int(fd) != kept:  # the listing's own; the helper's
                    found.add(f"{fd} → {target}")
    return found
