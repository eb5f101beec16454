"""Listener: a socket that serves only peers who know the secret, however many others connect.

    peer ── dial ──► nonce ◄─► nonce, each side proves that it knows the secret ──► a thread that serves it
                       └── a stranger: limited in number and in time, refused, logged

One thread accepts connections and reads from all strangers, the peers that have not proved themselves yet. Each costs a
descriptor and no thread, and there are never more than `_MAX_STRANGERS`. When another arrives, the oldest stranger from
the address with the most connections is dropped: a peer with the secret is done within a round trip, and `dial` retries
if it was dropped. When descriptors run out, strangers are dropped first; accepting resumes when there are some again.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from reap._system.fork_server.client import limits_as_worker_died

PATIENCE = 5.0  # seconds a peer has to prove itself, in all
_MAX_STRANGERS = 128  # peers that have not proved themselves yet, at a time
_PAUSE = 0.1  # seconds without accepting, after it failed
_LOG_PAUSE = 5.0  # seconds between two log lines about a flood
_NONCE, _PROOF, _NAME = 32, 32, 16  # bytes
_REFUSAL = b"\0" * _PROOF  # sent in place of a proof: wrong secret, or no such service
_log = logging.getLogger("reap")

Address = tuple[str, int] | str | bytes  # a host and a port, or a Unix socket


class Refused(ConnectionError):
    """One of the two sides does not know the secret."""


class Visitor(NamedTuple):
    """A connection whose other side has proved itself, and a key that only the two sides know."""

    socket: socket.socket
    key: bytes
    host: str  # the other side's


def dial(address: Address, secret: bytes, service: str, patience: float = PATIENCE) -> Visitor:
    """Connect to a service of a listener. Dropped in a crowd, it retries, for `patience` seconds in all."""
    until = time.monotonic() + patience
    while True:
        try:
            return _dial(address, secret, service, until)
        except Refused:
            raise
        # BlockingIOError: the queue of a Unix socket is full
        except (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, BlockingIOError, _HungUp) as error:
            if time.monotonic() + _PAUSE >= until:
                raise Refused(f"{_address_text(address)} closed the connection: {error}") from None
            time.sleep(_PAUSE / 4 + _PAUSE * secrets.randbelow(100) / 100)  # not all at once


def _dial(address: Address, secret: bytes, service: str, until: float) -> Visitor:
    connection = _connected(address, max(0.1, until - time.monotonic()))
    try:
        theirs, ours, name = _receive_exactly(connection, _NONCE), secrets.token_bytes(_NONCE), _service_bytes(service)
        connection.sendall(ours + _proof(secret, b"visitor", theirs, ours, name) + name)
        proof = _receive_exactly(connection, _PROOF)
        if proof == _REFUSAL:
            raise Refused(
                f"{_address_text(address)} refused the connection: different secret, or no service {service!r}"
            )
        if not hmac.compare_digest(proof, _proof(secret, b"door", theirs, ours, name)):
            raise Refused(f"{_address_text(address)} does not know the secret")
        host = address[0] if isinstance(address, tuple) else ""
        return Visitor(settled(connection), _proof(secret, b"key", theirs, ours, name), host)
    except BaseException:
        connection.close()
        raise


def _connected(address: Address, timeout: float) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=timeout)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _address_text(address: Address) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else repr(address)


def _proof(secret: bytes, role: bytes, one: bytes, other: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((b"reap", role, one, other, name)), "sha256")


def _service_bytes(service: str) -> bytes:
    return service.encode().ljust(_NAME, b"\0")[:_NAME]


class _HungUp(ConnectionError):
    """The other side closed the connection in the middle of the handshake."""


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise _HungUp("the other side closed the connection")
        data += piece
    return data


def settled(connection: socket.socket) -> socket.socket:
    """Make a socket blocking, and let it send small messages without delay; return it."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def woken_selector(made: contextlib.ExitStack) -> tuple[selectors.BaseSelector, socket.socket, socket.socket]:
    """Return a selector, the socket that wakes it, and the other end to write to; `made` closes them all."""
    selector = selectors.DefaultSelector()
    made.callback(selector.close)
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        made.callback(end.close)
    selector.register(wake, selectors.EVENT_READ)
    return selector, wake, waker


