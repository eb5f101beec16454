"""Prefetch: samples made ahead of time.

next ──► asked: as many as there may be ──► a thread makes them, one after another ──► the oldest is yours

The thread ends when it is told to, when its buffer goes, and with the program: one that waits for rows gives up then.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from reap._system.forks import guard
from reap._system.threads import join
from reap.errors import Starved, WorkerSilent

T = TypeVar("T")
_DEADLINE = 5.0  # seconds to end: a sample, and what is done to it
_all: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()


class Prefetch(Generic[T]):
    """A thread, and up to `ahead` samples that wait."""

    def __init__(self, ahead: int) -> None:
        self.closing = threading.Event()  # whoever waits on behalf of this thread looks at it
        self._ahead = ahead
        self._tasks: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = queue.SimpleQueue()
        self._prepared: deque[Future[T]] = deque()
        self._turn = threading.RLock()  # of those who ask; again in one, from a finalizer
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name="reap-prefetch", daemon=True)
        atexit.unregister(_stop_all)  # once is enough
        atexit.register(_stop_all)  # a daemon would be cut off in the middle of native code
        _all.add(self)
        guard(self)
        self._thread.start()

    def in_fork(self, why: str) -> None:
        """The thread is not here: there is nothing to stop."""
        _all.discard(self)

    def next(self, make: Callable[[], T]) -> T:
        """The oldest sample; those after it are being made by `make` meanwhile."""
        with self._turn:
            while len(self._prepared) <= self._ahead:
                future: Future[T] = Future()
                self._prepared.append(future)
                self._tasks.put((make, future))
            oldest = self._prepared.popleft()
        try:
            return oldest.result()
        except Starved:
            self.forget()  # what else was begun is as old
            raise

    def forget(self) -> None:
        """What was made, or is to be, is not wanted any more."""
        with self._turn:
            while self._prepared:
                self._prepared.popleft().cancel()

    def stop(self, timeout: float = _DEADLINE) -> None:
        """End the thread. May be called twice."""
        self.leave()
        join(self._thread, timeout, "the thread that prepares samples")

    def leave(self) -> None:
        """Tell it to end, and do not wait."""
        self.closing.set()
        self.forget()
        self._tasks.put(None)


def _work(tasks: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None]) -> None:
    while (task := tasks.get()) is not None:
        make, future = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make())
            except BaseException as error:  # raised where the sample is asked for
                future.set_exception(error)
        del task, make, future  # while there is nothing to do, no buffer is kept alive


def _stop_all() -> None:
    for one in list(_all):
        with contextlib.suppress(WorkerSilent):
            one.stop(1.0)
