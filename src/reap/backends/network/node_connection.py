"""NodeConnection: messages between a node and a collector, with heartbeats that show that each is alive.

    {"start": 3, "transport": "gloo"} + bytes ──►        ◄── {"born": 3, "pid": 4711}
    {"signal": 3, "which": 15}           ──►        ◄── {"gone": 3, "how": "was killed by SIGKILL", "stack": ""}
    {"beat": 0}  every second            ──►        ◄── {"beat": 0}

Messages are JSON. Bytes are signed with a key that only the two know, because they may hold pickles. A side that
receives nothing for `LOST` seconds treats the other as lost: its machine is down, or the network to it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from reap._system.listener import Visitor
from reap.backends.network.signed_messages import MessageSigner

CLOSED = "the collector is closed"  # the reason nodes are given at a normal end
BEAT, LOST = 1.0, 5.0  # seconds between two heartbeats; seconds without one until a side is lost
_CHUNK = 1 << 16  # bytes sent at once
_SIZES = struct.Struct("!IQ")


class NodeConnection:
    """One end. One thread sends heartbeats, one receives; `on_end` is called once, with the reason of the end."""

    def __init__(
        self, visitor: Visitor, on_message: Callable[[Mapping[str, Any], bytes], None], on_end: Callable[[str], None]
    ) -> None:
        self._socket, self._signer, self.host = visitor.socket, MessageSigner(visitor.key), visitor.host
        self._on_message, self._on_end = on_message, on_end
        self._sending, self._over = threading.Lock(), threading.Event()
        self._socket.settimeout(LOST)
        self._threads = [
            threading.Thread(target=self._send_heartbeats, name="reap-beat", daemon=True),
            threading.Thread(target=self._listen, name="reap-node", daemon=True),
        ]

    def start(self) -> None:
        """Start to receive, and to send heartbeats."""
        for thread in self._threads:
            thread.start()

    def send(self, data: bytes = b"", /, **message: Any) -> None:
        """Send a message, and bytes with it, unless the other side is gone."""
        text = json.dumps(message).encode()
        signed = self._signer.sign(data, text.decode()) if data else b""
        whole = memoryview(_SIZES.pack(len(text), len(signed)) + text + signed)
        with self._sending:
            try:
                for start in range(0, len(whole), _CHUNK):  # the socket's timeout applies to each piece
                    self._socket.sendall(whole[start : start + _CHUNK])
            except OSError:  # half a message may have been sent: nothing can follow it
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, patience: float) -> None:
        """Wait until the other side has closed the connection, for `patience` seconds at most."""
        self._over.wait(patience)

    def close(self) -> None:
        """End the connection and its threads."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._socket.close()

    def _send_heartbeats(self) -> None:
        while not self._over.wait(BEAT):
            self.send(beat=0)

    def _listen(self) -> None:
        why = "it closed the connection"
        try:
            while True:
                text, data = self._next()
                message = json.loads(text)
                if "beat" not in message:
                    self._on_message(message, self._signer.verified(data, text.decode()) if data else b"")
        except TimeoutError:
            why = f"it sent no heartbeat for {LOST:.0f} s: the machine or its network is down"
        except (OSError, ValueError):
            pass
        finally:
            closed = self._over.is_set()
            self._over.set()
            if not closed:
                self._on_end(why)

    def _next(self) -> tuple[bytes, bytes]:
        text, data = _SIZES.unpack(self._exactly(_SIZES.size))
        return self._exactly(text), self._exactly(data)

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = self._socket.recv(min(size - len(found), 1 << 20))
            if not piece:
                raise ConnectionError
            found += piece
        return bytes(found)
