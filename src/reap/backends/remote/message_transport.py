"""MessageTransport: what transports have in common that share no memory with their workers: slots are sent.

    fill ──► order ──► some network ──► remote worker
                                             │ messages
    slot ◄── received ◄── wakeup ◄───────────┘

Threads of the network put what they hear into a worker's inbox and wake whoever waits. A rollout is written where it
stays: into the worker's own slot, or into its lanes of the slot that all workers fill.
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
from reap._system.pickling import pack_bytes
from reap._system.processes import DEADLINE, LEAVE, Child, StartMethod, end
from reap._system.remote_errors import Raised
from reap._system.silence import Silence
from reap._system.threads import wait_for_ends
from reap.backends.base import Transport, WeightChannel, WorkerConnection
from reap.backends.remote.remote_worker import Header, Message, Order, pack_weights, weights_size
from reap.backends.worker_handle import WorkerHandle
from reap.core.shared_slots import SharedFile
from reap.core.slot import Layout, Slot
from reap.errors import WorkerDied
from reap.weight_update import WeightTransport
from reap.weights.shared import Packing, SharedWeights

C = TypeVar("C", bound=WorkerConnection)


class SentWeights:
    """Counts publications of weights for all workers. Orders carry the count: a worker first waits for that one."""

    count = 0


class MessageConnection(WorkerConnection):
    """One remote worker as it is reached from here. Orders are numbered: on some networks they overtake one another."""

    over = False  # its end of the network: nothing more will be heard
    child: Any  # whether it lives, and how it ended

    def __init__(self, worker: WorkerHandle, sent: SentWeights) -> None:
        self.index, self.slots, self._sent = worker.index, worker.slots, sent
        self.inbox: deque[Any] = deque()  # what it has said
        self.orders_sent = 0  # sent so far

    def send(self, order: Order | None) -> None:
        """Send an order, after those before it; None: go home."""
        raise NotImplementedError

    def send_weights(self, packed: Any) -> None:
        """Send weights to this worker alone, as the transport has them."""
        raise NotImplementedError

    def call(self, data: bytes) -> None:
        self.send(("call", data, self._sent.count))

    def fill(self, slot: int, *, random: bool) -> None:
        self.send(("fill", slot, random, self._sent.count))

    @property
    def speaks(self) -> bool:
        """Whether there is something to hear."""
        return bool(self.inbox)

    def hear(self) -> tuple[list[Any], bool]:
        gone, found = self.child.gone(), []  # asked first: what it said before is all there then
        while self.inbox:
            found.append(self.inbox.popleft())
        return found, gone

    def let_end(self) -> None:
        """Its process was ended: returns when nobody here waits for it any more."""

    def received(self, message: Message) -> Any:
        """Return what a message says; a rollout's bytes are in its slot then."""
        header = Header(message.header)
        if message.block is not None:
            copy_into_slot(self.slots[header.slot], message.block)
        return read(header, message.more)


def read(header: Header, more: bytes) -> Any:
    """Return what a message says; or, if it holds an object of a class that only its sender has, the error for that."""
    try:
        return header.full(more) if header.rollout else pickle.loads(more)
    except Exception as error:
        return Raised.of(error, "reading what it said")


