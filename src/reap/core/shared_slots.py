"""Shared memory: bytes that several processes see, without a name in any file system.

A `SharedFile` is made empty by the parent and its descriptor handed to the children when they start; who knows the
size first makes it that long, and everybody maps it. Pages nobody touches cost nothing. When the last map is gone, so
is the memory: nothing can be left behind, however a process ends.

A page of a file that its disk has no room for is no error but SIGBUS, the end of the process. So what lies on a disk is
reserved to the last byte before it is mapped. Memory without a name (memfd) has no such limit: /dev/shm is not asked.
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

_PIECE = 1 << 20  # bytes written at a time where a file system cannot reserve


class SharedFile:
    """An anonymous file; `fd` is what a child is given."""

    def __init__(self, name: str = "reap", fd: int | None = None) -> None:
        self.fd = anonymous_file(name) if fd is None else fd

    def map(
        self, size: int, what: str = "memory that processes share", *, on_disk: bool = False
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The first `size` bytes, which every process sees; zeros where nobody has written.

        `what` is in the error where there is no room for it; `on_disk` for a file that has a disk to fill.
        """
        # Without a descriptor of its own where Python can: batches may outlive the collector by far.
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
                os.ftruncate(self.fd, before)  # what was reserved until there was no more
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                limit = "the limit of open files is reached (ulimit -n)"
                raise NoSpace(f"{what}: a map of {in_bytes(size)} needs a descriptor, and {limit}") from None
            told = f"; {in_bytes(disk.f_bavail * disk.f_frsize)} are free" if on_disk else ""
            raise NoSpace(f"{what}: there is no room for {in_bytes(size)}{told} ({error})") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all processes that do so; one that dies inside leaves no lock behind."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the descriptor back. Maps stay as long as somebody looks at them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _reserve(fd: int, size: int) -> None:
    """Make a file that long, with every byte of it on the disk."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:  # a file system that has no such thing, and a libc that does not write in its stead
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    for at in range(os.fstat(fd).st_size, size, _PIECE):
        left = memoryview(bytes(min(_PIECE, size - at)))
        while left:
            left = left[os.pwrite(fd, left, at + min(_PIECE, size - at) - len(left)) :]


def in_bytes(size: float) -> str:
    """A number of bytes for people."""
    size = min(size, 10**30)  # what nobody has needs no digits
    power = min(max(len(str(int(size))) - 1, 0) // 3, 4)
    return f"{size / 1000**power:,.{min(power, 1)}f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


class SharedSlots:
    """`count` slots in a shared file. A worker may own some lanes of each: its window."""

    def __init__(self, file: SharedFile, layout: Layout, count: int) -> None:
        self.layout, self.count = layout, count
        what = f"frames_per_batch: {count} slots of {layout.steps} steps of {layout.lanes} lanes"
        with layout.needing_memory():
            self.block = file.map(max(layout.nbytes, 1) * count, what)
        self._slots: dict[int, Slot] = {}  # kept: a slot remembers whom it is lent to

    def slot(self, index: int) -> Slot:
        """The whole slot. Negative numbers count from the end."""
        if index not in self._slots:
            self._slots[index] = Slot(self.layout, index, self._arrays(index))
        return self._slots[index]

    def window(self, index: int, layout: Layout, first: int) -> Slot:
        """The lanes of a slot from `first` on that `layout` describes."""
        whole = self._arrays(index)
        return Slot(layout, index, {key: whole[key][:, first : first + layout.lanes] for key in whole})

    def _arrays(self, index: int) -> dict[Any, np.ndarray[Any, Any]]:
        at = index % self.count * self.layout.nbytes
        return self.layout.arrays(self.block[at : at + self.layout.nbytes])
