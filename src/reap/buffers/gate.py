"""Gate: one at a time among the threads of all processes, and who among them is still alive.

    byte 0        the gate itself                      held while a few words change, never while data is copied
    byte 1 + i    "the writer of entry i is alive"     held while it writes; the kernel lets go when it dies

Record locks belong to a process and a file: closing any descriptor of the file would drop them all. So the locks have
a file of their own that nobody maps, and a process keeps one gate for it, however many buffers look through it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator

from reap.forks import renew

_gates: weakref.WeakValueDictionary[tuple[int, int], Gate] = weakref.WeakValueDictionary()
_making = threading.Lock()


class Gate:
    """Use `gate(fd)`: there is one for each file in a process."""

    def __init__(self, fd: int) -> None:
        self.fd, self._fds = fd, [fd]
        self._threads, self._depth = threading.RLock(), 0
        self._mine: set[int] = set()
        renew(self, _threads=threading.RLock, _depth=int, _mine=set)  # a fork keeps what we remember, not what we hold

    def __del__(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone; one that dies inside leaves no lock behind."""
        with self._threads:
            if not self._depth:  # record locks do not count: the first unlock would end them all
                fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, 0)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, 0)

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


def gate(fd: int) -> Gate:
    """The gate of the file behind `fd`, which it owns from now on."""
    stat = os.fstat(fd)
    with _making:
        found = _gates.get((stat.st_dev, stat.st_ino))
        if found is None:
            found = _gates[stat.st_dev, stat.st_ino] = Gate(fd)
        elif fd not in found._fds:
            found._fds.append(fd)  # not closed before the others: that would drop every lock
        return found
