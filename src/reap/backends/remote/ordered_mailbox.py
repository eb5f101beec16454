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
        self._next_number = 0
        self._arrived = threading.Condition()
        self.ending = threading.Event()  # set when the worker has begun to end
        self._outbox: queue.SimpleQueue[tuple[Message | None, Callable[[], None]]] = queue.SimpleQueue()
        self._done: Callable[[], None] = do_nothing

    def deliver(self, number: int, order: Order | None) -> None:
        """Store an order under its number, because calls over a network may overtake one another."""
        with self._arrived:
            self._early[number] = order
            self._arrived.notify_all()

    def next_order(self) -> Order | None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._next_number in self._early)
            order = self._early.pop(self._next_number)
            self._next_number += 1
        if order is None:
            self.ending.set()
        return order

    def send(self, message: Message, done: Callable[[], None] = do_nothing) -> None:
        self._outbox.put((message, done))

    def finish(self) -> None:
        """Note that the worker ends, without waiting: the outbox stays until it is fetched."""
        self.ending.set()

    def end(self) -> None:
        """Mark the end of the messages."""
        self._outbox.put((None, do_nothing))

    def fetch(self) -> Message | None:
        """Wait for the next message and return it; None: there are no more."""
        self._done()
        message, self._done = self._outbox.get()
        return message


class MailboxWorker:
    """The object whose methods are called over the network, while `run` works in another thread."""

    def __init__(self, shared: LocalWeights | None = None) -> None:
        self._inbox, self._weight_inbox = _OrderedInbox(), WeightInbox()
        self._weights: Weights = shared or self._weight_inbox

    def run(self, job: bytes) -> None:
        """Run the worker until it is ordered to end."""
        try:
            if (loaded := load_job(job, self._inbox)) is not None:
                run_remote_worker(loaded, self._inbox, self._weights)
        finally:
            self._inbox.end()

    def order(self, number: int, order: Order | None) -> None:
        """Deliver the order with this number."""
        self._inbox.deliver(number, order)

    def message(self) -> tuple[Any, ...] | None:
        """Wait for the next message and return it."""
        return self._inbox.fetch()

    def take_weights(self, packed: np.ndarray[Any, Any]) -> None:
        """Store new weights until the worker loads them."""
        own = self._weight_inbox.memory(packed.nbytes)
        np.copyto(own.numpy(), packed)
        self._weight_inbox.put(own)
