"""Shared memory: bytes that several processes see, without a name in any file system.

A `SharedFile` is made empty by the parent and its descriptor handed to the children when they start; who knows the
size first makes it that long, and everybody maps it. Pages nobody touches cost nothing. When the last map is gone, so
is the memory: nothing can be left behind, however a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from reap.children import anonymous_file
from reap.core.slot import Layout, Slot


class SharedFile:
    """An anonymous file; `fd` is what a child is given."""

    def __init__(self, name: str = "reap", fd: int | None = None) -> None:
        self.fd = anonymous_file(name) if fd is None else fd

    def map(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The first `size` bytes, which every process sees; zeros where nobody has written."""
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        # Without a descriptor of its own where Python can: batches may outlive the collector by far.
        extra: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        return np.frombuffer(mmap.mmap(self.fd, size, **extra), np.uint8)

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


class SharedSlots:
    """`count` slots in a shared file. A worker may own some lanes of each: its window."""

    def __init__(self, file: SharedFile, layout: Layout, count: int) -> None:
        self.layout, self.count = layout, count
        with layout.needing_memory():
            self.block = file.map(max(layout.nbytes, 1) * count)
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

    def bytes_of(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a slot."""
        size = self.layout.nbytes
        at = index % self.count * size
        return self.block[at : at + size]

    def _arrays(self, index: int) -> dict[Any, np.ndarray[Any, Any]]:
        return self.layout.arrays(self.bytes_of(index))
