"""Mail: a station whose orders are brought and whose news are fetched, by engines that call methods over a network.

    order(n, …) ──► in order of n ──► station ──► outbox ──► news() waits for the next

What `news` has returned is on its way until it is called again: then its block is free.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
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
        self.home = threading.Event()  # whether it has begun to go home
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
        if order is None:
            self.home.set()
        return order

    def send(self, news: News, done: Callable[[], None]) -> None:
        self._outbox.put((news, done))

    def finish(self) -> None:
        """Nothing is lost: the outbox stays until it is fetched."""
        self.home.set()

    def end(self) -> None:
        """There will be no more."""
        self._outbox.put((None, _nothing))

    def fetch(self) -> News | None:
        """The next, when there is one; None: there will be no more."""
        self._sent()
        news, self._sent = self._outbox.get()
        return news


class MailStation:
    """What is called over the network; `run` does the work meanwhile, in another thread."""

    def __init__(self, near: NearWeights | None = None) -> None:
        self._letters, self._parcels = _Letters(), Parcels()
        self._weights: Weights = near or self._parcels

    def run(self, job: bytes) -> None:
        """Work until it is told to go home."""
        try:
            try:
                opened = cloudpickle.loads(job)
            except Exception as error:  # of a kind that this machine cannot import
                self._letters.send(News.of(Raised.of(error, "reading what it is to do")), _nothing)
            else:
                run_station(opened, self._letters, self._weights)
        finally:
            self._letters.end()

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


def _nothing() -> None:
    pass
