"""Messages between a parent and a child, each preceded by its length, as `multiprocessing.connection` writes them."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from reap._system.interrupts import Interrupts
from reap._system.messages.pickling import dumps

_PIECE = 1 << 20  # bytes read at once
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")  # of a message, as `Connection` writes them


def send(connection: Connection, thing: Any) -> None:
    """Send any object for `MessageSocket.receive`. `connection.send` would share tensors, not send their values."""
    connection.send_bytes(dumps(thing, "a message from a child"))


class MessageSocket:
    """The parent's end of a child's connection. Only `finish` blocks: no slow reader or half-received message does."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket = own
        self._received, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a message as far as the socket takes it; `flush` sends the rest."""
        long = len(data) > 0x7FFFFFFF
        self._unsent += _LENGTH.pack(-1) + _LONG_LENGTH.pack(len(data)) if long else _LENGTH.pack(len(data))
        self._unsent += data
        self.flush()

    def flush(self) -> bool:
        """Send more of what is left; return whether nothing is left: it was sent, or the child is gone."""
        if not self._unsent:
            return True
        try:
            with Interrupts().held():  # Ctrl-C after sending would have the same bytes sent again
                while self._unsent:
                    with memoryview(self._unsent)[:_PIECE] as piece:
                        sent = self._socket.send(piece)
                    del self._unsent[:sent]
        except BlockingIOError:
            return False
        except OSError:  # the sentinel reports a child that is gone
            self._unsent.clear()
        return True

    def finish(self) -> None:
        """Send what is left, waiting for the child to read it: for callers that have nothing else to do."""
        while not self.flush():
            until_ready([], [self.fileno()])

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived completely."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while piece := self._socket.recv(_PIECE):
                self._received += piece
        found = []
        while (ends := self._first()) is not None:
            start, end = ends
            found.append(bytes(memoryview(self._received)[start:end]))
            del self._received[:end]
        return found

    def _first(self) -> tuple[int, int] | None:
        """Return where the first message begins and ends, if it has arrived completely."""
        start = _LENGTH.size
        if len(self._received) < start:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size < 0:
            start += _LONG_LENGTH.size
            if len(self._received) < start:
                return None
            (size,) = _LONG_LENGTH.unpack_from(self._received, _LENGTH.size)
        return (start, start + size) if len(self._received) >= start + size else None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def until_ready(reading: Iterable[int], writing: Iterable[int] = (), within: float | None = None) -> bool:
    """Wait until one of these descriptors is ready, for at most `within` seconds; return whether one is.

    `select.select` would not do: it refuses descriptors from 1024 on, which programs with many envs or files have.
    """
    poll, asked = select.poll(), dict.fromkeys(reading, select.POLLIN)
    for fd in writing:
        asked[fd] = asked.get(fd, 0) | select.POLLOUT
    for fd, events in asked.items():
        poll.register(fd, events)
    return bool(poll.poll(None if within is None else math.ceil(max(0.0, within) * 1000)))
