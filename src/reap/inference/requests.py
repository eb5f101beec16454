"""Requests of clients to an inference server, and the queue that gathers them into batches.

client ──► Request ──► RequestQueue ──► a batch leaves ──► Request.answer ──► client
                                        when it is full, or
                                        when its oldest request has waited `timeout`, or
                                        when every client is waiting: no more requests can come
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from reap._system.forks import guard
from reap.errors import NotReady, ReapError, ServerGone, UsageError
from reap.spec import Key

Columns = Mapping[Key, Tensor]


def timeout_error(timeout: float | None) -> NotReady:
    """Return the error of a client that waited too long."""
    return NotReady(f"the inference server did not answer within {timeout} s (timeout of the client); ask again")


def check_timeout(timeout: Any) -> None:
    """Raise if `timeout` is not a valid timeout of a client."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 < timeout < threading.TIMEOUT_MAX):
        raise UsageError(f"timeout must be a number of seconds > 0 or None, got {timeout!r}")


class Request:
    """Rows of input that wait for rows of output. `size=None`: a single row without a batch dimension."""

    def __init__(self, client: int, inputs: Columns, size: int | None) -> None:
        self.client, self.inputs, self.size = client, inputs, size
        self.rows = 1 if size is None else size
        skip = 0 if size is None else 1
        self.signature = {key: (value.shape[skip:], value.dtype) for key, value in inputs.items()}  # those of one row
        self.since = time.monotonic()
        self._answer: tuple[Columns, int] | ReapError | None = None
        self._wakeup = threading.Event()

    def answer(self, what: tuple[Columns, int] | ReapError) -> None:
        """Set the outputs and the version that computed them, or an error. Only the first answer counts."""
        if not self._wakeup.is_set():
            self._answer = what
            self._wakeup.set()

    def result(self, timeout: float | None = None) -> tuple[Columns, int]:
        """Wait for the answer, for `timeout` seconds at most, and return it. None: wait without limit."""
        if not self._wakeup.wait(timeout):  # without a timeout this ends: shutdown answers every request
            raise timeout_error(timeout)
        if isinstance(self._answer, ReapError):
            raise self._answer
        assert self._answer is not None
        return self._answer


class RequestQueue:
    """The waiting requests, and the clients that could send more."""

    def __init__(self, most: int, enough: int, timeout: float) -> None:
        self._most, self._enough, self._timeout = most, enough, timeout
        self._waiting: deque[Request] = deque()
        self._clients: set[int] = set()
        self._changed = threading.Condition()
        self._closed: str | None = None
        self._next = 0
        guard(self)

    def in_fork(self, why: str) -> None:
        """Called in a fork, which has no server thread: refuse all requests."""
        self._changed, self._closed = (
            threading.Condition(),
            f"the inference server cannot be used in this process: {why}",
        )
        self._waiting.clear()

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self._clients)

    def enter(self) -> int:
        """Add a client and return its number."""
        with self._changed:
            self._next += 1
            self._clients.add(self._next)
            return self._next

    def leave(self, client: int) -> None:
        """Remove a client that is gone, and its requests."""
        with self._changed:
            self._clients.discard(client)
            self._waiting = deque(request for request in self._waiting if request.client != client)
            self._changed.notify()

    def put(self, request: Request) -> None:
        """Add a request to the queue."""
        with self._changed:
            if self._closed is not None:
                raise ServerGone(self._closed)
            self._waiting.append(request)
            self._changed.notify()

    def withdraw(self, request: Request) -> None:
        """Remove a request whose client has stopped waiting. If it is being computed already, its answer is ignored."""
        with self._changed:
            self._waiting = deque(other for other in self._waiting if other is not request)

    def take(self) -> list[Request]:
        """Wait for the next batch and return it; an empty list means that the queue is closed."""
        with self._changed:
            while self._closed is None and not self._batch_ready():
                left = self._waiting[0].since + self._timeout - time.monotonic() if self._waiting else None
                self._changed.wait(left)
            batch: list[Request] = []
            rows = 0
            while self._closed is None and self._waiting:
                rows += self._waiting[0].rows
                if batch and (rows > self._most or self._waiting[0].signature != batch[0].signature):
                    break  # requests of other shapes form another batch, so that a wrong one fails alone
                batch.append(self._waiting.popleft())
            return batch

    def _batch_ready(self) -> bool:
        if not self._waiting:
            return False
        if sum(request.rows for request in self._waiting) >= self._enough:
            return True
        if time.monotonic() - self._waiting[0].since >= self._timeout:
            return True
        return len({request.client for request in self._waiting}) >= len(self._clients)

    def close(self, why: str) -> None:
        """Fail all waiting and future requests with `ServerGone(why)`."""
        with self._changed:
            self._closed = self._closed or why
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for request in waiting:
            request.answer(ServerGone(self._closed))
