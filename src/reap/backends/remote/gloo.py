"""torch.distributed: workers reached over the network by gloo; each rollout is one tensor, received into its slot.

    store (loopback; other machines connect through a listener)  ── orders, signed ─►  remote worker
    group of two, for each worker                          ◄── header, slot, end  remote worker
    group of all                                           ── weights, broadcast ► remote workers (of nodes; processes
                                                                  that launcher "mp" has started read shared memory)

One thread per worker receives. It ends when the worker's connection ends, or when its node is lost. A broadcast needs
all workers. Among nodes, where workers may be replaced or dropped, a second thread per worker sends it the latest
weights.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import pickle
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap._system import silence
from reap._system.interrupts import Wakeup
from reap._system.messages.pickling import dumps
from reap._system.processes import DEADLINE, GOODBYE, StartMethod
from reap._system.processes import end as end_children
from reap._system.stacks import call_all
from reap.backends.network.authenticated_listener import LOOPBACK
from reap.backends.network.launchers import NodeSettings
from reap.backends.network.loopback_store import loopback_store
from reap.backends.network.signed_messages import MessageSigner
from reap.backends.remote.gloo_worker import (
    FOREVER,
    HERE,
    WEIGHTS,
    Address,
    abandon,
    join_broadcast,
    name_of,
    run_gloo,
    wait,
)
from reap.backends.remote.launched_transport import LaunchedTransport
from reap.backends.remote.message_transport import (
    MessageConnection,
    NetworkChild,
    PublicationCount,
    connection_of,
    copy_into_slot,
    read,
)
from reap.backends.remote.remote_worker import Header, Order, header
from reap.backends.worker_handle import WorkerHandle
from reap.core.slot import Slot
from reap.errors import WorkerDied

_MAX_IN_FLIGHT = 2  # broadcasts of weights that may be in flight at a time
_NOTICED_WITHIN = 1.0  # seconds after a broken connection in which the end of its worker is noticed
_NOTHING: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
_POLL = 0.001  # seconds between two polls of a broadcast: gloo has no event to wait on together with others


class _OrderStore:
    """The key-value store that carries orders.

    Only this object keeps the store alive: when it is closed, workers that wait for an order end.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        """Store an order under the key that its worker waits for."""
        self._store.set(key, value)

    def give_up(self, name: str) -> None:
        """Release the thread that waits for the first sign of a worker, because the worker has ended."""
        if (store := self._store) is not None:
            store.compare_set(f"here/{name}", "", "never")

    def close(self) -> None:
        """End the store; workers that wait for an order end with it."""
        self._store = None


