"""RemoteWorker: a worker elsewhere that sends its rollouts to whoever ordered them.

    order ──► fill ──► block ──► messages ──► transport        two blocks: one is on its way while the other is filled
          └─► answer ──────────► messages ──► transport
    weights ──► staged, in the background ──► acted with from the next rollout on      (or read, where memory is shared)

An order says which weights it is to find: nobody acts with older ones than were published before it was given.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from reap._system.conversation import live
from reap._system.remote_errors import Raised
from reap.backends.worker_server import Job, RolloutReady, WorkerServer, what_it_did
from reap.core.shared_slots import SharedFile
from reap.core.slot import Slot
from reap.core.stats import TOLD, numbers_of, stats_of
from reap.seeding import seed_process
from reap.weights.shared import Packing, SharedWeights

BLOCKS = 2  # of a remote worker
_SPAN, _STATS = 6, 8  # where in a header its times, and the numbers about episodes, begin
_WORDS = _STATS + len(TOLD)
_FIRST = 16  # bytes of packed weights before what is said of each: count and version

Order = tuple[Literal["fill"], int, bool, int] | tuple[Literal["call"], bytes, int]


class Message(NamedTuple):
    """What a remote worker sends: a header of numbers, then either the bytes of a slot or any object as bytes."""

    header: np.ndarray[Any, np.dtype[np.int64]]
    block: np.ndarray[Any, np.dtype[np.uint8]] | None  # of a rollout
    more: bytes  # the object; or what of a rollout has no fixed size

    @classmethod
    def of(cls, message: Any) -> Message:
        """Return the message that holds this object."""
        data = bytes(cloudpickle.dumps(message))
        words = header()
        words[1] = len(data)
        return cls(words, None, data)

    @classmethod
    def of_rollout(cls, full: RolloutReady, block: np.ndarray[Any, Any]) -> Message:
        """Return the message for a full slot. References, finals and episodes, which have no fixed size, are bytes."""
        ended = full.episodes is not None and len(full.episodes)
        kept = full.finals, full.loose, full.episodes, full.statistics, full.state_after
        more = bool(full.loose) or ended or any(one is not None for one in (kept[0], *kept[3:]))
        data = bytes(cloudpickle.dumps(kept)) if more else b""
        words, numbers = header(), numbers_of(full.stats)
        words[:6] = 1, len(data), full.slot, full.frames, full.version, full.since
        words[_SPAN:_STATS].view(np.float64)[:] = full.span
        words[_STATS:].view(np.float64)[:] = numbers
        return cls(words, block, data)


class Header:
    """The numbers of a message, read."""

    def __init__(self, words: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.words = words
        self.rollout, self.more, self.slot = bool(words[0]), int(words[1]), int(words[2])

    def full(self, more: bytes) -> RolloutReady:
        """Return the rollout whose header this is."""
        finals, loose, *rest = pickle.loads(more) if more else (None, {}, None, None, None)
        frames, version, since = self.words[3:6].tolist()
        stats = stats_of(self.words[_STATS:].view(np.float64))
        begun, ended = self.words[_SPAN:_STATS].view(np.float64).tolist()
        return RolloutReady(self.slot, frames, version, stats, finals, loose, since, (begun, ended), *rest)


def header() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return memory for the numbers of a message."""
    return np.zeros(_WORDS, np.int64)


def do_nothing() -> None:
    """Do nothing: what `done` is for a message without a block."""


class ParentConnection(Protocol):
    """A remote worker's end of the transport: orders come, messages go."""

    def next_order(self) -> Order | None:
        """Wait for the next order and return it; None: go home."""

    def send(self, message: Message, done: Callable[[], None] = do_nothing) -> None:
        """Send, some time soon, in this order; `done` is called when its block may be used again."""

    def finish(self) -> None:
        """Return when everything is sent."""


class Weights(Protocol):
    """What a remote worker acts with, from the moment it is told which tensors they are."""

    def expect(self, packing: Packing) -> None:
        """Learn which tensors they are."""

    def refresh(self, tensors: Sequence[Tensor], at_least: int) -> int | None:
        """Copy the latest, of this number at least, into `tensors`: their version, or None if nothing is new."""


