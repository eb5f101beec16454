"""The worker's side of torch.distributed: orders come through the store, rollouts and weights are tensors.

Its process groups are separate objects, so a trainer's default group, if there is one, is not touched.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from reap._foreign import torch_internals
from reap.backends.network.authenticated_listener import LOOPBACK
from reap.backends.network.signed_messages import MessageSigner
from reap.backends.remote.remote_worker import (
    MORE_SIZE,
    LocalWeights,
    Message,
    Order,
    ParentConnection,
    WeightInbox,
    Weights,
    do_nothing,
    load_job,
    run_remote_worker,
    weights_size,
)
from reap.core.shared_slots import SharedFile
from reap.weights.shared import Packing

HERE = b"here"  # the first sign of a worker, in the store
FOREVER = timedelta(days=3650)  # gloo has no infinite timeout
WEIGHTS, _NEVER_USED = 1, 999  # tags; rollouts have tag 0
JOIN = timedelta(seconds=30)  # for both sides to connect, once both have started


@dataclass(frozen=True)
class Address:
    """The address of the store, the secret for signing, and the address on which this host listens."""

    host: str
    port: int
    secret: bytes
    listen: str

    def store(self) -> TCPStore:
        """Return a new connection to the store: a connection that waits blocks all its other users."""
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=FOREVER)

    def group(self, name: str, rank: int, size: int) -> Any:
        """Join the process group of this name, and return it when all others have joined."""
        return torch_internals.gloo_group(PrefixStore(name, self.store()), rank, size, self.listen, JOIN)


def abandon(group: Any, peer: int) -> None:
    """Close all connections of a group, so that all waits in it fail: gloo does this when a wait times out."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _NEVER_USED).wait(timedelta(milliseconds=1))


def wait(work: Any) -> None:
    """Wait without a timeout; raise `ConnectionError` if the other side is gone."""
    try:
        work.wait(FOREVER)
    except RuntimeError as error:
        raise ConnectionError(str(error)) from None


def join_broadcast(group: Any, packed: torch.Tensor) -> Any:
    """Take part in a broadcast from rank 0; return the work to wait for."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, FOREVER
    return group.broadcast([packed], options)


class GlooParentConnection(ParentConnection):
    """Reads orders from successive keys of the store; a thread sends messages in order."""

    def __init__(self, name: str, address: Address) -> None:
        self._name, self._signer = name, MessageSigner(address.secret)
        self._store = address.store()
        self._store.set(f"here/{name}", HERE.decode())
        self.group = address.group(f"data/{name}", 1, 2)
        self._orders_received = self._messages_sent = 0
        self._outbox: queue.SimpleQueue[tuple[Message, Callable[[], None]] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="reap-sender", daemon=True)
        self._sender.start()

    def next_order(self) -> Order | None:
        key = f"to/{self._name}/{self._orders_received}"
        try:
            signed = self._store.get(key)  # waits for it, up to the store's timeout
            self._store.delete_key(key)
        except RuntimeError as error:  # the store ends with the collector
            raise ConnectionError(str(error)) from None
        self._orders_received += 1
        order: Order | None = pickle.loads(self._signer.verified(signed, key))
        return order

    def send(self, message: Message, done: Callable[[], None] = do_nothing) -> None:
        self._outbox.put((message, done))

    def finish(self) -> None:
        self._outbox.put(None)
        self._sender.join()

    def _send_all(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                message, done = item
                place = f"from/{self._name}/{self._messages_sent}"
                more = self._signer.sign(message.more, place) if message.more else b""
                message.header[MORE_SIZE] = len(more)
                self._send(message.header)
                if message.block is not None:
                    self._send(message.block)
                if more:
                    self._send(np.frombuffer(more, np.uint8).copy())
                self._send(np.zeros(1, np.uint8))  # the end of the message, see `GlooConnection._receive`
                self._messages_sent += 1
                done()
        except (ConnectionError, RuntimeError):
            pass  # the collector is gone: there will be no next order

    def _send(self, array: np.ndarray[Any, Any]) -> None:
        if array.size:
            wait(self.group.send([torch.from_numpy(array)], 0, 0))


class _ReceivedWeights(WeightInbox):
    """Weights that a thread receives over the network.

    `open_channel` is called in that thread; it returns a function that starts to receive into a tensor.
    """

    def __init__(self, open_channel: Callable[[], Callable[[torch.Tensor], Any]]) -> None:
        super().__init__()
        self._open_channel = open_channel

    def expect(self, packing: Packing) -> None:
        super().expect(packing)
        threading.Thread(target=self._receive, args=(packing,), name="reap-weights", daemon=True).start()

    def _receive(self, packing: Packing) -> None:
        try:
            receive_into = self._open_channel()
            while True:
                packed = self.memory(weights_size(packing))
                wait(receive_into(packed))
                self.put(packed)
        except (ConnectionError, RuntimeError):
            self.close()


def name_of(index: int, restarts: int) -> str:
    """Return the name of a worker in the store; a replacement has a new one."""
    return f"{index}.{restarts}"


def run_gloo(
    connection: Any,
    fds: Any,
    *,
    job: bytes,
    index: int,
    address: Address,
    restarts: int = 0,
    one_by_one: bool = False,
) -> None:
    """Run a worker from start to end. `fds`: on the collector's machine, the descriptor of the memory of the weights.

    `one_by_one`: weights are sent to each worker alone, not by broadcast, because workers may be replaced.
    """
    parent = GlooParentConnection(name_of(index, restarts), address)
    loaded = load_job(job, parent)
    if loaded is None:
        return

    def join_broadcasts() -> Callable[[torch.Tensor], Any]:
        group = address.group("weights", loaded.index + 1, loaded.workers + 1)
        return functools.partial(join_broadcast, group)

    def receive_alone(packed: torch.Tensor) -> Any:
        return parent.group.recv([packed], 0, WEIGHTS)

    weights: Weights
    if fds:
        weights = LocalWeights(SharedFile(fd=fds[0]))
    elif one_by_one:
        weights = _ReceivedWeights(lambda: receive_alone)
    else:
        weights = _ReceivedWeights(join_broadcasts)
    run_remote_worker(loaded, parent, weights)


def run_gloo_on_node(
    connection: Any, fds: Any, *, job: bytes, index: int, address: Mapping[str, Any], more: Any
) -> None:
    """Run a worker on a node, where a tunnel leads to the store."""
    run_gloo(connection, fds, job=job, index=index, address=Address(host=LOOPBACK, **address), **more)
