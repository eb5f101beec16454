"""Orphans: programs that a child of the fork server started and left behind, found and killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

SERVER_NAME = "reap-forkserver"  # as `ps` shows it
MARK = "REAP_CHILD"  # environment variable of every program a child starts: the child's pid and its server's name


def end_orphans(living: Collection[int], *, all_of_them: bool = False) -> list[int]:
    """Kill the processes reparented to this one that belong to no living child; return their pids.

    Resource trackers and fork servers of such a child are spared: they end by themselves once they have cleaned up.
    """
    found = [pid for pid in children_of(os.getpid()) if pid not in living and not is_resource_tracker(pid)]
    victims = [pid for pid in found if all_of_them or (not _is_fork_server(pid) and _is_orphan(pid, living))]
    for pid in victims:
        _kill_tree(pid)
    return victims


def end_programs_of(pid: int, server: str) -> None:
    """Kill a child whose fork server was killed, and every program it has started: nobody else will."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    for path in Path("/proc").glob("[0-9]*"):
        one = int(path.name)
        if _mark_on(one) == mark_of(pid, server) and not is_resource_tracker(one) and not _is_fork_server(one):
            _kill_tree(one)


def mark_of(pid: int, server: str) -> str:
    """Return the value of `MARK` in the environment of programs that this child of this server starts."""
    return f"{pid}@{server}"  # the server's name is unique; pids alone are not, between containers


def _is_orphan(pid: int, living: Collection[int]) -> bool:
    """Return whether the child that started this program is gone; for an unmarked program, whether all children are."""
    owner = _mark_on(pid).partition("@")[0]
    return int(owner) not in living and state_of(int(owner)) in "ZX" if owner.isdigit() else not living


def _mark_on(pid: int) -> str:
    """Return the value of `MARK` in the environment of a program: who started it; "" if it has none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
            if line.startswith(f"{MARK}="):
                return line[len(MARK) + 1 :]
    return ""


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as in `ps`; "X" if it is gone, or if this is not Linux."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "X"


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker of Python's, which unlinks a program's leftover shared memory."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _is_fork_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == SERVER_NAME
    return False


def _kill_tree(pid: int) -> None:
    """Kill a process and all its descendants except resource trackers, which end by themselves."""
    below = children_of(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    for one in below:
        if not is_resource_tracker(one):
            _kill_tree(one)


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found
