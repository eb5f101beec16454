"""RemoteWorker: a worker in another process or machine that sends its rollouts to its collector.

    order ──► fill ──► block ──► messages ──► transport        two blocks: one is sent while the other is filled
          └─► answer ──────────► messages ──► transport
    weights ──► received in the background ──► loaded before the next rollout      (or read, where memory is shared)

An order is never executed with weights older than the order, unless no more weights can come. Where weights are
messages, it carries the number of the last one, for which its worker waits; shared memory was written before the order
was sent.
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
from reap._system.messages.remote_errors import Raised
from reap.backends.worker_server import Job, RolloutReady, WorkerServer, what_it_did
from reap.core.measuring.stats import COUNT_NAMES, numbers_of, stats_of
from reap.core.shared_slots import SharedFile
from reap.core.slot import Slot
from reap.seeding import seed_process
from reap.weights.shared import Packing, SharedWeights

BLOCKS = 2  # memory for rollouts of a remote worker
ROLLOUT, MORE_SIZE, SLOT, FRAMES, VERSION, AFTER_CALL = range(6)  # the first words of a header
_SPAN, _STATS = 6, 8  # where in a header the time span and the stats begin
_WORDS = _STATS + len(COUNT_NAMES)
_PREFIX = 16  # bytes at the start of packed weights: their count and version

Order = tuple[Literal["fill"], int, bool, int] | tuple[Literal["call"], bytes, int]


class Message(NamedTuple):
    """A message of a remote worker: a header of numbers, then the bytes of a slot, or any object as bytes, or both."""

    header: np.ndarray[Any, np.dtype[np.int64]]
    block: np.ndarray[Any, np.dtype[np.uint8]] | None  # the bytes of a rollout
    more: bytes  # the pickled object, or the parts of a rollout without a fixed size

    @classmethod
    def of(cls, message: Any) -> Message:
        """Return a message that holds this object."""
        data = bytes(cloudpickle.dumps(message))
        words = header()
        words[MORE_SIZE] = len(data)
        return cls(words, None, data)

    @classmethod
    def of_rollout(cls, full: RolloutReady, block: np.ndarray[Any, Any]) -> Message:
        """Return the message for a full slot; parts without a fixed size, like references and finals, are pickled."""
        ended = full.episodes is not None and len(full.episodes)
        kept = full.finals, full.loose, full.episodes, full.statistics, full.state_after
        further = full.loose or ended or any(x is not None for x in (full.finals, full.statistics, full.state_after))
        data = bytes(cloudpickle.dumps(kept)) if further else b""
        words, numbers = header(), numbers_of(full.stats)
        words[:_SPAN] = 1, len(data), full.slot, full.frames, full.version, full.after_call
        words[_SPAN:_STATS].view(np.float64)[:] = full.span
        words[_STATS:].view(np.float64)[:] = numbers
        return cls(words, block, data)


class Header:
    """The numbers in the header of a message, decoded."""

    def __init__(self, words: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.words = words
        self.rollout, self.more_size, self.slot = bool(words[ROLLOUT]), int(words[MORE_SIZE]), int(words[SLOT])

    def full(self, more: bytes) -> RolloutReady:
        """Return the `RolloutReady` of this header and the pickled parts `more`."""
        kept = pickle.loads(more) if more else (None, {}, None, None, None)
        finals, loose, episodes, statistics, state_after = kept
        frames, version, after_call = self.words[FRAMES:_SPAN].tolist()
        stats = stats_of(self.words[_STATS:].view(np.float64))
        begun, ended = self.words[_SPAN:_STATS].view(np.float64).tolist()
        return RolloutReady(
            self.slot,
            frames,
            version,
            stats,
            finals=finals,
            loose=loose,
            after_call=after_call,
            span=(begun, ended),
            episodes=episodes,
            statistics=statistics,
            state_after=state_after,
        )


def header() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return an empty header."""
    return np.zeros(_WORDS, np.int64)


def do_nothing() -> None:
    """Do nothing; the default of `done`, for messages without a block."""


class ParentConnection(Protocol):
    """A remote worker's end of the transport: it receives orders and sends messages."""

    def next_order(self) -> Order | None:
        """Wait for the next order and return it; None: end."""

    def send(self, message: Message, done: Callable[[], None] = do_nothing) -> None:
        """Queue a message, to be sent in order; `done` is called when its block may be reused."""

    def finish(self) -> None:
        """Note that nothing follows, and wait until everything is sent, unless it is fetched from here."""


class Weights(Protocol):
    """Where a remote worker gets new weights from, once it knows their packing."""

    def expect(self, packing: Packing) -> None:
        """Set the packing of the weights that will come."""

    def refresh(self, tensors: Sequence[Tensor], at_least: int) -> int | None:
        """Copy the latest weights, number `at_least` or later, into `tensors`; return their version, None if old."""