class LocalWeights(Weights):
    """On the machine of whoever publishes them: in memory that both see."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._shared: SharedWeights | None = None

    def expect(self, packing: Packing) -> None:
        self._shared = SharedWeights(self._file, packing)

    def refresh(self, tensors: Sequence[Tensor], at_least: int) -> int | None:
        """Nobody has to wait: weights were written before the order was given."""
        return None if self._shared is None else self._shared.refresh(tensors)


class WeightInbox(Weights):
    """The latest weights that came over a transport, until they are acted with. One thread puts, another takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._packing: Packing | None = None
        self._packed: Tensor | None = None
        self._spare: list[Tensor] = []
        self.count = self._read = 0  # the latest that came, and that was acted with

    def room(self, size: int) -> Tensor:
        """Memory for the next; that of one that was acted with, if there is any."""
        with self._changed:
            return self._spare.pop() if self._spare else torch.empty(size, dtype=torch.uint8)

    def expect(self, packing: Packing) -> None:
        self._packing = packing

    def put(self, packed: Tensor) -> None:
        """Keep weights that have come, as `pack_weights` makes them."""
        count = int(packed[:8].view(torch.int64))
        with self._changed:
            if count > self.count:  # on some networks messages may overtake one another
                self._spare = self._spare if self._packed is None else [self._packed]
                self._packed, self.count = packed, count
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer: no more weights will come."""
        with self._changed:
            self.count = 2**62
            self._changed.notify_all()

    def refresh(self, tensors: Sequence[Tensor], at_least: int) -> int | None:
        """Wait for the message of that number, and act with the latest."""
        with self._changed:
            self._changed.wait_for(lambda: self.count >= at_least)
            packed, self._packed = self._packed, None
        if packed is None or self._packing is None:
            return None
        given, values = _unpack(packed, self._packing)
        with torch.no_grad():
            for tensor, count, value in zip(tensors, given.tolist(), values):
                if count > self._read:
                    tensor.copy_(value)
        self._read, version = (int(word) for word in packed[:_FIRST].view(torch.int64))
        with self._changed:
            self._spare = [packed]
        return version


def weights_size(packing: Packing) -> int:
    """Return how many bytes packed weights take."""
    return _start(packing) + packing.nbytes


def pack_weights(
    packed: Tensor, packing: Packing, named: Mapping[str, Tensor], given: Mapping[str, int], count: int, version: int
) -> None:
    """Write weights as one flat message: its number, their version, in which message each was `given` last, tensors."""
    packed[:_FIRST].view(torch.int64)[:] = torch.tensor([count, version])
    counts, values = _unpack(packed, packing)
    with torch.no_grad():
        for i, (name, *_) in enumerate(packing.entries):
            counts[i] = given.get(name, 0)
            if name in named:
                values[i].copy_(named[name])


def _start(packing: Packing) -> int:
    return -(-(_FIRST + 8 * len(packing.entries)) // 64) * 64


def _unpack(packed: Tensor, packing: Packing) -> tuple[Tensor, list[Tensor]]:
    given = packed[_FIRST : _FIRST + 8 * len(packing.entries)].view(torch.int64)
    return given, packing.views(packed[_start(packing) :].numpy())


class RemoteWorker(WorkerServer):
    """A worker elsewhere, which carries out the orders that are sent to it."""

    def __init__(self, job: Job, parent: ParentConnection, weights: Weights) -> None:
        torch.set_num_threads(job.threads)
        seed_process(job.entropy)
        if job.init is not None:
            job.init()
        super().__init__(job, job.plan, job.writer)
        self._parent, self._weights, self._at_least = parent, weights, 0
        self._slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for index in range(BLOCKS):
            self._slots.put(Slot(self.worker.layout, index))

    def obey(self, order: Order) -> None:
        """Carry out an order."""
        self._at_least = order[-1]
        if order[0] == "fill":
            self._fill(order[1], order[2])
        else:
            call, name, arguments = pickle.loads(order[1])
            self._parent.send(Message.of(self.answer(call, name, arguments)))

    def _fill(self, number: int, random: bool) -> None:
        slot = self._slots.get()
        full = self._full(number, slot, self._collect(slot, random=random))
        if self.writer is None:
            self._parent.send(Message.of_rollout(full, slot.block), lambda: self._slots.put(slot))
        else:
            self._slots.put(slot)
            self._parent.send(Message.of(full))
        self._handed_over()

    def _refresh(self) -> None:
        version = self._weights.refresh(self.tensors, self._at_least)
        if version is not None:
            self.worker.version = version

    def do_begin(self, packing: Packing | None) -> None:
        """All workers are there: weights come from now on."""
        if packing is not None:
            self._weights.expect(packing)

    def do_load_weights(self, data: bytes, version: int) -> None:
        """Act with weights that were sent to this worker alone."""
        self._load(cloudpickle.loads(data), version)


def load_job(data: bytes, parent: ParentConnection) -> Job | None:
    """Return what a worker is to do; None if that cannot be read here, which its collector is told."""
    try:
        job: Job = cloudpickle.loads(data)
    except Exception as error:  # of a kind that this machine cannot import
        parent.send(Message.of(Raised.of(error, "reading what it is to do")))
        parent.finish()
        return None
    return job


def run_remote_worker(job: Job, parent: ParentConnection, weights: Weights) -> None:
    """The life of a remote worker."""

    def serve(worker: RemoteWorker) -> None:
        with contextlib.suppress(ConnectionError):  # nobody is there any more
            parent.send(Message.of(worker.info))
            while (order := parent.next_order()) is not None:
                worker.obey(order)

    def tell(raised: Raised) -> None:
        parent.send(Message.of(raised))
        parent.finish()

    build = functools.partial(job.nested or RemoteWorker, job, parent, weights)
    live(build, serve, tell=tell, doing=what_it_did, close=lambda worker: worker.worker.close())
