"""Semaphores of `multiprocessing`, in locks, events, conditions, barriers, queues and values: how workers share them.

One with a name is opened by its name. One without a name, of the fork context, lies in memory that only forks share:
its page is moved into an anonymous file, whose descriptor is sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from multiprocessing import reduction, synchronize
from pathlib import Path
from typing import Any, cast

from reap._system.shared_objects.descriptors import Descriptor, OwnedFd, here

_REMEDY = "make it with multiprocessing.get_context('spawn')"


def reduce_semaphore(lock: synchronize.SemLock) -> Any:
    inner = cast(Any, lock)._semlock
    if inner.name is None or cast(Any, lock)._is_fork_ctx:
        fd = reduction.DupFd(_page_of(lock).number)
        return _semaphore_on_page, (type(lock), fd, inner.kind, inner.maxvalue)
    return _named_semaphore, (type(lock), inner.kind, inner.maxvalue, inner.name)


def release_held(locks: Iterable[Any]) -> None:
    """Release those of these locks that this thread holds; one of `threading`, which does not say whose it is, too."""
    for lock in locks:
        inner = getattr(lock, "_semlock", None)  # of `multiprocessing`
        if lock.locked() if inner is None else inner._is_mine():
            lock.release()


def _named_semaphore(kind: Any, *state: Any) -> Any:
    lock = kind.__new__(kind)
    lock.__setstate__((0, *state))
    return lock


def _semaphore_on_page(kind: Any, fd: Descriptor, sort: int, most: int) -> Any:
    number = fd.detach()
    page = mmap.mmap(number, mmap.PAGESIZE)
    lock = kind.__new__(kind)
    lock.__setstate__((ctypes.addressof(ctypes.c_char.from_buffer(page)), sort, most, None))
    _pages.append(page)  # kept for good: a bound `acquire` may outlive the lock, and does not keep the page
    _moved[lock] = OwnedFd(number)  # this process may send it on
    return lock


_pages: list[mmap.mmap] = []
_moved: weakref.WeakKeyDictionary[Any, OwnedFd] = weakref.WeakKeyDictionary()


def _page_of(lock: synchronize.SemLock) -> OwnedFd:
    """Return the memory of a semaphore without a name, as a file that other processes can map.

    A semaphore of the fork context (the default on Linux before Python 3.14) was unlinked when it was made: only forks
    can have it. Its page is replaced, at the same address, by one of an anonymous file: this process goes on using the
    semaphore, and processes that receive the file can join.
    """
    if lock not in _moved:
        address = cast(Any, lock)._semlock.handle
        try:
            others = _others() if here.popen is None or here.popen.others is None else here.popen.others
            if here.popen is not None:
                here.popen.others = others
            if _inode_at(address) in others:
                raise OSError("a process forked from this one, or the one that forked it, has it already")
            _moved[lock] = _moved_page(address)
        except OSError as cause:
            raise ValueError(
                f"a {type(lock).__name__} of multiprocessing's fork context cannot be shared with a worker ({cause}); "
                f"{_REMEDY}"
            ) from cause
    return _moved[lock]


def _inode_at(address: int) -> str:
    """Return the inode of the file that is mapped at this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(None, 1)[0].split("-"))
        if first <= address < last:
            return line.split()[4]
    raise OSError("its memory was not found in /proc/self/maps")


def _others() -> set[str]:
    """Return the inodes of the semaphores that other processes of this user have mapped."""
    found: set[str] = set()
    for one in Path("/proc").iterdir():
        if one.name.isdigit() and int(one.name) != os.getpid():
            with contextlib.suppress(OSError):
                if one.stat().st_uid != os.getuid():
                    continue
                text = (one / "maps").read_text(errors="replace")
                found |= (
                    {line.split()[4] for line in text.splitlines() if "/sem." in line} if "/sem." in text else set()
                )
    return found


def _moved_page(address: int) -> OwnedFd:
    """Move the page at `address` into an anonymous file, which is mapped there from now on; return the file."""
    if sys.platform != "linux" or address % mmap.PAGESIZE:
        raise OSError("its memory cannot be moved here")
    # PyDLL keeps the interpreter's lock, so that no other Python thread runs in between. A thread that waits for this
    # very semaphore has released that lock: it is woken on the old page below, and goes on to wait on the new one.
    libc = ctypes.PyDLL(None, use_errno=True)
    for call in (libc.mmap, libc.mremap):
        call.restype = ctypes.c_void_p
    size, failed = ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_void_p(-1).value
    fd = OwnedFd(os.memfd_create("reap-semaphore"))
    os.ftruncate(fd.number, mmap.PAGESIZE)
    old = libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(0), size, 1)  # MREMAP_MAYMOVE of 0 bytes: a 2nd mapping
    if old == failed:
        raise OSError(ctypes.get_errno(), "its memory cannot be mapped twice")
    with mmap.mmap(fd.number, mmap.PAGESIZE) as new:
        new[:] = ctypes.string_at(address, mmap.PAGESIZE)
        placed = libc.mmap(
            ctypes.c_void_p(address),
            size,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | 0x10,  # MAP_FIXED
            fd.number,
            ctypes.c_long(0),
        )
    if placed != failed:
        for _ in range(threading.active_count()):
            libc.sem_post(ctypes.c_void_p(old))
    libc.munmap(ctypes.c_void_p(old), size)
    if placed == failed:
        raise OSError(ctypes.get_errno(), "its memory cannot be moved")
    return fd
