"""Remote workers: they share no memory with this process. The same takes, calls and versions; slots are sent.

    take ── free slots ──► order ──► transport ──► remote worker
     ▲                                                   │ messages
     └── slot ◄── wakeup ◄── transport ◄─────────────────┘

Threads of the transport put what they hear into a worker's inbox and wake whoever waits. A slot that is free again
is handed out with the next take.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap._system.pickling import pack_bytes
from reap._system.processes import BOOT, Child
from reap._system.threads import wait_for_ends
from reap.backends.base import Rollout
from reap.backends.joint_slot import joined
from reap.backends.local.process import FIRST, OWN_SLOTS, ProcessBackend
from reap.backends.local.shared_counters import NOWHERE, SharedCounters
from reap.backends.remote.remote_worker import Header, Message, Order, RemoteJob, RemoteWorker, pack, parcel_size
from reap.backends.worker_handle import WorkerHandle
from reap.core.shared_slots import SharedFile, SharedSlots
from reap.core.slot import Pool
from reap.errors import UsageError, WorkerDied
from reap.weights.shared import Packing, SharedWeights

_GRACE = 2.0  # seconds a worker may live when its transport is over


class Wakeup:
    """Rung from any thread; wakes a selector."""

    def __init__(self) -> None:
        self._ours, self._theirs = os.pipe()
        for fd in (self._ours, self._theirs):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """For selectors."""
        return self._ours

    def ring(self) -> None:
        """Somebody has spoken."""
        with contextlib.suppress(BlockingIOError, OSError):  # it rings already; or nobody listens any more
            os.write(self._theirs, b"!")

    def quiet(self) -> None:
        """It was heard."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ours, 4096)

    def close(self) -> None:
        """Give back the descriptors."""
        ours, theirs, self._ours, self._theirs = self._ours, self._theirs, -1, -1
        os.close(ours)
        os.close(theirs)


class RemoteSlots:
    """Slots a worker may fill, until they are sent."""

    def __init__(self) -> None:
        self.slots: deque[int] = deque()

    def give(self, slot: int) -> None:
        """Permission to fill it."""
        self.slots.append(slot)

    def close(self) -> None:
        """No more of it."""
        self.slots.clear()


class RemoteHandle(WorkerHandle):
    """A remote worker as it is seen here. `child` says whether it lives, and how it ended."""

    over = False  # its transport: nothing more will be heard

    def __init__(self, index: int, child: Any) -> None:
        self.free_slots = RemoteSlots()
        super().__init__(index, child, self.free_slots)  # type: ignore[arg-type]
        self.ear: deque[Any] = deque()  # what it has said

    @property
    def speaks(self) -> bool:
        """Whether there is something to hear."""
        return bool(self.ear)

    @property
    def name(self) -> str:
        where = getattr(self.child, "where", "")
        return f"{self.index} (pid {self.child.pid}{where})" if self.child.pid else f"{self.index}{where}"

    def messages(self) -> list[Any]:
        found = []
        while self.ear:
            found.append(self.ear.popleft())
        return found

    def carried_in(self, message: Message) -> Any:
        """What a message says; a rollout's bytes are in its slot then."""
        header = Header(message.header)
        if message.block is None:
            return pickle.loads(message.more)
        np.copyto(self.slots.bytes_of(header.slot), message.block)
        return header.full(message.more)


class LocalChild:
    """A process of this machine. It is gone when it has ended and everything it said was heard."""

    def __init__(self, child: Any, remote: RemoteHandle, give_up: Callable[[], None]) -> None:
        self._child, self._remote, self._give_up, self._told = child, remote, give_up, False
        self.silence, self.ask_stack, self.signal, self._cut = child.silence, child.ask_stack, child.signal, False
        self.where = getattr(child, "where", "")  # if it is on another machine

    @property
    def pid(self) -> int:
        """Its number."""
        return int(self._child.pid)

    def see_off(self) -> None:
        """Its transport is over, so it ends too. One that does not has lost its way to us, and is ended."""
        until = time.monotonic() + _GRACE
        while not self._child.gone():
            if time.monotonic() > until:
                self._cut = True
                self._child.signal(signal.SIGKILL)
                return
            time.sleep(0.02)  # not `gone` with a time: others want to ask too

    def death(self) -> WorkerDied:
        """How it ended."""
        if self._cut:
            return WorkerDied("was ended, for the connection to it broke")
        found: WorkerDied = self._child.death()
        return found

    def gone(self) -> bool:
        """Whether there is nothing to come from it."""
        if not self._child.gone():
            return False
        if not self._told:
            self._told = True
            self._give_up()
        return self._remote.over


