"""AuthenticatedListener: accepts connections of other machines. It reads nothing from a peer without the secret.

    peer ── dial ──► listener (see reap/_system/listener.py) ──► the service the peer requested
                       └── a stranger: refused, logged

    program ──► tunnel (loopback) ──► listener of another machine ──► port (loopback) ──► program

Services behind a listener (stores and agents, which check no secret) listen on the loopback address alone. Gloo's data
connections are the exception: they listen on the address the user named. Members of a gloo group find each other
through the store, and pickles that arrive over gloo are signed.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Mapping

from reap._system.fork_server.client import limits_as_worker_died
from reap._system.listener import Listener, Visitor, dial, settled, woken_selector
from reap.errors import UsageError

LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 20  # bytes relayed at once
_log = logging.getLogger("reap")

Service = Callable[[Visitor], None]


class _Listening:
    """A listening port, and the relay that carries bytes for its connections."""

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
            made.pop_all()  # all succeeded: close nothing

    def _receive(self, visitor: Visitor, service: str) -> None:
        raise NotImplementedError

    def _knows(self, service: str) -> bool:
        return True

    def close(self) -> None:
        """Stop listening, and end all relayed connections."""
        self._listener.close()
        self._relay.close()


class AuthenticatedListener(_Listening):
    """Listens on an address that the user named. `services` holds what visitors can request, by name."""

    def __init__(self, host: str, port: int, secret: bytes, services: Mapping[str, Service]) -> None:
        self._services = services
        super().__init__(host, port, "listener", secret)

    def _knows(self, service: str) -> bool:
        return service in self._services

    def _receive(self, visitor: Visitor, service: str) -> None:
        self._services[service](visitor)

    def forward_to(self, port: int) -> Service:
        """Return a service that connects visitors to a port of the loopback address."""

        def serve(visitor: Visitor) -> None:
            try:
                self._relay.join(visitor.socket, settled(socket.create_connection((LOOPBACK, port))))
            except OSError:
                visitor.socket.close()

        return serve


class Tunnel(_Listening):
    """A port of the loopback address whose connections lead to a service behind another machine's listener."""

    def __init__(self, host: str, port: int, secret: bytes, service: str, *, at: int = 0) -> None:
        self._to = ((host, port), secret, service)
        super().__init__(LOOPBACK, at, "tunnel", None)

    def _receive(self, visitor: Visitor, service: str) -> None:
        try:
            self._relay.join(visitor.socket, dial(*self._to).socket)
        except OSError as error:
            _log.warning("cannot connect to %s:%d: %s", *self._to[0], error)
            visitor.socket.close()


class _Direction:
    """One direction of a socket pair, with the bytes read from `source` and not yet sent to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pending, self.ended = memoryview(b""), False


class SocketRelay:
    """Carries bytes both ways between pairs of sockets, in one thread; it reads no more than it can send on."""

    def __init__(self, name: str) -> None:
        self._directions: dict[socket.socket, tuple[_Direction, _Direction]] = {}  # by socket: from it and to it
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._buffer, self._lock, self._open = bytearray(_CHUNK), threading.Lock(), True
        with contextlib.ExitStack() as made, limits_as_worker_died("the relay between machines"):
            self._selector, self._wake, self._waker = woken_selector(made)
            self._thread = threading.Thread(target=self._run, name=f"reap-relay-{name}", daemon=True)
            self._thread.start()
            made.pop_all()  # all succeeded: close nothing

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Carry bytes between two sockets until one of them is closed."""
        with self._lock:
            if self._open:
                self._new.append((one, other))
                self._waker.send(b"!")
                return
        one.close()
        other.close()

    def close(self) -> None:
        """Close all connections and end the thread."""
        with self._lock:
            self._open = False
            self._waker.send(b"!")
        self._thread.join()
        for one, other in self._new:
            one.close()
            other.close()
        for end in (*self._directions, self._wake, self._waker):
            end.close()
        self._directions.clear()
        self._selector.close()

    def _run(self) -> None:
        while self._open:
            for key, events in self._selector.select():
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._take_in()
                elif key.fileobj in self._directions:
                    self._serve(key.fileobj, events)

    def _take_in(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for one, other in new:
            there, back = _Direction(one, other), _Direction(other, one)
            for end, directions in ((one, (there, back)), (other, (back, there))):
                end.setblocking(False)
                self._directions[end] = directions
                self._selector.register(end, selectors.EVENT_READ)

    def _serve(self, end: socket.socket, events: int) -> None:
        out, back = self._directions[end]  # the directions from this end and to it
        try:
            if events & selectors.EVENT_WRITE:
                self._push(back)
            if events & selectors.EVENT_READ and not out.pending and not out.ended:
                with contextlib.suppress(BlockingIOError):
                    got = end.recv_into(self._buffer)
                    out.ended = got == 0
                    out.pending = memoryview(self._buffer)[:got]
                    self._push(out, fresh=True)
            if out.ended and not out.pending:
                raise ConnectionError  # when one end is closed, the other is closed too
            self._update_selector(out)
        except OSError:
            for one in (out.source, out.sink):
                self._directions.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

    def _push(self, direction: _Direction, *, fresh: bool = False) -> None:
        with contextlib.suppress(BlockingIOError):
            while direction.pending:
                direction.pending = direction.pending[direction.sink.send(direction.pending) :]
        if fresh and direction.pending:
            direction.pending = memoryview(bytes(direction.pending))  # the buffer is reused for the next read

    def _update_selector(self, direction: _Direction) -> None:
        """Select for reading where no bytes are pending, and for writing where some are."""
        for end in (direction.source, direction.sink):
            out, back = self._directions[end]
            wanted = (selectors.EVENT_READ if not out.pending else 0) | (selectors.EVENT_WRITE if back.pending else 0)
            if wanted == 0:
                if end in self._selector.get_map():
                    self._selector.unregister(end)
            elif end not in self._selector.get_map():
                self._selector.register(end, wanted)
            elif self._selector.get_key(end).events != wanted:
                self._selector.modify(end, wanted)
