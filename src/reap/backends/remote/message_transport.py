"""MessageTransport: base of transports whose workers send their rollouts as messages, not through shared slots.

    fill ──► order ──► some network ──► remote worker
                                             │ messages
    slot ◄── unpacked ◄── wakeup ◄───────────┘

Network threads put received messages into a worker's inbox and wake the waiting thread. A rollout is written to its
final place: the worker's own slot, or its lanes of the slot that all workers fill.
"""

from __future__ import annotations

import pickle
import selectors
import signal
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from reap._system.interrupts import Interrupts, Wakeup
from reap._system.messages.pickling import pack_bytes
from reap._system.messages.remote_errors import Raised
from reap._system.processes import DEADLINE, LEAVE, Child, StartMethod, end
from reap._system.silence import Silence
from reap._system.threads import wait_for_shutdowns
from reap.backends.base import Transport, WeightChannel, WorkerConnection
from reap.backends.remote.remote_worker import Header, Message, Order, pack_weights, weights_size
from reap.backends.worker_handle import WorkerHandle
from reap.core.shared_slots import SharedFile
from reap.core.slot import Layout, Slot
from reap.errors import WorkerDied
from reap.weight_update import WeightTransport
from reap.weights.shared import Packing, SharedWeights

C = TypeVar("C", bound=WorkerConnection)


class PublicationCount:
    """Counts the messages that published weights; 0 where weights are in shared memory.

    Each order carries the count, and its worker first waits for that message.
    """

    count = 0


class MessageConnection(WorkerConnection):
    """The connection to one remote worker. Orders are numbered, because on some networks they overtake one another."""

    ended = False  # set when nothing more will be received
    child: Any  # the `WorkerLiveness` of its process

    def __init__(self, worker: WorkerHandle, sent: PublicationCount) -> None:
        self.index, self.slots, self._sent = worker.index, worker.slots, sent
        self.inbox: deque[Any] = deque()  # messages received and not yet read
        self.orders_sent = 0  # number of orders sent so far

    def send(self, order: Order | None) -> None:
        """Send an order, which is executed after those before it; None: the worker ends."""
        raise NotImplementedError

    def send_weights(self, packed: Any) -> None:
        """Send weights to this worker alone, in the form the transport uses."""
        raise NotImplementedError

    def call(self, data: bytes) -> None:
        self.send(("call", data, self._sent.count))

    def fill(self, slot: int, *, random: bool) -> None:
        self.send(("fill", slot, random, self._sent.count))

    @property
    def has_messages(self) -> bool:
        """Whether there are messages to read."""
        return bool(self.inbox)

    def receive(self) -> tuple[list[Any], bool]:
        gone, found = self.child.gone(), []  # checked first: then all it has sent before is in the inbox
        while self.inbox:
            found.append(self.inbox.popleft())
        return found, gone

    def join_threads(self) -> None:
        """Wait until no thread here waits for the worker, whose process was ended."""

    def unpacked(self, message: Message) -> Any:
        """Return the content of a message, after copying a rollout's bytes into its slot."""
        header = Header(message.header)
        if message.block is not None:
            copy_into_slot(self.slots[header.slot], message.block)
        return read(header, message.more)


def read(header: Header, more: bytes) -> Any:
    """Return the content of a message, or a `Raised` if it cannot be unpickled here, e.g. for lack of a class."""
    try:
        return header.full(more) if header.rollout else pickle.loads(more)
    except Exception as error:
        return Raised.of(error, "reading its message")