class LocalWeights(Weights):
    """Weights in memory shared with the collector, on the same machine."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._shared: SharedWeights | None = None

    def expect(self, packing: Packing) -> None:
        self._shared = SharedWeights(self._file, packing)

    def refresh(self, tensors: Sequence[Tensor], at_least: int) -> int | None:
        """Copy the latest weights without waiting: they were written before the order was sent."""
        return None if self._shared is None else self._shared.refresh(tensors)


class WeightInbox(Weights):
    """Holds the latest received weights until the worker loads them. Any thread may put; the worker's takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._packing: Packing | None = None
        self._packed: Tensor | None = None
        self._spare: list[Tensor] = []
        self.count = self._read = 0  # the numbers of the latest received and the last loaded weights

    def memory(self, size: int) -> Tensor:
        """Return memory for the next weights, reused from loaded ones if possible."""
        with self._changed:
            return self._spare.pop() if self._spare else torch.empty(size, dtype=torch.uint8)

    def expect(self, packing: Packing) -> None:
        self._packing = packing

    def put(self, packed: Tensor) -> None:
        """Store received weights, as packed by `pack_weights`."""
        count = int(packed[:8].view(torch.int64))
        with self._changed:
            if count > self.count:  # on some networks messages overtake one another
                self._spare = self._spare if self._packed is None else [self._packed]
                self._packed, self.count = packed, count
                self._changed.notify_all()

    def close(self) -> None:
        """End all waits, because no more weights will come."""
        with self._changed:
            self.count = 2**62
            self._changed.notify_all()

    def refresh(self, tensors: Sequence[Tensor], at_least: int) -> int | None:
        """Wait for publication `at_least`, and copy the latest weights."""
        with self._changed:
            self._changed.wait_for(lambda: self.count >= at_least)
            packed, self._packed = self._packed, None
        if packed is None or self._packing is None:
            return None
        updated_in, values = _unpack(packed, self._packing)
        with torch.no_grad():
            for tensor, count, value in zip(tensors, updated_in.tolist(), values):
                if count > self._read:
                    tensor.copy_(value)
        self._read, version = (int(word) for word in packed[:_PREFIX].view(torch.int64))
        with self._changed:
            self._spare = [packed]
        return version


def weights_size(packing: Packing) -> int:
    """Return the size of packed weights in bytes."""
    return _start(packing) + packing.nbytes


def pack_weights(
    packed: Tensor,
    packing: Packing,
    named: Mapping[str, Tensor],
    updated_in: Mapping[str, int],
    count: int,
    version: int,
) -> None:
    """Write weights as one message.

    Its number (`count`), their version, for each tensor the number of the message that last updated it (`updated_in`),
    and all tensors.
    """
    packed[:_PREFIX].view(torch.int64)[:] = torch.tensor([count, version])
    counts, values = _unpack(packed, packing)
    with torch.no_grad():
        for i, (name, *_) in enumerate(packing.entries):
            counts[i] = updated_in.get(name, 0)
            if name in named:
                values[i].copy_(named[name])


def _start(packing: Packing) -> int:
    return -(-(_PREFIX + 8 * len(packing.entries)) // 64) * 64


def _unpack(packed: Tensor, packing: Packing) -> tuple[Tensor, list[Tensor]]:
    updated_in = packed[_PREFIX : _PREFIX + 8 * len(packing.entries)].view(torch.int64)
    return updated_in, packing.views(packed[_start(packing) :].numpy())


class RemoteWorker(WorkerServer):
    """A worker server that executes the orders it receives."""

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

    def execute(self, order: Order) -> None:
        """Execute an order."""
        self._at_least = order[-1]
        if order[0] == "fill":
            self._fill(order[1], order[2])
        else:
            call, name, arguments = pickle.loads(order[1])
            self._parent.send(Message.of(self.answer(call, name, arguments)))

    def _fill(self, number: int, random: bool) -> None:
        slot = self._slots.get()
        full = self._ready_message(number, slot, self._collect(slot, random=random))
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
        """Expect weights of this packing from now on."""
        if packing is not None:
            self._weights.expect(packing)

    def do_load_weights(self, data: bytes, version: int) -> None:
        """Load weights that were sent to this worker alone."""
        self._load(cloudpickle.loads(data), version)


def load_job(data: bytes, parent: ParentConnection) -> Job | None:
    """Return the unpickled job of a worker. If that fails, send the error to the collector and return None."""
    try:
        job: Job = cloudpickle.loads(data)
    except Exception as error:  # for example a class that this machine cannot import
        parent.send(Message.of(Raised.of(error, "reading its job")))
        parent.finish()
        return None
    return job


def run_remote_worker(job: Job, parent: ParentConnection, weights: Weights) -> None:
    """Run a remote worker from start to end."""

    def serve(worker: RemoteWorker) -> None:
        parent.send(Message.of(worker.info))
        while (order := next_order()) is not None:
            worker.execute(order)

    def next_order() -> Order | None:
        with contextlib.suppress(ConnectionError):  # the collector is gone. A user's hook may raise one, too: not here
            return parent.next_order()
        return None

    def tell(raised: Raised) -> None:
        parent.send(Message.of(raised))
        parent.finish()

    build = functools.partial(job.nested or RemoteWorker, job, parent, weights)
    live(build, serve, tell=tell, doing=what_it_did, close=lambda worker: worker.worker.close())
