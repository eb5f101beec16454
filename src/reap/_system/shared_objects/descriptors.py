"""Descriptors on their way to another process: duplicated, sent beside the bytes, and found there by their place.

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
    """A descriptor that is closed when nobody refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class PackingPopen:
    """What `multiprocessing` asks while it pickles for a process it starts: here, the message that is being packed."""

    def __init__(self) -> None:
        self.fds: list[OwnedFd] = []
        self.others: set[str] | None = None  # semaphores that other processes have, once somebody has looked

    def duplicate_for_child(self, fd: int) -> int:
        """Keep it, whatever becomes of the original until the child is there; returns its place in the message."""
        self.fds.append(OwnedFd(os.dup(fd)))
        return len(self.fds) - 1

    @staticmethod
    def DupFd(place: int) -> Descriptor:
        """Return what travels in place of the number."""
        return Descriptor(place)


class Descriptor:
    """A descriptor by its place in the message it comes with."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return a descriptor of this process, for the caller to close."""
        return os.dup(here.arrived[self._place].number)


class Here(threading.local):
    """What this thread is packing or unpacking."""

    popen: PackingPopen | None = None  # packing for a process of this machine
    refusing = False  # packing for any process
    arrived: Sequence[OwnedFd] = ()  # the descriptors that came with what is being unpacked


here = Here()


@contextlib.contextmanager
def receiving(fds: Sequence[OwnedFd]) -> Iterator[None]:
    """Inside, what is unpickled finds its descriptors among these."""
    before, here.arrived = here.arrived, fds
    try:
        yield
    finally:
        here.arrived = before


_COUNT = struct.Struct("!i")
_AT_ONCE = 200  # descriptors in one message; Linux takes 253
_PATIENCE = 60.0  # seconds until it is said that descriptors are not taken


def send_fds(one: socket.socket, fds: Sequence[OwnedFd]) -> None:
    """The first words to a child: how many descriptors come with what it is sent, and these."""
    numbers, word = [fd.number for fd in fds], _COUNT.pack(len(fds))
    deadline = time.monotonic() + _PATIENCE
    while word:
        try:
            socket.send_fds(one, [word], numbers[:_AT_ONCE])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # one that is gone says so through its sentinel
                return
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)  # until children before it have taken theirs: there is nothing to wait on
            continue
        del numbers[:_AT_ONCE]
        word = b"!" if numbers else b""


def received_fds(connection: int) -> list[OwnedFd]:
    """Receive the descriptors that `send_fds` has sent, in the child."""
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
