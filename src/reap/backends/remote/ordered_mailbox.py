"""MailboxWorker: a remote worker that receives orders and hands out messages through remote method calls.

    order(n, …) ──► in order of n ──► remote worker ──► outbox ──► message() waits for the next

The next call of `message` confirms that the last message has arrived: its block is free from then on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from reap.backends.remote.remote_worker import (
    LocalWeights,
    Message,
    Order,
    ParentConnection,
    WeightInbox,
    Weights,
    do_nothing,
    load_job,
    run_remote_worker,
)


class _OrderedInbox(ParentConnection):
    """The remote worker's end: it sorts orders by their numbers, and keeps messages in the order they were sent."""

    def __init__(self) -> None:
        self._early: dict[int, Order | None] = {}
        self._next = 0
        self._came = threading.Condition()
        self.home = threading.Event()  # set when the worker has begun to end
        self._outbox: queue.SimpleQueue[tuple[Message | None, Callable[[], None]]] = queue.SimpleQueue()
        self._sent: Callable[[], None] = do_nothing

    def bring(self, number: int, order: Order | None) -> None:
        """Store an order under its number, because calls over a network may overtake one another."""
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

    def send(self, message: Message, done: Callable[[], None] = do_nothing) -> None:
        self._outbox.put((message, done))

    def finish(self) -> None:
        """Note that the worker ends, without waiting: the outbox stays until it is fetched."""
        self.home.set()

    def end(self) -> None:
        """Mark the end of the messages."""
        self._outbox.put((None, do_nothing))

    def fetch(self) -> Message | None:
        """Wait for the next message and return it; None: there are no more."""
        self._sent()
        message, self._sent = self._outbox.get()
        return message


class MailboxWorker:
    """The object whose methods are called over the network, while `run` works in another thread."""

    def __init__(self, shared: LocalWeights | None = None) -> None:
        self._inbox, self._sent = _OrderedInbox(), WeightInbox()
        self._weights: Weights = shared or self._sent

    def run(self, job: bytes) -> None:
        """Run the worker until it is ordered to end."""
        try:
            if (loaded := load_job(job, self._inbox)) is not None:
                run_remote_worker(loaded, self._inbox, self._weights)
        finally:
            self._inbox.end()

    def order(self, number: int, order: Order | None) -> None:
        """Deliver the order with this number."""
        self._inbox.bring(number, order)

    def message(self) -> tuple[Any, ...] | None:
        """Wait for the next message and return it."""
        return self._inbox.fetch()

    def take_weights(self, packed: np.ndarray[Any, Any]) -> None:
        """Store new weights until the worker loads them."""
        own = self._sent.room(packed.nbytes)
        np.copyto(own.numpy(), packed)
        self._sent.put(own)
