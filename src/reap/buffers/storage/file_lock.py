"""FileLock: one at a time among the threads of all processes, and who among them is still alive.

    byte 0        the lock itself                      held while a few words change, never while data is copied
    byte 1 + i    "the writer of entry i is alive"     held while it writes; the kernel lets go when it dies

Record locks belong to a process and a file: closing any descriptor of the file would drop them all. So the locks have
a file of their own that nobody maps, and a process keeps one `FileLock` for it, however many buffers look through it.

Who dies lets go; who is stopped (SIGSTOP) or hangs does not. So nobody waits for another for longer than `patience`.
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
from reap.errors import WorkerSilent

_LAP = 0.0005  # seconds between looks at somebody who is waited for: another process, there is nothing to wait on
_ONCE = 0.1  # seconds that one look counts for at most: more pass only while this process is stopped itself
_WORD = 60.0  # seconds after which waiting without a limit is mentioned in the log
_FLOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process
_log = logging.getLogger("reap")

_locks: weakref.WeakValueDictionary[tuple[int, int], FileLock] = weakref.WeakValueDictionary()
_making = threading.Lock()


class FileLock:
    """Use `lock_of(fd)`: there is one for each file in a process."""

    def __init__(self, fd: int) -> None:
        self.fd, self._fds = fd, [fd]
        self._threads, self._depth = threading.RLock(), 0
        self._mine: set[int] = set()
        self.patience: float | None = None  # seconds this process waits for somebody else; None: as long as it takes
        renew(self, _threads=threading.RLock, _depth=int, _mine=set)  # a fork keeps what we remember, not what we hold

    def __del__(self) -> None:
        for fd in () if contextlib is None else self._fds:  # else Python ends, and takes everything along
            with contextlib.suppress(OSError):
                os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone; one that dies inside leaves no lock behind."""
        with self._threads:
            if not self._depth:  # record locks do not count: the first unlock would end them all
                self._lock()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, 0)

    def _lock(self) -> None:
        if self.patience is None:
            fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, 0)
            return
        waiting = Waiting(self.patience)
        while not self._try():
            waiting.lap(None, self._whose)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except (BlockingIOError, PermissionError):  # which of the two depends on the system
            return False
        return True

    def _whose(self) -> str:
        """Say who holds the lock."""
        pid = 0
        if sys.platform == "linux":
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            pid = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))[4]
        return f"{describe_process(pid)} holds the replay buffer's lock"

    def claim(self, entry: int) -> bool:
        """Say that the writer of `entry` lives. False if another process says so. Inside `locked` only."""
        if entry in self._mine:
            return False
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + entry)
        except OSError:
            return False
        self._mine.add(entry)
        return True

    def release(self, entry: int) -> None:
        """Nobody writes for `entry`. Inside `locked` only."""
        self._mine.discard(entry)
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, 1 + entry)


class Waiting:
    """How long somebody is waited for. The time in which this process was stopped itself does not count."""

    def __init__(self, patience: float | None) -> None:
        self._patience, self._seconds, self._whom = patience, 0.0, object()
        self._mentioned = False

    def lap(self, whom: Any, who: Callable[[], str]) -> None:
        """Wait a little for `whom`; `WorkerSilent` if that has been too long, which says `who` it is."""
        if whom != self._whom:
            self._whom, self._seconds = whom, 0.0
        before = time.monotonic()
        time.sleep(_LAP)
        self._seconds += min(time.monotonic() - before, _ONCE)
        if self._patience is not None and self._seconds > self._patience:
            raise WorkerSilent(
                f"{who()} for {self._seconds:.1f} s (timeout={self._patience:g}), and everybody waits for it; "
                f"let it go on, or end it: what it was writing is given up then"
            )
        if self._seconds > _WORD and not self._mentioned:
            self._mentioned = True
            _log.warning("%s for %.0f s, and everybody waits for it (timeout=None)", who(), self._seconds)


def describe_process(pid: int, worker: int | None = None) -> str:
    """A process, for people: which worker it is, and whether it is stopped."""
    if pid == os.getpid():
        return "another thread of this process"
    name = f"process {pid}" if worker is None else f"worker {worker} (pid {pid})"
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        name += ", which is stopped," if state in "Tt" else ""
    return name if pid > 0 else "another process"


def lock_of(fd: int) -> FileLock:
    """Return the lock of the file behind `fd`, which it owns from now on."""
    stat = os.fstat(fd)
    with _making:
        found = _locks.get((stat.st_dev, stat.st_ino))
        if found is None:
            found = _locks[stat.st_dev, stat.st_ino] = FileLock(fd)
        elif fd not in found._fds:
            found._fds.append(fd)  # not closed before the others: that would drop every lock
        return found
