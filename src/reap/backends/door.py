"""Door: the one thing that listens to other machines. Nobody passes without the secret, and nothing is read before.

    peer ── dial ──► door: nonce ◄─► nonce, each side proves that it knows the secret ──► what the peer asked for
                       └── a stranger: refused, logged

    program ──► tunnel (loopback) ──► door of another machine ──► port (loopback) ──► program

Behind a door everything listens on the loopback address alone: stores and agents that know no secrets.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from reap.errors import UsageError

LOOPBACK = "127.0.0.1"
_PATIENCE = 5.0  # seconds a peer has to prove itself
_NONCE, _PROOF, _NAME = 32, 32, 16  # bytes
_PIECE = 1 << 20  # bytes carried at once
_log = logging.getLogger("reap")

Service = Callable[["Visitor"], None]


class Refused(ConnectionError):
    """One of the two sides does not know the secret."""


class Visitor(NamedTuple):
    """A connection whose other side has proved itself, and a key that only the two know."""

    socket: socket.socket
    key: bytes
    host: str  # the other side's


def dial(host: str, port: int, secret: bytes, service: str) -> Visitor:
    """Ask a door for something."""
    connection = socket.create_connection((host, port), timeout=_PATIENCE)
    try:
        theirs, ours, name = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE), _named(service)
        connection.sendall(ours + _proof(secret, b"visitor", theirs, ours, name) + name)
        try:
            proof = _exactly(connection, _PROOF)
        except ConnectionError:
            raise Refused(f"{host}:{port} refused us: it has another secret, or no {service!r} for us") from None
        if not hmac.compare_digest(proof, _proof(secret, b"door", theirs, ours, name)):
            raise Refused(f"{host}:{port} does not know the secret")
        return Visitor(_settled(connection), _proof(secret, b"key", theirs, ours, name), host)
    except BaseException:
        connection.close()
        raise


def _welcome(connection: socket.socket, secret: bytes) -> tuple[str, bytes]:
    """The door's side of `dial`: what is asked for, and the common key."""
    connection.settimeout(_PATIENCE)
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(ours)
    said = _exactly(connection, _NONCE + _PROOF + _NAME)
    theirs, proof, name = said[:_NONCE], said[_NONCE:-_NAME], said[-_NAME:]
    if not hmac.compare_digest(proof, _proof(secret, b"visitor", ours, theirs, name)):
        raise Refused("it does not know the secret")
    connection.sendall(_proof(secret, b"door", ours, theirs, name))
    return name.rstrip(b"\0").decode(), _proof(secret, b"key", ours, theirs, name)


def _proof(secret: bytes, role: bytes, one: bytes, other: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((b"reap", role, one, other, name)), "sha256")


def _named(service: str) -> bytes:
    return service.encode().ljust(_NAME, b"\0")[:_NAME]


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side hung up")
        data += piece
    return data


def _settled(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class _Listening:
    """A socket and the thread that accepts; each connection is received in a thread of its own."""

    def __init__(self, host: str, port: int, name: str) -> None:
        try:
            self._listening = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
        self.host, self.port = host, int(self._listening.getsockname()[1])
        self._receiving: dict[threading.Thread, socket.socket] = {}
        self._open = True
        self._pump = Pump(name)
        self._thread = threading.Thread(target=self._accept, name=f"reap-{name}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while self._open:
            try:
                connection, (host, *_) = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._receive, args=(connection, host), daemon=True)
            self._receiving = {t: c for t, c in self._receiving.items() if t.is_alive()} | {thread: connection}
            thread.start()

    def _receive(self, connection: socket.socket, host: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Everything that came through it ends too."""
        self._open = False
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        for thread, connection in self._receiving.items():
            if thread.is_alive():  # a stranger that says nothing
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            thread.join(_PATIENCE)
        self._pump.close()


class Door(_Listening):
    """Listens on an address the user has named. `services` say what visitors can ask for."""

    def __init__(self, host: str, port: int, secret: bytes, services: Mapping[str, Service]) -> None:
        self._secret, self._services = secret, services
        super().__init__(host, port, "door")

    def _receive(self, connection: socket.socket, host: str) -> None:
        try:
            service, key = _welcome(connection, self._secret)
            serve = self._services[service]
        except (OSError, KeyError, UnicodeDecodeError) as error:
            _log.warning("refused a connection from %s at %s:%d: %s", host, self.host, self.port, error)
            connection.close()
            return
        serve(Visitor(_settled(connection), key, host))

    def lead_to(self, port: int) -> Service:
        """A service: a port of the loopback address."""

        def serve(visitor: Visitor) -> None:
            try:
                self._pump.join(visitor.socket, _settled(socket.create_connection((LOOPBACK, port))))
            except OSError:
                visitor.socket.close()

        return serve


class Tunnel(_Listening):
    """A port of the loopback address that leads through the door of another machine."""

    def __init__(self, host: str, port: int, secret: bytes, service: str, *, at: int = 0) -> None:
        self._to = (host, port, secret, service)
        super().__init__(LOOPBACK, at, "tunnel")

    def _receive(self, connection: socket.socket, host: str) -> None:
        try:
            self._pump.join(_settled(connection), dial(*self._to).socket)
        except OSError as error:
            _log.warning("no way to %s:%d: %s", *self._to[:2], error)
            connection.close()


class _Way:
    """One direction of a pair of sockets: what was read from one and not yet taken by the other."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.rest, self.ended = memoryview(b""), False


class Pump:
    """Carries bytes both ways between pairs of sockets, in one thread, never more than it can hand on."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._ways: dict[socket.socket, tuple[_Way, _Way]] = {}  # by socket: the way from it, and the way to it
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._room, self._lock, self._open = bytearray(_PIECE), threading.Lock(), True
        self._thread = threading.Thread(target=self._run, name=f"reap-pump-{name}", daemon=True)
        self._thread.start()

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """From now on until one of them ends."""
        with self._lock:
            if self._open:
                self._new.append((one, other))
                self._waker.send(b"!")
                return
        one.close()
        other.close()

    def close(self) -> None:
        """Hang up everywhere."""
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
            there, back = _Way(one, other), _Way(other, one)
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

    def _push(self, way: _Way, *, fresh: bool = False) -> None:
        with contextlib.suppress(BlockingIOError):
            while way.rest:
                way.rest = way.rest[way.sink.send(way.rest) :]
        if fresh and way.rest:
            way.rest = memoryview(bytes(way.rest))  # the room is for the next

    def _look_at(self, way: _Way) -> None:
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
