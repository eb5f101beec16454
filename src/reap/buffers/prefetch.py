"""Prefetch: makes samples ahead of time, in a thread.

next ──► requests as many as may wait ──► a thread makes them, one after another ──► returns the oldest

The thread ends on `stop`, when its buffer is deleted, and with the program. If it waits for rows then, it gives up.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from reap._system.threads import join, stop_at_exit
from reap.errors import Starved

T = TypeVar("T")
_DEADLINE = 5.0  # seconds for the thread to end: to finish one sample and its transforms


class Prefetch(Generic[T]):
    """A thread that keeps up to `ahead` samples ready."""

    def __init__(self, ahead: int) -> None:
        self.closing = threading.Event()  # checked by code in this thread that waits for rows
        self._ahead = ahead
        self._tasks: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = queue.SimpleQueue()
        self._prepared: deque[Future[T]] = deque()
        self._lock = threading.RLock()  # reentrant: a finalizer may call `request_stop` while its thread holds it
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name="reap-prefetch", daemon=True)
        stop_at_exit(self)
        self._thread.start()

    def next(self, make: Callable[[], T]) -> T:
        """Return the oldest sample, and have the thread make the following ones by `make`."""
        with self._lock:
            while len(self._prepared) <= self._ahead:
                future: Future[T] = Future()
                self._prepared.append(future)
                self._tasks.put((make, future))
            oldest = self._prepared.popleft()
        try:
            return oldest.result()
        except Starved:
            self.discard()  # the samples requested with it are as outdated
            raise

    def discard(self) -> None:
        """Discard the prepared samples, and cancel the pending ones."""
        with self._lock:
            while self._prepared:
                self._prepared.popleft().cancel()

    def stop(self, timeout: float = _DEADLINE) -> None:
        """End the thread and wait for it. May be called twice."""
        self.request_stop()
        join(self._thread, timeout, "the thread that prepares samples")

    def request_stop(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self.closing.set()
        self.discard()
        self._tasks.put(None)


def _work(tasks: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None]) -> None:
    while (task := tasks.get()) is not None:
        make, future = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make())
            except BaseException as error:  # raised where the sample is requested
                future.set_exception(error)
        del task, make, future  # keep no buffer alive while idle
