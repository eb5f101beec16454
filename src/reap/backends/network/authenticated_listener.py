"""AuthenticatedListener: what listens to other machines. Nothing is read from anybody who does not know the secret.

    peer ── dial ──► listener (see reap/_system/listener.py) ──► what the peer asked for
                       └── a stranger: refused, logged

    program ──► tunnel (loopback) ──► listener of another machine ──► port (loopback) ──► program

Behind a listener everything listens on the loopback address alone: stores and agents that know no secrets. Gloo's data
connections are the exception: they listen on the address that was named. Who is in a group is agreed upon in the store,
and pickles that come that way are signed.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Mapping

from reap._system.fork_server.client import enough_room
from reap._system.listener import Listener, Visitor, dial, settled, woken_selector
from reap.errors import UsageError

LOOPBACK = "127.0.0.1"
_PIECE = 1 << 20  # bytes carried at once
_log = logging.getLogger("reap")

Service = Callable[[Visitor], None]


class _Listening:
    """A port, and the relay that carries bytes for those who connected to it."""

    def __init__(self, host: str, port: int, name: str, secret: bytes | None) -> None:
        try:
            listening = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
        self.host, self.port = host, int(listening.getsockname()[1])
        with contextlib.ExitStack() as made:
            made.callback(listening.close)
            self._relay = SocketRelay(name)
            made.callback(self._relay.close)
            self._listener = Listener(listening, name, secret, self._receive, self._knows)
            made.pop_all()  # it is here to stay

    def _receive(self, visitor: Visitor, service: str) -> None:
        raise NotImplementedError

    def _knows(self, service: str) -> bool:
        return True

    def close(self) -> None:
        """Stop listening, and end every connection that was made here."""
        self._listener.close()
        self._relay.close()


class AuthenticatedListener(_Listening):
    """Listens on an address the user has named. `services` say what visitors can ask for."""

    def __init__(self, host: str, port: int, secret: bytes, services: Mapping[str, Service]) -> None:
        self._services = services
        super().__init__(host, port, "listener", secret)

    def _knows(self, service: str) -> bool:
        return service in self._services

    def _receive(self, visitor: Visitor, service: str) -> None:
        self._services[service](visitor)

    def lead_to(self, port: int) -> Service:
        """Return a service that connects visitors to a port of the loopback address."""

        def serve(visitor: Visitor) -> None:
            try:
                self._relay.join(visitor.socket, settled(socket.create_connection((LOOPBACK, port))))
            except OSError:
                visitor.socket.close()

        return serve


class Tunnel(_Listening):
    """A port of the loopback address that leads through the listener of another machine."""

    def __init__(self, host: str, port: int, secret: bytes, service: str, *, at: int = 0) -> None:
        self._to = ((host, port), secret, service)
        super().__init__(LOOPBACK, at, "tunnel", None)

    def _receive(self, visitor: Visitor, service: str) -> None:
        try:
            self._relay.join(visitor.socket, dial(*self._to).socket)
        except OSError as error:
            _log.warning("no way to %s:%d: %s", *self._to[0], error)
            visitor.socket.close()


class _Direction:
    """One direction of a pair of sockets: what was read from one and not yet taken by the other."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.rest, self.ended = memoryview(b""), False


class SocketRelay:
    """Carries bytes both ways between pairs of sockets, in one thread, never more than it can hand on."""

    def __init__(self, name: str) -> None:
        self._ways: dict[socket.socket, tuple[_Direction, _Direction]] = {}  # by socket: from it, and to it
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._room, self._lock, self._open = bytearray(_PIECE), threading.Lock(), True
        with contextlib.ExitStack() as made, enough_room("what carries bytes between machines"):
            self._selector, self._wake, self._waker = woken_selector(made)
            self._thread = threading.Thread(target=self._run, name=f"reap-relay-{name}", daemon=True)
            self._thread.start()
            made.pop_all()  # it is here to stay

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Carry bytes between these two from now on, until one of them ends."""
        with self._lock:
            if self._open:
                self._new.append((one, other))
                self._waker.send(b"!")
                return
        one.close()
        other.close()

    def close(self) -> None:
        """End all connections, and the thread."""
        with self._lock:
            self._open = False
            self._waker.send(b"!")
        self._thread.join()
        for one, other in self._new:
            one.close()
            other.close()
        for end in (*self._ways, self._wake, self._waker):
            end.close()
        self._ways.clear()
        self._selector.close()

    def _run(self) -> None:
        while self._open:
            for key, events in self._selector.select():
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._take_in()
                elif key.fileobj in self._ways:
                    self._serve(key.fileobj, events)

    def _take_in(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for one, other in new:
            there, back = _Direction(one, other), _Direction(other, one)
            for end, ways in ((one, (there, back)), (other, (back, there))):
                end.setblocking(False)
                self._ways[end] = ways
                self._selector.register(end, selectors.EVENT_READ)

    def _serve(self, end: socket.socket, events: int) -> None:
        out, back = self._ways[end]  # from this end, and to it
        try:
            if events & selectors.EVENT_WRITE:
                self._push(back)
            if events & selectors.EVENT_READ and not out.rest and not out.ended:
                with contextlib.suppress(BlockingIOError):
                    got = end.recv_into(self._room)
                    out.ended = got == 0
                    out.rest = memoryview(self._room)[:got]
                    self._push(out, fresh=True)
            if out.ended and not out.rest:
                raise ConnectionError  # an end that is over takes the other along
            self._look_at(out)
        except OSError:
            for one in (out.source, out.sink):
                self._ways.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

    def _push(self, way: _Direction, *, fresh: bool = False) -> None:
        with contextlib.suppress(BlockingIOError):
            while way.rest:
                way.rest = way.rest[way.sink.send(way.rest) :]
        if fresh and way.rest:
            way.rest = memoryview(bytes(way.rest))  # the room is for the next

    def _look_at(self, way: _Direction) -> None:
        """Read where there is room, write where there is something left."""
        for end in (way.source, way.sink):
            out, back = self._ways[end]
            wanted = (selectors.EVENT_READ if not out.rest else 0) | (selectors.EVENT_WRITE if back.rest else 0)
            if wanted == 0:
                if end in self._selector.get_map():
                    self._selector.unregister(end)
            elif end not in self._selector.get_map():
                self._selector.register(end, wanted)
            elif self._selector.get_key(end).events != wanted:
                self._selector.modify(end, wanted)