class _Stranger:
    """A peer that has not proved itself yet."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.socket, self.host, self.until = connection, host, time.monotonic() + PATIENCE
        self.nonce, self.received = secrets.token_bytes(_NONCE), b""


class Listener:
    """Accepts connections, and calls `serve` in a thread of its own for every peer that knows `secret`.

    With `secret` None it serves everybody, at most `_MAX_STRANGERS` at a time: for a socket of the loopback address.
    `knows(service)` says whether the service a peer requests exists.
    """

    def __init__(
        self,
        listening: socket.socket,
        name: str,
        secret: bytes | None,
        serve: Callable[[Visitor, str], None],
        knows: Callable[[str], bool] = lambda service: True,
    ) -> None:
        listening.setblocking(False)
        self._listening, self._secret, self._serve, self._knows = listening, secret, serve, knows
        self._address = _address_text(listening.getsockname()[:2] if listening.family != socket.AF_UNIX else name)
        self._name = name
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._dropped, self._flood_logged, self._error_logged = 0, 0.0, 0.0  # when each was last logged
        self._paused: float | None = None  # time until which no connection is accepted
        self._open = True
        with contextlib.ExitStack() as made, limits_as_worker_died(f"the listener at {self._address}"):
            made.callback(listening.close)
            self._selector, self._wake, self._waker = woken_selector(made)
            self._selector.register(listening, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name=f"reap-{name}", daemon=True)
            self._thread.start()
            made.pop_all()  # it all stays open

    # ---- the thread that listens ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._open:
            try:
                self._run_once()
            except Exception:  # whatever it was, other peers are waiting
                if self._open:
                    _log.exception("%s: an error in the listening thread, which continues", self._address)
                    time.sleep(_PAUSE)
        for stranger in list(self._strangers.values()):
            self._drop(stranger)

    def _run_once(self) -> None:
        now = time.monotonic()
        until = [stranger.until for stranger in list(self._strangers.values())[:1]]  # the oldest times out first
        until += [] if self._paused is None else [self._paused]
        ready = self._selector.select(max(0.0, min(until) - now) if until else None)
        now = time.monotonic()
        if self._paused is not None and now >= self._paused:
            self._paused = None
            self._selector.register(self._listening, selectors.EVENT_READ)
        for key, _ in ready:
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj in self._strangers:
                self._receive(self._strangers[key.fileobj])
        for stranger in [one for one in self._strangers.values() if one.until <= now]:
            self._refuse(stranger, f"it did not prove that it knows the secret within {PATIENCE:.0f} s")

    def _accept(self) -> None:
        """Accept waiting connections, up to 16 at a time, so that those accepted before are read from in between."""
        for _ in range(16):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._open:
                    self._out_of_descriptors(error)
                return
            host = address[0] if isinstance(address, tuple) else ""
            if self._secret is None:
                self._admit(Visitor(settled(connection), b"", host), "")
                continue
            if len(self._strangers) >= _MAX_STRANGERS:
                self._drop_oldest()
            stranger = _Stranger(connection, host)
            try:
                connection.setblocking(False)
                connection.send(stranger.nonce)
                self._selector.register(connection, selectors.EVENT_READ)
            except OSError:
                connection.close()
                continue
            self._strangers[connection] = stranger

    def _out_of_descriptors(self, error: OSError) -> None:
        """Accepting failed: drop strangers to free their descriptors, and try again in a moment."""
        if time.monotonic() - self._error_logged > _LOG_PAUSE:
            self._error_logged = time.monotonic()
            _log.warning("%s: cannot accept a connection: %s; trying again", self._address, error)
        for stranger in list(self._strangers.values())[: _MAX_STRANGERS // 2]:
            self._drop(stranger)
        self._selector.unregister(self._listening)
        self._paused = time.monotonic() + _PAUSE

    def _drop_oldest(self) -> None:
        """Make room for one more: drop the oldest stranger of the address with the most of them."""
        crowd = collections.Counter(stranger.host for stranger in self._strangers.values()).most_common(1)[0][0]
        self._drop(next(stranger for stranger in self._strangers.values() if stranger.host == crowd))
        self._dropped += 1
        now = time.monotonic()
        if now - self._flood_logged > _LOG_PAUSE:
            _log.warning(
                "%s: %d connections at a time have not proved that they know the secret; refused so far: %d, "
                "the last from %s",
                self._address,
                _MAX_STRANGERS,
                self._dropped,
                crowd or "this machine",
            )
            self._flood_logged = now

    def _receive(self, stranger: _Stranger) -> None:
        try:
            piece = stranger.socket.recv(_NONCE + _PROOF + _NAME - len(stranger.received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._refuse(stranger, str(error))
            return
        if not piece:
            self._refuse(stranger, "the other side closed the connection")
            return
        stranger.received += piece
        if len(stranger.received) == _NONCE + _PROOF + _NAME:
            self._verify(stranger)

    def _verify(self, stranger: _Stranger) -> None:
        received, ours, secret = stranger.received, stranger.nonce, self._secret or b""
        theirs, proof, name = received[:_NONCE], received[_NONCE:-_NAME], received[-_NAME:]
        if not hmac.compare_digest(proof, _proof(secret, b"visitor", ours, theirs, name)):
            self._refuse(stranger, "it does not know the secret", say=True)
            return
        service = name.rstrip(b"\0").decode(errors="replace")
        if not self._knows(service):
            self._refuse(stranger, f"there is no service {service!r}", say=True)
            return
        connection = stranger.socket
        del self._strangers[connection]
        self._selector.unregister(connection)
        try:
            settled(connection).sendall(_proof(secret, b"door", ours, theirs, name))
        except OSError:
            connection.close()
            return
        self._admit(Visitor(connection, _proof(secret, b"key", ours, theirs, name), stranger.host), service)

    def _admit(self, visitor: Visitor, service: str) -> None:
        def live() -> None:
            try:
                self._serve(visitor, service)
            finally:
                with self._lock:
                    self._serving.pop(threading.current_thread(), None)

        with self._lock:
            crowded = self._secret is None and len(self._serving) >= _MAX_STRANGERS
            thread = threading.Thread(target=live, name=f"reap-{self._name}-peer", daemon=True)
            if not crowded:
                self._serving[thread] = visitor.socket
        try:
            if crowded:
                raise RuntimeError(f"{_MAX_STRANGERS} connections are being received already")
            thread.start()
        except RuntimeError as error:  # the system has no room for another thread
            with self._lock:
                self._serving.pop(thread, None)
            _log.warning("%s: cannot receive a connection: %s", self._address, error)
            visitor.socket.close()

    def _refuse(self, stranger: _Stranger, why: str, *, say: bool = False) -> None:
        _log.warning("refused a connection from %s at %s: %s", stranger.host or "this machine", self._address, why)
        if say:
            with contextlib.suppress(OSError):
                stranger.socket.send(_REFUSAL)
        self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.socket, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.socket)
        stranger.socket.close()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, deadline: float = PATIENCE) -> None:
        """Close all connections; the threads that serve them have `deadline` seconds to end."""
        until = time.monotonic() + deadline
        self._open = False
        with contextlib.suppress(OSError):
            self._waker.send(b"!")
        self._thread.join(deadline)
        for end in (self._listening, self._wake, self._waker):
            end.close()
        self._selector.close()
        with self._lock:
            serving = dict(self._serving)
        for thread, connection in serving.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(max(0.0, until - time.monotonic()))
