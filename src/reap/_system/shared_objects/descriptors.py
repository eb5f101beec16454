"""Descriptors sent to another process: duplicated, sent beside the bytes, referred to by their place in the message.

pack ──► duplicate_for_child: the 3rd ──► Descriptor(3) in the bytes ──► unpack ──► detach: a number of that process
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence


class OwnedFd:
    """A descriptor that is closed when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class Descriptor:
    """A descriptor, given by its place in the message it comes with."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return a descriptor of this process, for the caller to close."""
        return os.dup(here.arrived[self._place].number)


class PackingPopen:
    """The object `multiprocessing` calls while it pickles for a process it starts: here, the message being packed."""

    DupFd = Descriptor  # pickled in place of the number

    def __init__(self) -> None:
        self.fds: list[OwnedFd] = []
        self.others: set[str] | None = None  # semaphores that other processes have mapped, once that was looked up

    def duplicate_for_child(self, fd: int) -> int:
        """Duplicate a descriptor, so that the original may be closed before the child has it; return its place."""
        self.fds.append(OwnedFd(os.dup(fd)))
        return len(self.fds) - 1


class Here(threading.local):
    """What the current thread is packing or unpacking."""

    popen: PackingPopen | None = None  # set while packing for a process of this machine
    refusing = False  # True while packing for any process
    arrived: Sequence[OwnedFd] = ()  # the descriptors that came with what is being unpacked


here = Here()


@contextlib.contextmanager
def receiving(fds: Sequence[OwnedFd]) -> Iterator[None]:
    """Within the block, unpickled objects take their descriptors from these."""
    before, here.arrived = here.arrived, fds
    try:
        yield
    finally:
        here.arrived = before


_COUNT = struct.Struct("!i")
_AT_ONCE = 200  # descriptors in one message; Linux takes 253
_PATIENCE = 60.0  # seconds until descriptors that the child does not take are an error


def send_fds(one: socket.socket, fds: Sequence[OwnedFd]) -> None:
    """Send a child its first message: the number of descriptors, and the descriptors themselves."""
    numbers, word = [fd.number for fd in fds], _COUNT.pack(len(fds))
    deadline = time.monotonic() + _PATIENCE
    while word:
        try:
            socket.send_fds(one, [word], numbers[:_AT_ONCE])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # the sentinel reports a child that is gone
                return
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)  # until earlier children have taken theirs: there is nothing to wait on
            continue
        del numbers[:_AT_ONCE]
        word = b"!" if numbers else b""


def received_fds(connection: int) -> list[OwnedFd]:
    """Receive, in the child, the descriptors that `send_fds` sent."""
    one = socket.socket(fileno=connection)
    try:
        data, found, _, _ = socket.recv_fds(one, _COUNT.size, _AT_ONCE)
        if not data:
            raise EOFError
        (count,) = _COUNT.unpack(data)
        while len(found) < count:
            found += socket.recv_fds(one, 1, _AT_ONCE)[1]
    finally:
        one.detach()
    for fd in found:
        os.set_inheritable(fd, False)
    return [OwnedFd(fd) for fd in found]