def copy_into_slot(slot: Slot, block: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Copy the bytes of a worker's rollout into its own slot, or into its lanes of a common slot."""
    if slot.block.size == block.size:
        np.copyto(slot.block, block)
        return
    for key, array in slot.layout.arrays(block).items():
        slot.arrays[key][...] = array


class NetworkChild:
    """A process reached over a network. It counts as gone when it has ended and all its messages were received."""

    def __init__(self, child: Any, connection: MessageConnection, release_receiver: Callable[[], None]) -> None:
        self.process = child
        self._connection = connection
        self._release_receiver = release_receiver
        self._released = False
        self._killed = False
        self.silence = child.silence
        self.ask_stack = child.ask_stack
        self.signal = child.signal
        self.ask_stacks = getattr(child, "ask_stacks", dict)  # for processes of this machine only

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.process.pid)

    @property
    def label(self) -> str:
        """Its process id, and its machine if that is another one."""
        where = getattr(self.process, "where", "")
        return f" (pid {self.pid}{where})" if self.pid else where

    def end_with_connection(self) -> None:
        """Wait for the process to end, as its connection has; one that does not end in time is cut off, and killed."""
        until = time.monotonic() + LEAVE
        while not self.process.gone():
            if time.monotonic() > until:
                self._killed = True
                self.process.signal(signal.SIGKILL)
                return
            time.sleep(0.02)  # `gone` with a timeout would block other callers

    def death(self) -> WorkerDied:
        """Return the error that says how it ended."""
        if self._killed:
            return WorkerDied("was killed because its connection broke")
        found: WorkerDied = self.process.death()
        return found

    def gone(self) -> bool:
        """Return whether it has ended and all its messages were received.

        The first call that finds it ended also releases the receiver, if that still waits for the first sign.
        """
        if not self.process.gone():
            return False
        if not self._released:
            self._released = True
            self._release_receiver()
        return self._connection.ended


class BroadcastWeights:
    """Publishes weights to all workers as one message per version."""

    def __init__(self, packing: Packing, needed: Sequence[str], transport: MessageTransport) -> None:
        self.packing, self._transport = packing, transport
        self._optional = [name for name in packing.shapes if name not in set(needed)]
        self._kept: dict[str, Tensor] = {}  # the latest value of each optional tensor that was sent
        self._updated_in: dict[str, int] = {}  # the number of the message that last updated each tensor
        self._messages = transport.sent.count  # the number of the last message, sent or not

    def publish(self, named: Mapping[str, Tensor], version: int) -> None:
        """Pack once, send to all. Omitted tensors are sent unchanged: a busy worker sees the last message only."""
        transport = self._transport
        packed = transport.wait_for_room()
        if packed is None:
            packed = torch.empty(weights_size(self.packing), dtype=torch.uint8)
        self._messages += 1
        count = self._messages
        self._kept.update({name: named[name].detach().clone() for name in self._optional if name in named})
        self._updated_in.update(dict.fromkeys(named, count))
        pack_weights(packed, self.packing, {**self._kept, **named}, self._updated_in, count, version)
        transport.broadcast(packed)
        transport.sent.count = count  # last: workers wait for the count in their orders


