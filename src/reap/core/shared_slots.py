"""Shared memory: anonymous files that several processes map, and slots in them.

The parent creates an empty `SharedFile` and hands its descriptor to the children when they start. The first process
that knows the size sets the length, and every process maps the file. Untouched pages cost nothing. The memory is freed
with the last map, so nothing is left behind, however a process ends.

Writing to a page that has no room on its disk kills the process with SIGBUS. So every byte of a file on a disk is
reserved before it is mapped. Anonymous memory (memfd) has no such limit, and does not depend on the size of /dev/shm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from reap._system.temporary import anonymous_file
from reap.core.slot import Layout, Slot
from reap.errors import NoSpace

_PIECE = 1 << 20  # bytes written at a time on a file system that cannot reserve space


class SharedFile:
    """An anonymous file that several processes map; a child process is given its descriptor `fd`."""

    def __init__(self, name: str = "reap", fd: int | None = None) -> None:
        self.fd = anonymous_file(name) if fd is None else fd

    def map(
        self, size: int, what: str = "memory that processes share", *, on_disk: bool = False
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Map the first `size` bytes, shared with every other process that does; unwritten bytes are zero.

        Raises NoSpace, with `what` in the message, if there is no room. `on_disk`: the file uses space on a disk.
        """
        # From Python 3.13 on the map keeps no descriptor open: batches may outlive the collector by far.
        extra: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        before = os.fstat(self.fd).st_size
        try:
            if before < size and (on_disk or not hasattr(os, "memfd_create")):
                _reserve(self.fd, size)
            elif before < size:
                os.ftruncate(self.fd, size)
            return np.frombuffer(mmap.mmap(self.fd, size, **extra), np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            disk = os.fstatvfs(self.fd)
            if os.fstat(self.fd).st_size != before:
                os.ftruncate(self.fd, before)  # give back what was reserved before space ran out
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                limit = "the limit of open files is reached (ulimit -n)"
                raise NoSpace(f"{what}: a map of {in_bytes(size)} needs a descriptor, and {limit}") from None
            told = f"; {in_bytes(disk.f_bavail * disk.f_frsize)} are free" if on_disk else ""
            raise NoSpace(f"{what}: there is no room for {in_bytes(size)}{told} ({error})") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock between processes; a process that dies inside releases it."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptor. Maps live on as long as an array refers to them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _reserve(fd: int, size: int) -> None:
    """Extend a file to `size` bytes, and make its disk reserve every one of them."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:  # the file system cannot reserve, and this libc does not write zeros instead
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    for at in range(os.fstat(fd).st_size, size, _PIECE):
        left = memoryview(bytes(min(_PIECE, size - at)))
        while left:
            left = left[os.pwrite(fd, left, at + min(_PIECE, size - at) - len(left)) :]


def in_bytes(size: float) -> str:
    """Return a number of bytes as text with a unit, such as "1.5 GB"."""
    size = min(size, 10**30)  # larger numbers would only print more digits
    power = min(max(len(str(int(size))) - 1, 0) // 3, 4)
    return f"{size / 1000**power:,.{min(power, 1)}f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


class SharedSlots:
    """`count` slots in a shared file. A worker may own a window of each: some of its lanes."""

    def __init__(self, file: SharedFile, layout: Layout, count: int) -> None:
        self.layout, self.count = layout, count
        what = f"frames_per_batch: {count} slots of {layout.steps} steps of {layout.lanes} lanes"
        with layout.needing_memory():
            self.block = file.map(max(layout.nbytes, 1) * count, what)
        self._slots: dict[int, Slot] = {}  # kept, because a slot tracks its own loan

    def slot(self, index: int) -> Slot:
        """Return a whole slot. Negative indices count from the end."""
        if index not in self._slots:
            self._slots[index] = Slot(self.layout, index, self._arrays(index))
        return self._slots[index]

    def window(self, index: int, layout: Layout, first: int) -> Slot:
        """Return a view of slot `index` on the lanes that `layout` describes, from lane `first` on."""
        whole = self._arrays(index)
        return Slot(layout, index, {key: whole[key][:, first : first + layout.lanes] for key in whole})

    def _arrays(self, index: int) -> dict[Any, np.ndarray[Any, Any]]:
        at = index % self.count * self.layout.nbytes
        return self.layout.arrays(self.block[at : at + self.layout.nbytes])