class GlooConnection(MessageConnection):
    """The connection to one worker over gloo, with the thread that receives from it."""

    def __init__(
        self,
        worker: WorkerHandle,
        sent: PublicationCount,
        child: Any,
        address: Address,
        orders: _OrderStore,
        wakeup: Wakeup,
    ) -> None:
        super().__init__(worker, sent)
        self._name = name_of(worker.index, worker.restarts)
        self.child = NetworkChild(child, self, functools.partial(orders.give_up, self._name))
        self._address, self._put, self._wakeup = address, orders.put, wakeup
        self._signer = MessageSigner(address.secret)
        self._group: Any = None
        self._messages_received = 0  # messages received so far
        self._staging = _NOTHING  # receives a rollout for lanes of a slot
        self._last_byte = np.zeros(1, np.uint8)
        self._to_send: Tensor | None = None  # the latest weights, until they are sent
        self._new_weights = threading.Condition()
        self._sender: threading.Thread | None = None
        self.thread = threading.Thread(target=self._receive_all, name=f"reap-receiver-{self.index}", daemon=True)
        self.thread.start()

    def send(self, order: Order | None) -> None:
        key = f"to/{self._name}/{self.orders_sent}"
        self.orders_sent += 1
        self._put(key, self._signer.sign(pickle.dumps(order), key))

    def _receive_all(self) -> None:
        try:
            if self._wait_for_first_sign():
                group = self._address.group(f"data/{self._name}", 0, 2)
                with self._new_weights:
                    self._group = group
                    self._new_weights.notify_all()
                if getattr(self.child.process, "lost", False):  # it was lost while there was no group to abandon
                    self.abandon()
                words = header()
                while True:
                    wait(group.recv([torch.from_numpy(words)], 1, 0))
                    self.inbox.append(self._receive(group, Header(words)))
                    self._wakeup.wake()
        except (ConnectionError, RuntimeError):
            pass  # it is gone or about to be: the listening thread finds out how
        finally:
            with self._new_weights:
                self._group, self.ended = None, True
                self._new_weights.notify_all()
            self._wakeup.wake()
            self.child.end_with_connection()

    def send_weights(self, packed: Tensor) -> None:
        """Send weights, in place of earlier ones that were not sent yet."""
        with self._new_weights:
            self._to_send = packed
            self._new_weights.notify_all()
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, name=f"reap-sender-{self.index}", daemon=True)
                self._sender.start()

    def _send_all(self) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # it is gone
            while True:
                with self._new_weights:
                    self._new_weights.wait_for(lambda: self.ended or (self._to_send is not None and self._group))
                    packed, self._to_send, group = self._to_send, None, self._group
                if self.ended:
                    return
                wait(group.send([packed], 1, WEIGHTS))

    def join_threads(self) -> None:
        self.child.gone()  # releases the thread that waits for its first sign
        for thread in filter(None, (self.thread, self._sender)):
            thread.join(DEADLINE)

    def abandon(self) -> None:
        """Close the connection to a lost machine, which would stay open forever."""
        if (group := self._group) is not None:
            abandon(group, 1)

    def _wait_for_first_sign(self) -> bool:
        """Wait for the worker's first sign, and return whether it came; `give_up` ends the wait without it."""
        return bytes(self._address.store().get(f"here/{self._name}")) == HERE

    def _receive(self, group: Any, head: Header) -> Any:
        """Receive the rest of a message: the bytes of a rollout, the pickled part, and a byte that ends it.

        Only that last byte is waited for. When a worker dies, gloo ends the waits for what had not begun to arrive, but
        never the wait for what had arrived in part.
        """
        slot = self.slots[head.slot] if head.rollout else None
        block = _NOTHING if slot is None else self._place_for(slot)
        signed = np.empty(head.more_size, np.uint8)
        parts = [group.recv([torch.from_numpy(part)], 1, 0) for part in (block, signed) if part.size]
        wait(group.recv([torch.from_numpy(self._last_byte)], 1, 0))
        for part in parts:
            wait(part)
        if slot is not None and block.size and not slot.block.size:
            copy_into_slot(slot, block)
        place = f"from/{self._name}/{self._messages_received}"
        more = self._signer.verified(bytes(signed), place) if signed.size else b""
        self._messages_received += 1
        return read(head, more)

    def _place_for(self, slot: Slot) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the memory that receives a rollout: the slot itself, or a buffer, as lanes are not contiguous."""
        if slot.block.size:
            return slot.block
        if self._staging.size != slot.layout.nbytes:
            self._staging = np.empty(slot.layout.nbytes, np.uint8)
        return self._staging


class GlooTransport(LaunchedTransport):
    """Runs workers on this machine or on nodes, and reaches them over torch.distributed."""

    weight_schemes = ("distributed", "per_worker", "none")
    network = "gloo"

    def __init__(
        self, *, nodes: NodeSettings, one_by_one: bool = False, start_method: StartMethod = "forkserver"
    ) -> None:
        super().__init__(nodes=nodes, one_by_one=one_by_one, start_method=start_method)
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self._spare: list[Tensor] = []
        self._group: Any = None
        self._orders: _OrderStore | None = None

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        packed = {worker.index: dumps(worker.job, f"what worker {worker.index} needs") for worker in workers}
        if self._orders is None:
            self._open_store(len(workers))
        assert self._orders is not None
        if self._node_pool is None:
            restarts = {worker.index: worker.restarts for worker in workers}
            run = functools.partial(run_gloo, address=self._address)
            self.start_children(
                {i: functools.partial(run, job=job, index=i, restarts=restarts[i]) for i, job in packed.items()}
            )
        else:
            more = {one.index: {"restarts": one.restarts, "one_by_one": self._one_by_one} for one in workers}
            self.start_on_nodes(workers, packed, more)
        for worker in workers:
            child = self._children[worker.index]
            connection = GlooConnection(worker, self.sent, child, self._address, self._orders, self.wakeup)
            self.connect(worker, connection, child.sentinel)

    def _open_store(self, count: int) -> None:
        store = loopback_store(self._nodes.port if self._local else 0, FOREVER)
        self._orders = _OrderStore(store)  # first, so that `end` closes it
        if self._local:
            self._address = Address(LOOPBACK, store.port, secrets.token_bytes(32), LOOPBACK)
        else:
            self._node_pool = self._nodes.open(count, store.port, self.wakeup.wake)
            self._address = Address(LOOPBACK, store.port, self._node_pool.registry.secret, self._nodes.listen)

    def cut_off(self, connection: MessageConnection) -> None:
        assert isinstance(connection, GlooConnection)
        connection.abandon()
        if (group := self._group) is not None:
            abandon(group, connection.index + 1)

    def join_weights(self) -> None:
        if not self._one_by_one:
            try:
                self._group = self._address.group("weights", 0, len(self._workers) + 1)
            except RuntimeError as error:  # a worker has died meanwhile
                raise self._send_failure(error) from None

    def broadcast(self, packed: Tensor) -> None:
        if self._one_by_one:
            self.send_to_each(packed)
            return
        try:
            self._in_flight.append((join_broadcast(self._group, packed), packed))
        except (ConnectionError, RuntimeError) as error:
            raise self._send_failure(error) from None

    def wait_for_room(self) -> Tensor | None:
        """Wait while too many broadcasts are in flight: before anything is counted, so that Ctrl-C changes nothing."""
        began, logged = time.monotonic(), False
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            work, sent = self._in_flight[0]
            if work.is_completed():
                try:
                    wait(work)
                except ConnectionError as error:
                    raise self._send_failure(error) from None
                self._in_flight.popleft()
                self._spare.append(sent)
                continue
            time.sleep(_POLL)
            self._interrupts.let_in()
            waited = time.monotonic() - began
            if waited > self._silence.limit and not logged:
                worker, logged = self._suspect(), True
                if self._silence.timeout is not None:
                    raise worker.child.silence(waited, self._silence.timeout).at(worker=worker.name)
                silence.log(f"worker {worker.name}, which has to load new weights,", waited, worker.child.ask_stack())
        return self._spare.pop() if self._spare else None

    def _send_failure(self, error: Exception) -> WorkerDied:
        multiprocessing.connection.wait([child.sentinel for child in self._children.values()], _NOTICED_WITHIN)
        for worker in self._workers:
            if self._children[worker.index].gone():
                return worker.child.death().at(worker=worker.name)
        return WorkerDied(f"weights could not be sent: {error}")

    def _suspect(self) -> WorkerHandle:
        """Guess which worker receives no weights, as gloo does not say: one without a stack, or the longest silent."""
        stacks = call_all({str(worker.index): worker.child.ask_stack for worker in self._workers})
        unresponsive = [worker for worker in self._workers if not stacks[str(worker.index)]]
        quiet = (
            unresponsive
            or [worker for worker in self._workers if not connection_of(worker, GlooConnection).has_messages]
            or self._workers
        )
        return min(quiet, key=lambda one: one.busy_since)

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        living = [worker for worker in workers if not worker.dropped]
        connections = [one for worker in living if isinstance(one := worker.connection, GlooConnection)]
        for connection in connections:
            connection.send(None)
        end_children(self._children.values(), patience=GOODBYE, deadline=DEADLINE)
        for connection in connections:
            connection.join_threads()
        if self._node_pool is not None:
            self._node_pool.close(DEADLINE)
        self._in_flight.clear()
        self._group = None
        if self._orders is not None:
            self._orders.close()