class MessageTransport(Transport):
    """Launches workers somewhere, sends them orders and weights, and ends them."""

    weight_schemes: ClassVar[tuple[WeightTransport, ...]]
    can_add_workers: ClassVar[bool] = False

    def __init__(self, *, start_method: StartMethod = "forkserver") -> None:
        self._start_method = start_method
        self.sent = PublicationCount()
        self._selector: selectors.BaseSelector | None = None
        self._shared: SharedFile | None = None  # for weights, if all workers are on this machine and share it
        self._children: dict[int, Any] = {}  # the processes, here or on nodes, by worker
        self._sentinels: dict[int, Any] = {}
        self._latest: Any = None  # the latest weights in the form they are sent, for workers that start later

    # ---- what subclasses implement ---------------------------------------------------------------------------------

    @abstractmethod
    def broadcast(self, packed: Tensor) -> None:
        """Send packed weights to all workers. This memory is not written again until `wait_for_room` returns it."""

    def send_to_each(self, packed: Any) -> None:
        """Send weights to each worker in turn, and keep them for workers that start later."""
        self._latest = packed
        for worker in self._workers:
            if not worker.dropped:
                self.resend_weights(worker)

    @abstractmethod
    def end(self, workers: Sequence[WorkerHandle]) -> None:
        """End all workers within the deadline."""

    def join_weights(self) -> None:
        """Prepare to send weights: all workers wait for them from now on."""

    def wait_for_room(self) -> Tensor | None:
        """Wait until another message may be sent; return memory of one that was sent, or None."""
        return None

    # ---- life ------------------------------------------------------------------------------------------------------

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        wait_for_shutdowns()  # of failed collectors that still end: their ports, agents and actors block ours
        self._workers, self._interrupts, self._silence = workers, interrupts, silence
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.open(), selectors.EVENT_READ)
        self.wakeup = Wakeup().open()
        self._selector.register(self.wakeup, selectors.EVENT_READ)

    def start_children(self, targets: Mapping[int, Callable[..., None]]) -> None:
        """Start a process of this machine for each target, with shared memory for weights.

        Each is registered as soon as it exists, so that it is ended if the start of another fails.
        """
        self._shared = self._shared or SharedFile("reap-weights")
        for index, target in targets.items():
            packed, name = pack_bytes(target, "a worker"), f"reap-worker-{index}"
            self._children[index] = Child(packed, fds=[self._shared.fd], start=self._start_method, name=name)
        for index in targets:
            self._children[index].socket.finish()

    def connect(self, worker: WorkerHandle, connection: MessageConnection, sentinel: Any = None) -> None:
        """Set the connection of a worker; `sentinel`: becomes readable when its process is gone."""
        worker.connection = connection
        if sentinel is not None and self._selector is not None:
            self._selector.register(sentinel, selectors.EVENT_READ)
            self._sentinels[worker.index] = sentinel

    def retire(self, worker: WorkerHandle) -> None:
        """End a worker's process, here or on its node, and wait until nothing more is received from it."""
        if (sentinel := self._sentinels.pop(worker.index, None)) is not None and self._selector is not None:
            self._selector.unregister(sentinel)
        if (child := self._children.pop(worker.index, None)) is not None:
            child.signal(signal.SIGKILL)
            end([child], patience=0.0, deadline=DEADLINE)
            connection_of(worker, MessageConnection).join_threads()  # its threads may wait for the process to end

    def close(self, workers: Sequence[WorkerHandle]) -> None:
        selector, self._selector = self._selector, None
        if selector is None:  # closed already, or never opened
            return
        self.end(workers)
        self.wakeup.close()
        selector.close()
        if self._shared is not None:
            self._shared.close()

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, seconds: float | None) -> list[int]:
        self._sleep(seconds)
        living = [worker for worker in self._workers if not worker.dropped]
        return [w.index for w in living if connection_of(w, MessageConnection).has_messages or w.child.gone()]

    def wait_for_wakeup(self, seconds: float) -> None:
        """Wait until `wakeup` is triggered, for `seconds` at most. Ctrl-C is raised here."""
        self._sleep(seconds)
        self._interrupts.let_in()

    def _sleep(self, seconds: float | None) -> None:
        if self._selector is not None:
            self._selector.select(seconds)
            self.wakeup.quiet()

    def position(self, worker: WorkerHandle) -> dict[str, int]:
        """Return nothing: without shared memory the position of a worker is unknown."""
        return {}

    def release_claims(self, worker: WorkerHandle) -> None:
        """Do nothing: remote workers claim no frames, they only fill slots that were ordered."""

    def set_random_frames(self, frames: int) -> None:
        """Do nothing: each order says whether its actions are random."""

    def cut_short(self, stop: bool) -> None:
        """Do nothing: remote rollouts cannot be cut short."""

    # ---- memory ----------------------------------------------------------------------------------------------------

    def common_slots(self, workers: Sequence[WorkerHandle], whole: Layout, count: int) -> Callable[[int], Slot]:
        workers = list(workers)

        def make(index: int) -> Slot:
            slot = Slot(whole, index)
            first = 0
            for worker in workers:
                own = worker.info.layout
                lanes = slice(first, first + own.lanes)
                arrays = {key: slot.arrays[key][:, lanes] for key in whole.offsets}
                worker.slots[index % count] = slot if own.lanes == whole.lanes else Slot(own, index, arrays)
                first += own.lanes
            return slot

        return make

    def own_slots(self, workers: Sequence[WorkerHandle], count: int, *, here: bool = True) -> None:
        for worker in workers:
            worker.slots.update({index: Slot(worker.info.layout, index) for index in range(count) if here})

    # ---- weights ---------------------------------------------------------------------------------------------------

    def begin_arguments(self, worker: WorkerHandle, packing: Packing | None) -> tuple[Any, ...]:
        return (packing,)

    def weight_channel(self, packing: Packing, needed: Sequence[str]) -> WeightChannel:
        if self._shared is not None:
            return SharedWeights(self._shared, packing)
        self.join_weights()
        return BroadcastWeights(packing, needed, self)

    def pass_weights(self, worker: WorkerHandle, data: bytes) -> bytes:
        return data

    def resend_weights(self, worker: WorkerHandle) -> None:
        if self._latest is not None:
            connection_of(worker, MessageConnection).send_weights(self._latest)


def connection_of(worker: WorkerHandle, kind: type[C]) -> C:
    """Return the connection of a worker, which must be of class `kind`."""
    assert isinstance(worker.connection, kind)
    return worker.connection
