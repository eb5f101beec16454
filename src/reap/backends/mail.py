"""Mail: a station whose orders are brought and whose news are fetched, by engines that call methods over a network.

    order(n, …) ──► in order of n ──► station, in a thread of its own ──► outbox ──► news() waits for the next

What `news` has returned is on its way until it is called again: then its block is free.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from reap.backends.far_worker import NearWeights, News, Order, Parcels, Road, Weights, run_station
from reap.children import Raised


class _Letters(Road):
    """The station's end."""

    def __init__(self) -> None:
        self._early: dict[int, Order | None] = {}
        self._next = 0
        self._came = threading.Condition()
        self._outbox: queue.SimpleQueue[tuple[News | None, Callable[[], None]]] = queue.SimpleQueue()
        self._sent: Callable[[], None] = _nothing

    def bring(self, number: int, order: Order | None) -> None:
        """Calls over a network may overtake one another; orders do not."""
        with self._came:
            self._early[number] = order
            self._came.notify_all()

    def next_order(self) -> Order | None:
        with self._came:
            self._came.wait_for(lambda: self._next in self._early)
            order = self._early.pop(self._next)
            self._next += 1
            return order

    def send(self, news: News, done: Callable[[], None]) -> None:
        self._outbox.put((news, done))

    def finish(self) -> None:
        """Nothing is lost: the outbox stays until it is fetched."""

    def end(self) -> None:
        """There will be no more."""
        self._outbox.put((None, _nothing))

    def fetch(self) -> News | None:
        """The next, when there is one; None: there will be no more."""
        self._sent()
        news, self._sent = self._outbox.get()
        return news


class MailStation:
    """What the engine holds and calls."""

    def __init__(self, job: bytes, path: Sequence[str], near: NearWeights | None = None) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._letters, self._parcels = _Letters(), Parcels()
        weights = near or self._parcels
        self._thread = threading.Thread(target=self._run, args=(job, weights), name="reap-station", daemon=True)
        self._thread.start()

    def _run(self, job: bytes, weights: Weights) -> None:
        try:
            try:
                opened = cloudpickle.loads(job)
            except Exception as error:  # of a kind that this machine cannot import
                self._letters.send(News.of(Raised.of(error, "reading what it is to do")), _nothing)
            else:
                run_station(opened, self._letters, weights)
        finally:
            self._letters.end()

    def pid(self) -> int:
        """Of the process it lives in."""
        return os.getpid()

    def order(self, number: int, order: Order | None) -> None:
        """The order with this number."""
        self._letters.bring(number, order)

    def news(self) -> tuple[Any, ...] | None:
        """Waits for the next."""
        return self._letters.fetch()

    def parcel(self, parcel: np.ndarray[Any, Any]) -> None:
        """New weights."""
        own = self._parcels.room(parcel.nbytes)
        np.copyto(own.numpy(), parcel)
        self._parcels.put(own)

    def stack(self) -> str:
        """Where its thread is right now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else ""

    def wait(self) -> None:
        """Until it has gone home."""
        self._thread.join()

    def leave(self, number: int, patience: float) -> None:
        """Go home after the last order; returns when it has, or after so many seconds."""
        self._letters.bring(number, None)
        self._thread.join(patience)


def _nothing() -> None:
    pass
