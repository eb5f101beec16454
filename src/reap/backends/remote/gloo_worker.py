"""The worker's side of torch.distributed: orders through the store, rollouts as tensors, weights by broadcast.

Process groups are objects of their own: a trainer's default group, if it has one, is left alone.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from reap._foreign import torch_internals
from reap._system.remote_errors import Raised
from reap.backends.network.authenticated_listener import LOOPBACK
from reap.backends.network.signed_messages import MessageSigner
from reap.backends.remote.remote_worker import (
    LocalWeights,
    Message,
    Order,
    ParentConnection,
    WeightInbox,
    Weights,
    run_remote_worker,
    weights_size,
)
from reap.backends.worker_server import Job
from reap.core.shared_slots import SharedFile
from reap.weights.shared import Packing

HERE = b"here"  # the first sign of a worker
EVER = timedelta(days=3650)  # gloo has no word for it
_NEVER_USED = 999  # a tag
JOIN = timedelta(seconds=30)  # for both sides to connect, once both are there


@dataclass(frozen=True)
class Address:
    """Where the store is, what its visitors must know, and on which address of this host to listen."""

    host: str
    port: int
    secret: bytes
    listen: str

    def store(self) -> TCPStore:
        """A connection of its own: one that waits lets nobody else pass."""
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=EVER)

    def group(self, name: str, rank: int, size: int) -> Any:
        """Joined when all others have."""
        return torch_internals.gloo_group(PrefixStore(name, self.store()), rank, size, self.listen, JOIN)


def abandon(group: Any, peer: int) -> None:
    """Whoever waits for somebody in this group waits no longer: a wait that times out closes all its connections."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _NEVER_USED).wait(timedelta(milliseconds=1))


def wait(work: Any) -> None:
    """As long as it takes, or until the other side is gone."""
    try:
        work.wait(EVER)
    except RuntimeError as error:
        raise ConnectionError(str(error)) from None


def receive(group: Any, source: int, size: int) -> bytes:
    """Receive so many bytes."""
    room = torch.empty(size, dtype=torch.uint8)
    wait(group.recv([room], source, 0))
    return bytes(room.numpy())


def join_broadcast(group: Any, packed: torch.Tensor) -> Any:
    """This side of a broadcast by rank 0."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, EVER
    return group.broadcast([packed], options)


class _GlooConnection(ParentConnection):
    """Orders are keys of the store, one after the other. A thread sends, in order."""

    def __init__(self, name: str, address: Address) -> None:
        self._name, self._seal = name, MessageSigner(address.secret)
        self._store = address.store()
        self._store.set(f"here/{name}", HERE.decode())
        self._group = address.group(f"data/{name}", 1, 2)
        self._heard = self._said = 0
        self._outbox: queue.SimpleQueue[tuple[Message, Callable[[], None]] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="reap-sender", daemon=True)
        self._sender.start()

    def next_order(self) -> Order | None:
        key = f"to/{self._name}/{self._heard}"
        try:
            self._store.wait([key], EVER)
            sealed = self._store.get(key)
            self._store.delete_key(key)
        except RuntimeError as error:  # the store ends with whoever made it
            raise ConnectionError(str(error)) from None
        self._heard += 1
        order: Order | None = pickle.loads(self._seal.open(sealed, key))
        return order

    def send(self, message: Message, done: Callable[[], None]) -> None:
        self._outbox.put((message, done))

    def finish(self) -> None:
        self._outbox.put(None)
        self._sender.join()

    def _send_all(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                message, done = item
                place = f"from/{self._name}/{self._said}"
                more = self._seal.close(message.more, place) if message.more else b""
                message.header[1] = len(more)
                self._send(message.header)
                if message.block is not None:
                    self._send(message.block)
                if more:
                    self._send(np.frombuffer(more, np.uint8).copy())
                self._said += 1
                done()
        except ConnectionError:
            pass  # nobody is there any more: the next order will not come

    def _send(self, array: np.ndarray[Any, Any]) -> None:
        if array.size:
            wait(self._group.send([torch.from_numpy(array)], 0, 0))


class _Broadcasts(WeightInbox):
    """Weights that come by broadcast, in a thread."""

    def __init__(self, job: Job, address: Address) -> None:
        super().__init__()
        self._job, self._address = job, address

    def expect(self, packing: Packing, tensors: Sequence[torch.Tensor]) -> None:
        super().expect(packing, tensors)
        threading.Thread(target=self._receive, args=(packing,), name="reap-weights", daemon=True).start()

    def _receive(self, packing: Packing) -> None:
        try:
            group = self._address.group("weights", self._job.index + 1, self._job.workers + 1)
            while True:
                packed = self.room(weights_size(packing))
                wait(join_broadcast(group, packed))
                self.put(packed)
        except (ConnectionError, RuntimeError):
            self.close()


def name_of(index: int, restarts: int) -> str:
    """By which a worker is known in the store: another in its place has another."""
    return f"{index}.{restarts}"


def run_gloo(connection: Any, fds: Any, *, job: bytes, index: int, address: Address, restarts: int = 0) -> None:
    """The life of a worker. `fds`: of the memory weights are in, on the machine of whoever publishes them."""
    parent = _GlooConnection(name_of(index, restarts), address)
    try:
        opened: Job = cloudpickle.loads(job)
    except Exception as error:  # of a kind that this machine cannot import
        parent.send(Message.of(Raised.of(error, "reading what it is to do")), lambda: None)
        parent.finish()
        return
    first = index == 0 and restarts == 0  # it begins with its own weights, and so do all
    weights: Weights = LocalWeights(SharedFile(fd=fds[0]), first=first) if fds else _Broadcasts(opened, address)
    run_remote_worker(opened, parent, weights)


def run_gloo_guest(connection: Any, fds: Any, *, job: bytes, index: int, address: Mapping[str, Any], more: Any) -> None:
    """The life of a worker of a node: its store is at the other end of a tunnel."""
    run_gloo(connection, fds, job=job, index=index, address=Address(host=LOOPBACK, **address))
