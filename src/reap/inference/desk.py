"""Desk: where clients from other processes are received. One thread for each: who is slow to read holds up nobody.

A client that dies hangs up: its desk is cleared, and nobody waits for it any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from reap.children import enough_room
from reap.errors import ReapError
from reap.inference.clients import refusal, reply, request_from
from reap.inference.requests import Line, Request


class Desk:
    """Listens at `address` for clients that know `key`."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.key = secrets.token_bytes(32)
        name = f"reap-{os.getpid()}-{secrets.token_hex(8)}"
        self._path: Path | None = None
        self.address: str | bytes = b"\0" + name.encode()  # without a name in any file system
        if sys.platform != "linux":
            self._path = Path(tempfile.gettempdir()) / name
            self.address = str(self._path)
        with enough_room("the socket for clients of other processes"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen(128)
        self._open: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._receive, name="reap-desk", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while True:
            try:
                one, _ = self._socket.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=self._attend, args=(one,), name="reap-desk-client", daemon=True)
            with self._lock:
                self._open[thread] = one
            thread.start()

    def _attend(self, one: socket.socket) -> None:
        number = None
        connection = Connection(os.dup(one.fileno()))
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            number = self._line.enter()
            while True:
                inputs, size = request_from(connection.recv_bytes())
                request = Request(number, inputs, size)
                try:
                    self._line.put(request)
                    answer = reply(*request.result())
                except ReapError as error:
                    answer = refusal(error)
                connection.send_bytes(answer)
        except (EOFError, OSError, AuthenticationError):  # it is gone, or never was a client
            pass
        finally:
            if number is not None:
                self._line.leave(number)
            connection.close()
            one.close()
            with self._lock:
                self._open.pop(threading.current_thread(), None)

    def close(self, deadline: float) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        until = time.monotonic() + deadline
        self._thread.join(deadline)
        with self._lock:
            threads = dict(self._open)
        for thread, one in threads.items():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            thread.join(max(0.0, until - time.monotonic()))
        if self._path is not None:
            self._path.unlink(missing_ok=True)
