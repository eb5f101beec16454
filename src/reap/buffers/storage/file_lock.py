"""FileLock: a mutex for the threads of all processes that also shows which writers are still alive.

    byte 0        the lock itself                      held while a few words change, never while data is copied
    byte 1 + i    "the writer of entry i is alive"     held while it writes; the kernel releases it when it dies

Record locks belong to a process and a file: closing any descriptor of the file would drop them all. So the locks have
a file of their own that is never mapped, and a process keeps one `FileLock` per file, however many buffers use it.

A process that dies releases its locks; one that is stopped (SIGSTOP) or hangs does not. So a process waits for another
for at most `patience` seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reap._system.forks import renew
from reap._system.interrupts import Interrupts
from reap._system.threads import CTRL_C
from reap.errors import WorkerSilent

_POLL = 0.0005  # seconds between polls: another process gives us no handle to wait on
_MOST_PER_POLL = 0.1  # the most seconds one poll counts for: it takes longer only while this process itself is stopped
_LOG_AFTER = 60.0  # seconds after which waiting is mentioned in the log
_FLOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process
_log = logging.getLogger("reap")

_locks: weakref.WeakValueDictionary[tuple[int, int], FileLock] = weakref.WeakValueDictionary()
_making = threading.Lock()


class FileLock:
    """A lock of one file; a process has one per file. Obtain it by `lock_of(fd)`."""

    def __init__(self, fd: int) -> None:
        self.fd, self._fds = fd, [fd]
        self._threads, self._depth = threading.RLock(), 0
        self._claimed: set[int] = set()
        self.interrupts = Interrupts()  # held back while the lock is held, and while rows are written
        self.patience: float | None = None  # seconds this process waits for another one; None: without limit
        renew(self, _threads=threading.RLock, _depth=int, _claimed=set)  # a fork inherits our memory, not our locks

    def __del__(self) -> None:
        for fd in () if contextlib is None else self._fds:  # None while the interpreter shuts down
            with contextlib.suppress(OSError):
                os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock inside the block, and Ctrl-C back until its end. A process that dies inside releases it."""
        with self.interrupts.held():
            while not self._threads.acquire(timeout=CTRL_C):
                self.interrupts.let_in()
            try:
                if not self._depth:  # record locks do not nest: the first unlock would release them all
                    self._lock()
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                    if not self._depth:
                        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, 0)
            finally:
                self._threads.release()

    def _lock(self) -> None:
        waiting = Waiting(self.patience)
        while not self._try():
            waiting.poll(None, self._describe_holder)
            self.interrupts.let_in()

    def _try(self) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except (BlockingIOError, PermissionError):  # which of the two depends on the system
            return False
        return True

    def _describe_holder(self) -> str:
        """Describe the process that holds the lock."""
        pid = 0
        if sys.platform == "linux":
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            pid = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))[4]
        return f"{describe_process(pid)} holds the replay buffer's lock"

    def claim(self, entry: int) -> bool:
        """Mark the writer of `entry` as alive; False if it already is. Call inside `locked` only."""
        if entry in self._claimed:
            return False
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + entry)
        except OSError:
            return False
        self._claimed.add(entry)
        return True

    def release(self, entry: int) -> None:
        """Clear the mark that the writer of `entry` is alive. Call inside `locked` only."""
        self._claimed.discard(entry)
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, 1 + entry)


class Waiting:
    """Measures how long another process is waited for, without the time in which this process itself was stopped."""

    def __init__(self, patience: float | None) -> None:
        self._patience, self._seconds, self._whom = patience, 0.0, object()
        self._logged = False

    def poll(self, whom: Any, describe: Callable[[], str]) -> None:
        """Sleep briefly; raise `WorkerSilent`, which names `describe()`, after too long a wait for the same `whom`."""
        if whom != self._whom:
            self._whom, self._seconds = whom, 0.0
        before = time.monotonic()
        time.sleep(_POLL)
        self._seconds += min(time.monotonic() - before, _MOST_PER_POLL)
        if self._patience is not None and self._seconds > self._patience:
            raise WorkerSilent(
                f"{describe()} for {self._seconds:.1f} s (timeout={self._patience:g}), and other processes wait for "
                f"it; resume or end it (its unfinished rows are then dropped)"
            )
        if self._seconds > _LOG_AFTER and not self._logged:
            self._logged = True
            limit = "None" if self._patience is None else f"{self._patience:g}"
            text = "%s for %.0f s, and other processes wait for it (timeout=%s)"
            _log.warning(text, describe(), self._seconds, limit)


def describe_process(pid: int, worker: int | None = None) -> str:
    """Return a description of a process for errors: which worker it is, and whether it is stopped."""
    if pid == os.getpid():
        return "another thread of this process"
    name = f"process {pid}" if worker is None else f"worker {worker} (pid {pid})"
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        name += ", which is stopped," if state in "Tt" else ""
    return name if pid > 0 else "another process"


def lock_of(fd: int) -> FileLock:
    """Return the lock of the file behind `fd`. The lock owns `fd` from now on."""
    stat = os.fstat(fd)
    with _making:
        found = _locks.get((stat.st_dev, stat.st_ino))
        if found is None:
            found = _locks[stat.st_dev, stat.st_ino] = FileLock(fd)
        elif fd not in found._fds:
            found._fds.append(fd)  # closed together with the others: closing it earlier would drop every lock
        return found
