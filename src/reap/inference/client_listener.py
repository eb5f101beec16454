"""ClientListener: serves clients from other processes, each in a thread, so that a slow reader blocks no others.

Connections that have not yet shown the key are limited in number and time (see _system/listener.py). When a client dies
its connection closes: its requests are dropped, and batches no longer wait for it.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from reap._system.fork_server.client import limits_as_worker_died
from reap._system.listener import Listener, Visitor
from reap.errors import ReapError
from reap.inference.clients import SERVICE, refusal, reply, request_from
from reap.inference.requests import Request, RequestQueue


class ClientListener:
    """Listens at `address` for clients that know `key`."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self.key = secrets.token_bytes(32)
        name = f"reap-{os.getpid()}-{secrets.token_hex(8)}"
        self._path: Path | None = None
        self.address: str | bytes = b"\0" + name.encode()  # an abstract socket: no file
        if sys.platform != "linux":
            self._path = Path(tempfile.gettempdir()) / name
            self.address = str(self._path)
        with limits_as_worker_died("the socket for clients of other processes"):
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self.address)
        listening.listen(128)
        self._listener = Listener(listening, "clients", self.key, self._attend, SERVICE.__eq__)

    def _attend(self, visitor: Visitor, service: str) -> None:
        number = None
        connection = Connection(os.dup(visitor.socket.fileno()))
        try:
            number = self._queue.enter()
            while True:
                inputs, size = request_from(connection.recv_bytes())
                request = Request(number, inputs, size)
                try:
                    self._queue.put(request)
                    answer = reply(*request.result())
                except ReapError as error:
                    answer = refusal(error)
                connection.send_bytes(answer)
        except (EOFError, OSError):  # the client is gone
            pass
        finally:
            if number is not None:
                self._queue.leave(number)
            connection.close()
            visitor.socket.close()

    def close(self, deadline: float) -> None:
        """Close the socket and all connections."""
        self._listener.close(deadline)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