class RemoteWeights:
    """What `publish` writes to: one parcel per version, for all."""

    def __init__(self, packing: Packing, needed: Sequence[str], backend: RemoteBackend) -> None:
        self.packing, self._backend = packing, backend
        self.count = 0
        self._optional = [name for name in packing.shapes if name not in set(needed)]
        self._kept: dict[str, Tensor] = {}  # of the optional ones, those that were sent: the latest of each
        self._given: dict[str, int] = {}  # the parcel in which each was sent as something new

    def publish(self, named: Mapping[str, Tensor], version: int) -> None:
        """Pack once, send to all. What is left out goes along as it was: whoever is busy sees the last parcel only."""
        parcel = self._backend.spare()
        if parcel is None:
            parcel = torch.empty(parcel_size(self.packing), dtype=torch.uint8)
        self.count += 1
        self._kept.update({name: named[name].detach().clone() for name in self._optional if name in named})
        self._given.update(dict.fromkeys(named, self.count))
        pack(parcel, self.packing, {**self._kept, **named}, self._given, self.count, version)
        self._backend.broadcast(parcel)


class RemoteBackend(ProcessBackend):
    """Workers over some transport. A transport launches them, sends orders and parcels, and ends them."""

    def __init__(
        self, plans: Sequence[Any], *, remote_worker: Callable[..., RemoteWorker] | None = None, **options: Any
    ) -> None:
        if options.get("threshold") is not None:
            raise UsageError("preemptive_threshold stops workers in the middle of a rollout; these are too far away")
        super().__init__(plans, **options)
        self._station = remote_worker  # what is there; None: a worker
        self._random_given = 0
        self._near: SharedFile | None = None  # for weights, where all workers are on this machine and have it too
        self._children: list[Any] = []  # the processes of workers, here or on nodes

    @abstractmethod
    def launch(self, jobs: Sequence[RemoteJob]) -> None:
        """Start all workers, and put them into `workers`; what they say comes into their ears."""

    @abstractmethod
    def send(self, remote: RemoteHandle, order: Order | None) -> None:
        """An order for one, after those before it; None: go home."""

    def bind_policy(self, packing: Packing) -> None:
        """All know what parcels of weights will hold, and wait for them."""

    @abstractmethod
    def broadcast(self, parcel: Tensor) -> None:
        """A parcel for all of them. It is not written to any more, until it is spare."""

    def spare(self) -> Tensor | None:
        """A parcel that was sent and can be filled again: memory that was used before costs less than new."""
        return None

    @abstractmethod
    def part(self, workers: Sequence[RemoteHandle]) -> None:
        """End all of them, within the deadline."""

    # ---- life -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        wait_for_ends()  # of collectors that failed: their ports, agents and actors are in our way
        count = len(self._plans)
        jobs = [self._job(w, plan, count) for w, plan in enumerate(self._plans)]
        self._make_words(count)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._interrupts.open(), selectors.EVENT_READ)
        self.wakeup = Wakeup()
        self._selector.register(self.wakeup, selectors.EVENT_READ)
        self.launch(jobs)
        for remote, about in zip(self.workers, self._answers(self.workers, FIRST, grace=BOOT)):
            remote.about = about
        self._make_room()
        abouts = [remote.about for remote in self.workers]
        packings = {about.packing for about in abouts}
        packing = packings.pop() if len(packings) == 1 and self._transport not in ("parcel", "none") else None
        self.call("begin", self.everyone(packing))
        if packing is not None and self._near is not None:
            self._shared = SharedWeights(self._near, packing)
        elif packing is not None:
            self.bind_policy(packing)
            self._shared = RemoteWeights(packing, abouts[0].needed, self)  # type: ignore[assignment]

    def start_children(self, targets: Sequence[Callable[..., None]]) -> None:
        """A process of this machine for each, with memory for weights; known, and so ended, from its first moment."""
        self._near = self._file("weights")
        for index, target in enumerate(targets):
            packed, name = pack_bytes(target, "a worker"), f"reap-worker-{index}"
            self._children.append(Child(packed, fds=[self._near.fd], start=self._start_method, name=name))
        for child in self._children:
            child.line.finish()

    def _job(self, index: int, plan: Any, count: int) -> RemoteJob:
        (entropy,) = np.random.SeedSequence().generate_state(1, np.uint32)
        writer: Any = self._writer  # of this kind needs no descriptors
        like_all = self._threads, self._init, self._hooks, self._strategy, self._station, writer
        return RemoteJob(index, count, plan, int(entropy), *like_all)

    def _make_words(self, count: int) -> None:
        self.control = SharedCounters(self._file("control"), count)
        self.control.step[:] = self.control.lane[:] = NOWHERE

    def _make_room(self) -> None:
        if self._writer is not None:  # rollouts stay where they are made
            self._together = False
            return
        layouts = [remote.about.layout for remote in self.workers]
        self._together = self._sync and len({layout.steps for layout in layouts}) == 1
        if self._together:
            self._pool = Pool(joined(layouts))
        for remote in self.workers:
            count = 1 if self._sync else OWN_SLOTS
            remote.slots = SharedSlots(self._file("slots"), remote.about.layout, count)

    def _end_workers(self, workers: Sequence[WorkerHandle]) -> None:
        for remote in workers:
            remote.free.close()
        wakeup: Wakeup | None = self.__dict__.pop("wakeup", None)
        if wakeup is not None:  # else it was closed before, or never opened
            self.part([remote for remote in workers if isinstance(remote, RemoteHandle)])
            wakeup.close()

    # ---- orders and messages ----------------------------------------------------------------------------------------

    def take(self, *, random: bool = False) -> Rollout:
        with self._talking, self._interrupts.held():
            self._take_back()
            self._hand_out()
            return super().take(random=random)

    def _speaking(self, patience: float | None) -> list[WorkerHandle]:
        self._hand_out()
        self._selector.select(patience)
        self.wakeup.quiet()
        return [remote for remote in self.workers if remote.speaks or remote.child.gone()]  # type: ignore[attr-defined]

    def linger(self, seconds: float) -> None:
        """Wait until somebody rings, or so long. Ctrl-C is let in."""
        self._selector.select(seconds)
        self.wakeup.quiet()
        self._interrupts.let_in()

    def _hand_out(self) -> None:
        for remote in self.workers:
            while remote.free_slots.slots:  # type: ignore[attr-defined]
                slot = remote.free_slots.slots.popleft()  # type: ignore[attr-defined]
                self.send(remote, ("fill", slot, self._is_random(remote), self._parcels_sent))  # type: ignore[arg-type]

    def _begin_anew(self, name: str, calls: Mapping[int, Sequence[Any]]) -> None:
        with self._talking, self._interrupts.held():
            self._random_given = sum(self._wanted_of(remote, remote.index in calls) for remote in self.workers)
            super()._begin_anew(name, calls)

    def _wanted_of(self, remote: WorkerHandle, anew: bool) -> int:
        """Frames of a worker that were taken, or will be: not those it was told to make before it begins anew."""
        if anew:
            return remote.frames - self._waiting(remote)[0]
        return remote.frames + (len(remote.working) - len(remote.free_slots.slots)) * remote.size  # type: ignore[attr-defined]

    def _is_random(self, remote: WorkerHandle) -> bool:
        if self._sync:
            return self.control.random > 0
        self._random_given += remote.size
        return self._random_given - remote.size < self._random_frames

    @property
    def _parcels_sent(self) -> int:
        return self._shared.count if isinstance(self._shared, RemoteWeights) else 0

    def _say(self, remote: WorkerHandle, data: bytes) -> None:
        self.send(remote, ("call", data, self._parcels_sent))  # type: ignore[arg-type]

    def _wait_for_all(self) -> None:
        super()._wait_for_all()
        if self._filling is None:
            return
        first = 0
        for remote in self.workers:  # each worker's lanes of the common slot
            lanes = remote.about.layout.lanes
            for key, array in remote.slots.slot(0).arrays.items():
                if key not in remote.about.layout.loose:
                    self._filling.arrays[key][:, first : first + lanes] = array
            first += lanes

    def _parcel(self, worker: int, data: bytes) -> Any:
        return data
