"""no_leaks: checks that everything opened within a block is closed at its end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from reap._system.fork_server.client import kept_fork_server
from reap._system.fork_server.orphans import children_of, is_resource_tracker
from reap._system.threads import wait_for_shutdowns

# Seconds until something that has ended must be gone: a process or thread may be visible for a moment after its end was
# reported, and another program's shared memory for a moment before it is mapped, or for a while after it was killed.
PATIENCE = 15.0
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


@contextlib.contextmanager
def no_leaks(*, sockets: bool = True, libraries: bool = True) -> Iterator[None]:
    """Fail with the names of threads, processes, file descriptors or shared-memory files left behind.

    >>> with no_leaks():
    ...     Collector("CartPole-v1", frames_per_batch=10).shutdown()

    `sockets`: False leaves them out. Ray, in this process, opens and closes its own at any time.
    `libraries`: False leaves out what torch, `multiprocessing` and others may keep from first use until the program
    ends: threads and descriptors that are not reap's, and all shared memory, since its owner is unknown.
    """
    before = _everything()
    yield
    wait_for_shutdowns()  # first: background shutdowns hold references
    until = time.monotonic() + PATIENCE
    while (left := _new(before, sockets, libraries)) and time.monotonic() < until:
        gc.collect()  # slow in a large program, so only where something is left; shutdowns may leave more garbage
        wait_for_shutdowns()
        time.sleep(0.01)
    assert not left, "left behind: " + "; ".join(f"{what}: {', '.join(names)}" for what, names in left.items())


def _new(before: dict[str, set[str]], sockets: bool, libraries: bool) -> dict[str, list[str]]:
    """Return what is there now and was not there before, by kind."""
    new = {what: names - before[what] for what, names in _everything().items()}
    if not libraries:
        new["threads"] = {name for name in new["threads"] if name.startswith("reap")}
        new["descriptors"] = {name for name in new["descriptors"] if "memfd:reap" in name}
        new["shared memory"] = set()
    if new["shared memory"]:
        new["shared memory"] -= _mapped_by_strangers()
    if not sockets:
        new["descriptors"] = {name for name in new["descriptors"] if "socket:" not in name}
    return {what: sorted(names) for what, names in new.items() if names}


def _everything() -> dict[str, set[str]]:
    return {
        "threads": {f"{t.name} ({t.ident})" for t in threading.enumerate()},
        "processes": {f"{p.name} (pid {p.pid})" for p in multiprocessing.active_children()} | _children(),
        "descriptors": _descriptors(),
        "shared memory": _shared_memory(),
    }


def _children() -> set[str]:
    """Return all descendants of this process, by pid (Linux), except the fork server that is kept."""
    pid, _ = kept_fork_server() or (None, None)
    return {f"pid {one}" for one in _descendants(os.getpid()) if one != pid}


def _descendants(ancestor: int) -> set[int]:
    found = set()
    for pid in children_of(ancestor):
        with contextlib.suppress(OSError):
            if is_resource_tracker(pid):
                continue  # Python's own, one for all processes of a program
            below = _descendants(pid)
            if Path(f"/proc/{pid}/comm").read_text().strip() != "raylet":
                found |= {pid} | below
            else:  # the cluster and its pool of idle workers are Ray's own; actors are ours
                actors = {one for one in below if _is_actor(one)}
                found |= actors.union(*map(_descendants, actors))
    return found


def _is_actor(pid: int) -> bool:
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0 ").decode(errors="replace")
        return title.startswith("ray::") and not title.startswith(_RAYS_OWN)
    return False


def _shared_memory() -> set[str]:
    """Return all files in /dev/shm: name and inode, since semaphores are mapped under another name than listed."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir("/dev/shm"):
            with contextlib.suppress(OSError):
                found.add(f"{entry.name} (inode {entry.stat().st_ino})")
    return found


def _mapped_by_strangers() -> set[str]:
    """Return those of these files that a process other than this one and its descendants has mapped."""
    kin = _descendants(os.getpid()) | {os.getpid()}
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if int(maps.parent.name) not in kin:
                inodes |= {line.split()[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return {name for name in _shared_memory() if name.split()[-1].rstrip(")") in inodes}


def _descriptors() -> set[str]:
    found = set()
    _, kept = kept_fork_server() or (None, None)
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if not target.endswith("/fd") and int(fd) != kept:  # the listing's own; the fork server's
                    found.add(f"{fd} → {target}")
    return found