def copy_into_slot(slot: Slot, block: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Write the bytes of a worker's rollout into its slot, or into its lanes of a slot."""
    if slot.block.size == block.size:
        np.copyto(slot.block, block)
        return
    for key, array in slot.layout.arrays(block).items():
        slot.arrays[key][...] = array


class NetworkChild:
    """A process that is reached by a network. It is gone when it has ended and everything it said was heard."""

    def __init__(self, child: Any, connection: MessageConnection, give_up: Callable[[], None]) -> None:
        self.process, self._connection, self._give_up, self._told = child, connection, give_up, False
        self.silence, self.ask_stack, self.signal, self._cut = child.silence, child.ask_stack, child.signal, False
        self.ask_stacks = getattr(child, "ask_stacks", dict)  # of a process of this machine

    @property
    def pid(self) -> int:
        """The number of its process."""
        return int(self.process.pid)

    @property
    def label(self) -> str:
        """Its number, and its machine if it is on another one."""
        where = getattr(self.process, "where", "")
        return f" (pid {self.pid}{where})" if self.pid else where

    def end_with_connection(self) -> None:
        """Its connection is over, so it ends too. One that does not has lost its way to us, and is ended."""
        until = time.monotonic() + LEAVE
        while not self.process.gone():
            if time.monotonic() > until:
                self._cut = True
                self.process.signal(signal.SIGKILL)
                return
            time.sleep(0.02)  # not `gone` with a time: others want to ask too

    def death(self) -> WorkerDied:
        """Return the error that says how it ended."""
        if self._cut:
            return WorkerDied("was ended, for the connection to it broke")
        found: WorkerDied = self.process.death()
        return found

    def gone(self) -> bool:
        """Return whether there is nothing to come from it."""
        if not self.process.gone():
            return False
        if not self._told:
            self._told = True
            self._give_up()
        return self._connection.over


class BroadcastWeights:
    """Weights for all workers as one message per version."""

    def __init__(self, packing: Packing, needed: Sequence[str], transport: MessageTransport) -> None:
        self.packing, self._transport = packing, transport
        self._optional = [name for name in packing.shapes if name not in set(needed)]
        self._kept: dict[str, Tensor] = {}  # of the optional ones, those that were sent: the latest of each
        self._given: dict[str, int] = {}  # the message in which each was sent as something new
        self._messages = transport.sent.count  # the number of the last one, also if it could not be sent

    def publish(self, named: Mapping[str, Tensor], version: int) -> None:
        """Pack once, send to all. What is left out goes along as it was: whoever is busy sees the last message only."""
        transport = self._transport
        packed = transport.spare()
        if packed is None:
            packed = torch.empty(weights_size(self.packing), dtype=torch.uint8)
        self._messages += 1
        count = self._messages
        self._kept.update({name: named[name].detach().clone() for name in self._optional if name in named})
        self._given.update(dict.fromkeys(named, count))
        pack_weights(packed, self.packing, {**self._kept, **named}, self._given, count, version)
        transport.broadcast(packed)
        transport.sent.count = count  # last: workers wait for what orders ask for


class MessageTransport(Transport):
    """A transport that launches workers somewhere, sends them orders and weights, and ends them."""

    weight_schemes: ClassVar[tuple[WeightTransport, ...]]
    can_add_workers: ClassVar[bool] = False

    def __init__(self, *, start_method: StartMethod = "forkserver") -> None:
        self._start_method = start_method
        self.sent = SentWeights()
        self._selector: selectors.BaseSelector | None = None
        self._shared: SharedFile | None = None  # for weights, where all workers are on this machine and have it too
        self._children: dict[int, Any] = {}  # the processes of workers, here or on nodes, by worker
        self._sentinels: dict[int, Any] = {}
        self._latest: Any = None  # weights, as the transport sends them to one worker: for those that come later

    # ---- what each of them does ------------------------------------------------------------------------------------

    @abstractmethod
    def broadcast(self, packed: Tensor) -> None:
        """Send packed weights to all workers. They are not written to any more, until they are spare."""

    def send_to_each(self, packed: Any) -> None:
        """Send weights to one worker after another, and keep them for workers that come later."""
        self._latest = packed
        for worker in self._workers:
            if not worker.dropped:
                self.resend_weights(worker)

    @abstractmethod
    def end(self, workers: Sequence[WorkerHandle]) -> None:
        """End all workers, within the deadline."""

    def join_weights(self) -> None:
        """All workers wait for weights from now on."""

    def spare(self) -> Tensor | None:
        """Packed weights that were sent and can be filled again: memory that was used before costs less than new."""
        return None

    # ---- life ------------------------------------------------------------------------------------------------------

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        wait_for_ends()  # of collectors that failed: their ports, agents and actors are in our way
        self._workers, self._interrupts, self._silence = workers, interrupts, silence
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.open(), selectors.EVENT_READ)
        self.wakeup = Wakeup().open()
        self._selector.register(self.wakeup, selectors.EVENT_READ)

    def start_children(self, targets: Mapping[int, Callable[..., None]]) -> None:
        """A process of this machine for each, with memory for weights; known, and so ended, from its first moment."""
        self._shared = self._shared or SharedFile("reap-weights")
        for index, target in targets.items():
            packed, name = pack_bytes(target, "a worker"), f"reap-worker-{index}"
            self._children[index] = Child(packed, fds=[self._shared.fd], start=self._start_method, name=name)
        for index in targets:
            self._children[index].line.finish()

    def connect(self, worker: WorkerHandle, connection: MessageConnection, sentinel: Any = None) -> None:
        """From now on a worker is reached by this; `sentinel`: readable when its process is gone."""
        worker.connection = connection
        if sentinel is not None and self._selector is not None:
            self._selector.register(sentinel, selectors.EVENT_READ)
            self._sentinels[worker.index] = sentinel

    def retire(self, worker: WorkerHandle) -> None:
        """End its process, here or on its node, and wait until nothing is received from it any more."""
        if (sentinel := self._sentinels.pop(worker.index, None)) is not None and self._selector is not None:
            self._selector.unregister(sentinel)
        if (child := self._children.pop(worker.index, None)) is not None:
            child.signal(signal.SIGKILL)
            end([child], patience=0.0, deadline=DEADLINE)
            connection_of(worker, MessageConnection).let_end()  # its threads may wait for it until it has ended

    def close(self, workers: Sequence[WorkerHandle]) -> None:
        selector, self._selector = self._selector, None
        if selector is None:  # it was closed before, or never opened
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
        return [w.index for w in living if connection_of(w, MessageConnection).speaks or w.child.gone()]

    def wait_for_wakeup(self, seconds: float) -> None:
        """Wait until somebody rings, or so long. Ctrl-C is let in."""
        self._sleep(seconds)
        self._interrupts.let_in()

    def _sleep(self, seconds: float | None) -> None:
        if self._selector is not None:
            self._selector.select(seconds)
            self.wakeup.quiet()

    def position(self, worker: WorkerHandle) -> dict[str, int]:
        """Nobody knows: it shares no memory with us."""
        return {}

    def release_claims(self, worker: WorkerHandle) -> None:
        """Nobody here begins on anything that was not ordered."""

    def set_random_frames(self, frames: int) -> None:
        """Each order says whether actions are random."""

    def cut_short(self, stop: bool) -> None:
        """Do nothing: rollouts are too far away to be cut short, whoever asks for it."""

    # ---- memory ----------------------------------------------------------------------------------------------------

    def common_slots(self, workers: Sequence[WorkerHandle], whole: Layout, count: int) -> Callable[[int], Slot]:
        workers = list(workers)

        def make(index: int) -> Slot:
            slot = Slot(whole, index)
            first = 0
            for worker in workers:
                own = worker.info.layout
                lanes = slice(first, first + own.lanes)
                mine = {key: slot.arrays[key][:, lanes] for key in whole.offsets}
                worker.slots[index % count] = slot if own.lanes == whole.lanes else Slot(own, index, mine)
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
    """Return the connection of a worker, which is of this kind."""
    assert isinstance(worker.connection, kind)
    return worker.connection
