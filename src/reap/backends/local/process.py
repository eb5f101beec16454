"""Processes: workers of their own, slots in shared memory, weights back by version.

    sync    one slot for all: worker w fills lanes [w·B, (w+1)·B), the batch is whole when all have          1 version
    async   slots of its own for each: whoever is full first is taken first, and goes on while you learn

                    ┌── free pipe: a slot number ──► worker 0 ─┐
    take ── wait ───┤                                          ├──► "full" ──► lend (or copy) ──► consumer
     ▲              └── free pipe: a slot number ──► worker 1 ─┘                                       │
     └── the last tensor on the slot has died: its number goes into the pipe with the next take ◄──────┘

The parent waits on lines *and* sentinels: a death is seen when it happens. Nothing here runs in a thread. Ctrl-C is let
in only while waiting, when nothing is in hand: to go on after it is to go on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch

from reap._system.fork_server_client import enough_room
from reap._system.interrupts import Interrupts
from reap._system.pickling import dumps, pack
from reap._system.processes import BOOT, Child, StartMethod, end
from reap._system.remote_errors import Raised
from reap._system.silence import Silence
from reap._system.threads import LINGER, see_to
from reap.backends.base import Halted, Rollout
from reap.backends.joint_slot import joined, joined_finals
from reap.backends.local.process_worker import HELLO, ProcessJob, WorkerMemory, run_worker
from reap.backends.local.shared_counters import ALL, NOWHERE, SharedCounters
from reap.backends.worker_handle import FreeSlots, WorkerHandle
from reap.backends.worker_server import Answer, Hooks, RolloutReady, RowWriter, changed
from reap.core.shared_slots import SharedFile, SharedSlots
from reap.core.slot import Pool, Slot
from reap.core.stats import EpisodeWindow
from reap.errors import NotReady, ReapError, UsageError, WorkerDied, WrongState
from reap.seeding import chain
from reap.spec import Key
from reap.weight_update import WeightTransport
from reap.weights.local import as_named, by_worker, fitting
from reap.weights.shared import SharedWeights
from reap.weights.strategy import Extracted

DEADLINE = 5.0  # seconds within which `close` has ended every worker
OWN_SLOTS = 4  # of an asynchronous worker: one being filled, one full, two with the consumer
_STEP = 1.0  # seconds of those that a worker has for the step it is in
_AHEAD = 2  # rollouts an asynchronous worker with a writer is asked for at a time
_COMMON_SLOTS = 3  # of synchronous workers: two for the consumer, one that is copied out when it holds both
_LEAVE = 2.0  # seconds a thread that waits for workers has to leave when they are closed
FIRST = 0  # the number of what workers say unasked, when they start


class ProcessBackend:
    """Workers in processes, one plan each."""

    transports: ClassVar[tuple[WeightTransport, ...]] = ("shared", "parcel", "none")  # that weights can take
    elsewhere = True

    def __init__(
        self,
        plans: Sequence[Any],
        *,
        sync: bool,
        source: Any = None,
        timeout: float | None = None,
        threshold: float | None = None,
        threads: int = 1,
        init: Callable[[], Any] | None = None,
        start_method: StartMethod = "forkserver",
        random_frames: int = 0,
        transport: WeightTransport | None = None,
        writer: Callable[[Sequence[int], int], RowWriter] | None = None,
        buffer: Sequence[int] = (),
        hooks: Hooks | None = None,
        strategy: Any = None,
    ) -> None:
        if transport not in (None, *self.transports):
            raise UsageError(
                f"weight_sync_schemes: {transport!r} is no transport to these workers; there are {self.transports}"
            )
        self._plans, self._sync, self._source, self._silence = list(plans), sync, source, Silence(timeout)
        count = len(self._plans)
        self._enough = count if threshold is None else min(max(int(count * threshold), 1), count)
        self._threads, self._init, self._start_method, self._hooks = threads, init, start_method, hooks
        self._strategy = strategy  # a user's own, by which workers apply weights
        self._random_frames, self._transport = random_frames, transport
        self._writer, self._buffer = writer, tuple(buffer)  # workers write their rollouts themselves, through these
        self.wanted: float = ALL  # frames that may still be asked for, where they are written as they are made
        self._halted = False
        self.version = 0
        self.workers: list[WorkerHandle] = []
        self.former: list[WorkerHandle] = []  # who they were, once it is closed
        self.episodes = EpisodeWindow()
        self.on_rollout: Callable[..., None] | None = None  # told of each, when it is heard of
        self._files: list[SharedFile] = []
        self._pending: int | None = None  # the slot given to all workers, not whole yet (sync)
        self._filling: Slot | None = None
        self._arrived: deque[tuple[WorkerHandle, RolloutReady]] = deque()
        self._begun = False
        self._calls = 0
        self._failure: ReapError | None = None  # of the first worker that failed
        self._interrupts = Interrupts()
        self._talking = threading.RLock()  # one thread at a time listens
        self._publishing = threading.Lock()  # inside `_talking`, if both are held
        self._shared: SharedWeights | None = None
        self._owner = os.getpid()

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers at once, learn from them what a slot looks like, and give them the memory."""
        with self._interrupts.held(), enough_room("the workers"):
            self._start()

    def _start(self) -> None:
        count = len(self._plans)
        entropy = np.random.SeedSequence().generate_state(count, np.uint32)
        like_all = self._threads, self._init, self._hooks, self._strategy, self._enough < count, self._writer
        jobs = [ProcessJob(w, count, plan, int(entropy[w]), *like_all) for w, plan in enumerate(self._plans)]
        targets = [pack(functools.partial(run_worker, job=job), f"what worker {job.index} needs") for job in jobs]
        control, weights = self._file("control"), self._file("weights")
        self.control = SharedCounters(control, count)
        self.control.step[:] = self.control.lane[:] = NOWHERE
        self.control.random = 0 if self._sync else self._random_frames
        self._parcels = [self._file("parcel") for _ in jobs]
        common, slots = self._file("slots"), [self._file("slots") for _ in jobs]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._interrupts.open(), selectors.EVENT_READ)
        for job, target in zip(jobs, targets):
            theirs, ours = os.pipe()
            fds = [theirs, common.fd, slots[job.index].fd, weights.fd, control.fd, self._parcels[job.index].fd]
            fds += self._buffer
            try:
                child = Child(target, fds=fds, start=self._start_method, name=f"reap-worker-{job.index}")
            except BaseException:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
            remote = WorkerHandle(job.index, child, FreeSlots(ours))
            self.workers.append(remote)
            self._selector.register(child.sentinel, selectors.EVENT_READ, remote)
            self._selector.register(child.line, selectors.EVENT_READ, remote)
            self._flush(remote)
        del jobs[:], targets[:], self._plans[:]  # and with them our duplicates of the descriptors in them
        for remote, about in zip(self.workers, self._answers(self.workers, FIRST, grace=BOOT)):
            remote.about = about
        self._share_memory(common, slots, weights)
        self._answers(self.workers, FIRST)  # "ready"

    def _file(self, name: str) -> SharedFile:
        self._files.append(SharedFile(f"reap-{name}"))
        return self._files[-1]

    def _share_memory(self, common: SharedFile, slots: Sequence[SharedFile], weights: SharedFile) -> None:
        abouts = [remote.about for remote in self.workers]
        packings = {about.packing for about in abouts}
        packing = packings.pop() if len(packings) == 1 else None
        if packing is None and self._transport == "shared" and any(about.weighs for about in abouts):
            raise UsageError(
                "SharedMemWeightSyncScheme needs one policy whose weights are tensors; leave the scheme out"
            )
        packing = None if self._transport in ("parcel", "none") else packing
        layouts = [about.layout for about in abouts]
        self._together = self._sync and len({layout.steps for layout in layouts}) == 1
        if self._together:
            whole = joined(layouts)
            shared = SharedSlots(common, whole, _COMMON_SLOTS)
            self._pool = Pool(whole, limit=_COMMON_SLOTS - 1, make=lambda _, index: shared.slot(index))
        first = 0
        for remote, file in zip(self.workers, slots):
            own = remote.about.layout
            if self._together:
                memory = WorkerMemory(whole, _COMMON_SLOTS, first, common=True, packing=packing)
            else:
                remote.slots = SharedSlots(file, own, OWN_SLOTS)
                memory = WorkerMemory(own, OWN_SLOTS, 0, common=False, packing=packing)
            self._say(remote, dumps(memory, "memory"))
            first += own.lanes
        if packing is not None:
            self._shared = SharedWeights(weights, packing)

    def close(self, *, failed: bool = False) -> None:
        """Goodbye to each worker, then terminate, then kill; all within one deadline."""
        if self._owner != os.getpid():
            return  # a fork of the process that owns the workers
        with self._interrupts.held():  # a few seconds at most; interrupted, it would leave workers to themselves
            alone = self._talking.acquire(blocking=False)
            if not alone:  # another thread waits for workers: it leaves before what it waits on is closed
                self.breaker()()
                alone = self._talking.acquire(timeout=_LEAVE)
            try:
                workers, self.workers = self.workers, []
                self.former = workers or self.former
                see_to(functools.partial(self._end, workers), LINGER if failed else None)
                self._interrupts.close()
            finally:
                if alone:
                    self._talking.release()

    def _end(self, workers: Sequence[WorkerHandle]) -> None:
        """End these workers, and give back what was theirs."""
        self._end_workers(workers)
        if hasattr(self, "_selector"):
            self._selector.close()
        for file in self._files:
            file.close()

    def _end_workers(self, workers: Sequence[WorkerHandle]) -> None:
        if hasattr(self, "control"):
            self.control.leave = True  # before the signal, which then waits for the end of a step
        for remote in workers:
            remote.free.close()
            remote.child.line.close()
            remote.child.signal(signal.SIGTERM)  # it may be in the middle of a rollout nobody wants any more
            remote.child.signal(signal.SIGCONT)  # or stopped: now it hears that
        end([remote.child for remote in workers], patience=_STEP, deadline=DEADLINE)

    # ---- listening ------------------------------------------------------------------------------------------------

    def _listen(self, *, first: bool = False, within: float | None = None) -> None:
        """Wait until some worker speaks, or is gone; file it. `first`: what has arrived goes before a failure.

        `within`: wait so many seconds at most; 0: file what is there.
        """
        if self._failure is None:
            silent = self._silence.patience(self._waited_for())
            waits = [seconds for seconds in (within, silent) if seconds is not None]
            ready = self._speaking(min(waits, default=None))
            self._interrupts.let_in()
            if self._halted:
                raise Halted
            for remote in ready:
                self._hear(remote)
            self._check_silence()  # after hearing: whoever has spoken is not silent, however long nobody listened
        if self._failure is not None and not (first and self._arrived):
            raise self._failure

    def _speaking(self, patience: float | None) -> list[WorkerHandle]:
        """Wait for so long (None: as long as it takes) until somebody speaks or is gone: who it is."""
        ready = self._selector.select(patience)
        found = {key.data.index: key.data for key, _ in ready if key.data is not None}
        for remote in found.values():
            self._flush(remote)
        return list(found.values())

    def _say(self, remote: WorkerHandle, data: bytes) -> None:
        remote.child.line.say(data)
        self._flush(remote)

    def _flush(self, remote: WorkerHandle) -> None:
        """Send on what did not go at once; what is left is sent when its line can take it."""
        line = remote.child.line
        wanted = selectors.EVENT_READ if line.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(line).events != wanted:
            self._selector.modify(line, wanted, remote)

    def _hear(self, remote: WorkerHandle) -> None:
        gone = remote.child.gone()  # asked first: what it said before is all there then
        for message in remote.messages():
            remote.busy_since = time.monotonic()
            if message == HELLO:
                continue
            if isinstance(message, Raised):
                self._failure = self._failure or message.unpack().at(worker=remote.name, **self.place(remote))
                return
            if isinstance(message, RolloutReady):
                remote.working.discard(message.slot)
                remote.stats = message.stats
                if message.episodes is not None:  # the last moment of a rollout is, by our clock, now
                    self.episodes.add(message.episodes, shift=time.perf_counter() - message.span[1])
                remote.frames, remote.rollouts = remote.frames + message.frames, remote.rollouts + 1
                self._arrived.append((remote, message))
                if self.on_rollout is not None:
                    self.on_rollout(remote.index, message.span, frames=message.frames, version=message.version)
                continue
            call = message.call if isinstance(message, Answer) else FIRST
            if call == remote.asked:  # else the caller was interrupted, and has gone
                remote.asked = None
                remote.inbox.append(message)
        if gone:
            self._failure = self._failure or self._death(remote)

    def _death(self, remote: WorkerHandle) -> WorkerDied:
        return remote.child.death().at(worker=remote.name, **self.place(remote))

    def place(self, remote: WorkerHandle) -> dict[str, int]:
        """Step and lane, as far as they can be known from outside."""
        step = int(self.control.step[remote.index])
        if step < 0:
            return {}
        lane = 0 if remote.about.layout.lanes == 1 else int(self.control.lane[remote.index])
        return {"step": step} if lane == NOWHERE else {"step": step, "lane": lane}

    @property
    def timeout(self) -> float | None:
        """Seconds a worker that has work may say nothing."""
        return self._silence.timeout

    def _waited_for(self) -> list[tuple[WorkerHandle, float | None]]:
        """Workers, and since when each has been silent."""
        return [(remote, remote.busy_since if remote.busy else None) for remote in self.workers]

    def _check_silence(self) -> None:
        if self._failure is None and (found := self._silence.check(self._waited_for())) is not None:
            remote, error = found
            self._failure = error.at(worker=remote.name, **self.place(remote))

    def _answers(self, remotes: Sequence[WorkerHandle], call: int, grace: float = 0.0) -> list[Any]:
        """What each says to this call."""
        for remote in remotes:
            remote.inbox.clear()
            remote.ask(call)
            remote.busy_since += grace
        while not all(remote.inbox for remote in remotes):
            self._listen()
        return [remote.inbox.popleft() for remote in remotes]

    def call(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Ask workers (by number) something, all at once; they answer between two rollouts."""
        with self._talking, self._interrupts.held():
            self._calls += 1
            remotes = [self.workers[w] for w in arguments]
            for remote in remotes:
                self._say(remote, dumps((self._calls, name, tuple(arguments[remote.index])), name))
            answers = [answer.value for answer in self._answers(remotes, self._calls)]
        for remote, answer in zip(remotes, answers):
            if isinstance(answer, Raised):
                raise answer.unpack().at(worker=remote.name)
        return answers

    def tell(self, name: str, *, wait: bool = True) -> None:
        """A call of all workers of which nobody wants the answers. `wait`: for another thread that talks to them."""
        with self._interrupts.held():
            if self._talking.acquire(blocking=wait):
                try:
                    self._calls += 1
                    for remote in self.workers:
                        self._say(remote, dumps((self._calls, name, ()), name))
                finally:
                    self._talking.release()

    def everyone(self, *arguments: Any) -> dict[int, Sequence[Any]]:
        """The same for all workers."""
        return {remote.index: arguments for remote in self.workers}

    # ---- data -----------------------------------------------------------------------------------------------------

    def take(self, *, random: bool = False) -> Rollout:
        """The next rollout: of all workers (sync), or of whoever is first."""
        with self._talking, self._interrupts.held():
            return self._take_all(random) if self._sync else self._take_first()

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Inside, Ctrl-C is let in only while waiting for workers: what is taken can be put where it belongs."""
        return self._interrupts.held()

    def _take_all(self, random: bool) -> Rollout:
        if self._pending is None:  # else a Ctrl-C interrupted the last take: the workers are at it
            self._filling = self._pool.acquire() if self._together else None
            self._pending = self._filling.index % _COMMON_SLOTS if self._filling is not None else 0
            self.control.stop, self.control.random = False, ALL if random else 0
            for remote in self.workers:
                remote.give(self._pending)
        self._wait_for_all()
        full = {remote.index: message for remote, message in self._arrived}
        slot = self._filled()
        parts = [full[remote.index] for remote in self.workers]
        frames, version = sum(part.frames for part in parts), parts[0].version
        if slot is None:
            if self._writer is not None:
                return Rollout({}, self.workers[0].about.layout, frames, version)
            apart = [self._apart(remote, part) for remote, part in zip(self.workers, parts)]
            return Rollout({}, self.workers[0].about.layout, frames, version, parts=apart)
        if self._writer is not None:
            self._pool.release(slot)
            return Rollout({}, slot.layout, frames, version)
        arrays = self._pool.lend(slot)
        for key in parts[0].loose:
            arrays[key] = np.concatenate([part.loose[key] for part in parts], 1)
        lanes = [remote.about.layout.lanes for remote in self.workers]
        finals = joined_finals([part.finals for part in parts], lanes, slot.layout)
        return Rollout(arrays, slot.layout, frames, version, finals=finals)

    def _wait_for_all(self) -> None:
        while len(self._arrived) < len(self.workers):
            if len(self._arrived) >= self._enough:
                self.control.stop = True
            self._listen()

    def _filled(self) -> Slot | None:
        """The slot all have filled; None where each has its own."""
        slot, self._filling, self._pending = self._filling, None, None
        self._arrived.clear()
        return slot

    def _apart(self, remote: WorkerHandle, full: RolloutReady) -> Rollout:
        arrays = {**remote.slots.slot(full.slot).copied(), **full.loose}
        return Rollout(arrays, remote.about.layout, full.frames, full.version, worker=remote.index)

    def _take_first(self) -> Rollout:
        if self._writer is not None:
            self._ask_for_more()
        elif not self._begun:
            self._begun = True
            for remote in self.workers:
                for slot in range(OWN_SLOTS):
                    remote.give(slot)
        self._take_back()
        while not self._arrived:
            self._listen(first=True)
        remote, full = self._arrived.popleft()
        if self._writer is not None:
            return Rollout({}, remote.about.layout, full.frames, full.version, worker=remote.index)
        return Rollout(
            {**self._lend(remote, full.slot), **full.loose},
            remote.about.layout,
            full.frames,
            full.version,
            worker=remote.index,
            finals=full.finals,
        )

    def _ask_for_more(self) -> None:
        """Rollouts are written as they are made: workers are asked for no more than are wanted."""
        asked = sum(full.frames for _, full in self._arrived)
        asked += sum(len(remote.working) * remote.size for remote in self.workers)
        for ahead in range(1, _AHEAD + 1):
            for remote in self.workers:
                if len(remote.working) < ahead and asked < self.wanted:
                    remote.give(next(slot for slot in range(_AHEAD) if slot not in remote.working))
                    asked += remote.size

    def _lend(self, remote: WorkerHandle, index: int) -> dict[Key, np.ndarray[Any, Any]]:
        """The columns of a full slot; copied if the consumer holds so many that the worker would have to wait."""
        slot = remote.slots.slot(index)
        if len(remote.lent) >= OWN_SLOTS - 2:
            arrays = slot.copied()
            remote.give(index)
            return arrays
        remote.lent.add(index)
        return slot.lend()

    def _take_back(self) -> None:
        """Slots at which the consumer does not look any more are the workers' again."""
        for remote in self.workers:
            for index in [index for index in remote.lent if remote.slots.slot(index).returned]:
                remote.lent.discard(index)
                remote.give(index)

    def breaker(self) -> Callable[[], None]:
        def break_off() -> None:
            self._halted = True
            self._interrupts.wake()

        return break_off

    def drain(self, within: float | None = None) -> None:
        """Wait for what workers were asked for, so many seconds at most; it is kept until somebody takes it."""
        began, left = time.monotonic(), within
        with self._talking, self._interrupts.held():
            while any(remote.working for remote in self.workers):
                self._listen(within=left)
                left = None if within is None else max(began + within - time.monotonic(), 0)
                if left == 0:
                    raise NotReady(f"workers are still busy after {within} s")

    def settle(self, within: float | None = None) -> tuple[int, int]:
        """Wait for what workers were asked for; frames and rollouts nobody has taken, which are in the buffer."""
        with self._talking, self._interrupts.held():
            self.drain(within)
            found = sum(full.frames for _, full in self._arrived), len(self._arrived)
            slot = self._filled()
            if slot is not None:
                self._pool.release(slot)
        return found

    def look(self) -> None:
        """Raise what went wrong with a worker, if anything has. Does not wait."""
        if self._talking.acquire(blocking=False):  # else somebody listens already
            try:
                self._listen(within=0)
            finally:
                self._talking.release()

    # ---- weights --------------------------------------------------------------------------------------------------

    def publish(self, weights: Any = None, worker_ids: Sequence[int] | None = None) -> int:
        """New weights for all workers, or for some; returns their version."""
        if self._transport == "none":
            return self.version
        given = self._source if weights is None else weights
        per_worker = by_worker(given)
        if per_worker and weights is not None and worker_ids is not None:
            raise UsageError("weights are given worker by worker already; leave worker_ids out")
        every = list(given) if per_worker else list(range(len(self.workers)))
        chosen = every if worker_ids is None else list(worker_ids)
        if not chosen:
            return self.version
        unknown = [w for w in chosen if not 0 <= w < len(self.workers)]
        if unknown:
            raise UsageError(f"there is no worker {unknown[0]}; they are 0 to {len(self.workers) - 1}")
        own = isinstance(next(iter(given.values())) if per_worker else given, Extracted)
        for w in chosen:
            if not own and not self.workers[w].about.weighs:
                raise WrongState("this policy has no weights to update")
        if given is None:
            raise WrongState("the policy was made in the workers, so there is nothing to take weights from; give them")
        for remote in self.workers:
            if remote.child.gone():  # nobody may look for a while; an update for the dead would be lost in silence
                raise self._death(remote)
        block = self._shared is not None and not per_worker and worker_ids is None and not own
        # A synchronous batch has one version: nobody publishes while it is filled.
        turn = contextlib.nullcontext() if block and not self._sync else self._talking
        with turn, self._publishing, self._interrupts.held():
            version = self.version + 1
            if block and self._shared is not None:
                needed = self.workers[0].about.needed
                self._shared.publish(fitting(given, self._shared.packing.shapes, needed), version)
            else:
                self._send_weights({w: given[w] if per_worker else given for w in chosen}, version)
            self.version = version
        return version

    def begin_with(self, weights: Mapping[int, Any]) -> None:
        """Give workers (by number) weights before anybody acts; they are of the first version."""
        self._send_weights(weights, self.version)

    def _send_weights(self, weights: Mapping[int, Any], version: int) -> None:
        calls: dict[int, Sequence[Any]] = {}
        for w, given in weights.items():
            about = self.workers[w].about
            sent: Any = given
            if not isinstance(given, Extracted):
                if about.packing is not None:
                    fitting(given, about.packing.shapes, about.needed)
                sent = as_named(given)  # a module may hold what cannot travel
            calls[w] = self._parcel(w, dumps(sent, "weights")), version
        self.call("load_weights", calls)

    def _parcel(self, worker: int, data: bytes) -> Any:
        """How bytes are brought to a worker: what it is told of them."""
        self._parcels[worker].map(len(data))[:] = np.frombuffer(data, np.uint8)  # a write would end at 2 GiB
        return len(data)

    def find(self, path: str, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]] | None = None) -> list[Any]:
        """What is at `path` in each worker; or what it returns when called, with arguments of each worker's own."""
        packed = [None if calls is None else dumps(calls[remote.index], "arguments") for remote in self.workers]
        try:
            return self.call("find", {remote.index: (path, one) for remote, one in zip(self.workers, packed)})
        except ReapError as error:
            if calls is None and isinstance(error.__cause__, AttributeError):
                raise error.__cause__ from error  # a wrong name, as it would be here
            raise

    def apply(self, path: str, strategy: Any, weights: Any) -> None:
        """Give the model at `path` in each worker what a user's own strategy has made of its weights."""
        self.call("apply", self.everyone(path, dumps((strategy, weights), "weights")))

    def profile(self, settings: Mapping[int, Any]) -> None:
        self.call("profile", {worker: (one,) for worker, one in settings.items()})

    def set_hooks(self, new: Mapping[str, Any]) -> None:
        """Other hooks for all workers, by name: `pre_collect_hook`, `post_collect_hook`."""
        self.call("hooks", self.everyone(dumps(dict(new), " and ".join(new))))
        self._hooks = changed(self._hooks, new)  # of those to come

    def weights_of(self, worker: int) -> Any:
        """What a worker's policy holds now."""
        return self.call("weights", {worker: ()})[0]

    # ---- seeds and state ------------------------------------------------------------------------------------------

    def reset(self, lanes: Sequence[int] | None = None, *, workers: Sequence[int] | None = None) -> None:
        if lanes is not None:
            raise UsageError("single lanes of other processes cannot be reset; reset() begins anew everywhere")
        self._begin_anew("reset", dict.fromkeys(range(len(self.workers)) if workers is None else workers, ()))

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        """Each worker's lanes take the links of the chain that follow the last worker's."""
        calls: dict[int, Sequence[Any]] = {}
        for remote in self.workers:
            calls[remote.index] = (seed, static)
            _, seed = chain(seed, remote.about.lanes or remote.about.layout.lanes, static=static)
        self._begin_anew("set_seed", calls)
        return seed

    def _begin_anew(self, name: str, calls: Mapping[int, Sequence[Any]]) -> None:
        """A call that ends all episodes. What was made before it is not delivered any more."""
        with self._talking, self._interrupts.held():
            self._finish_pending()
            taken = {remote.index: remote.frames - self._waiting(remote)[0] for remote in self.workers}
            self.call(name, {w: (taken[w], *arguments) for w, arguments in calls.items()})
            for _ in range(len(self._arrived)):
                remote, full = self._arrived.popleft()
                if remote.index not in calls or full.since == self._calls or self._writer is not None:
                    self._arrived.append((remote, full))
                else:
                    remote.uncount(full.frames)
                    remote.give(full.slot)

    def _waiting(self, remote: WorkerHandle) -> tuple[int, int]:
        """Frames and rollouts of a worker that nobody has taken yet."""
        found = [full.frames for other, full in self._arrived if other is remote]
        return sum(found), len(found)

    def _finish_pending(self) -> None:
        """A synchronous slot that was interrupted is filled to the end, and forgotten."""
        if self._pending is not None:
            self._wait_for_all()
            for remote, full in self._arrived:
                remote.uncount(full.frames)
            slot = self._filled()
            if slot is not None:
                self._pool.release(slot)

    def state_dict(self) -> dict[str, Any]:
        states = self.call("state", self.everyone())
        each = {}
        for remote, state in zip(self.workers, states):
            frames, rollouts = self._waiting(remote)  # they will not be there for whoever goes on from this state
            taken = {"frames": remote.frames - frames, "iter": remote.rollouts - rollouts - 1}
            each[f"worker{remote.index}"] = {**state, **taken}
        first = torch.tensor(max(state.pop("traj_id") for state in each.values()))
        return {"traj_pool": {"traj_id": first}, **each, "policy_version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first = int(state.get("traj_pool", {}).get("traj_id", 0))
        self.version = int(state.get("policy_version", self.version))
        usual = {**state.get("worker0", {}), "env_state_dict": {}, "frames": 0, "iter": -1}
        own = {w: state.get(f"worker{w}", usual) for w in range(len(self.workers))}
        with self._talking, self._interrupts.held():
            self._finish_pending()
            for w, remote in enumerate(self.workers):
                frames, rollouts = self._waiting(remote)
                remote.frames = int(own[w].get("frames", 0)) + frames
                remote.rollouts = int(own[w].get("iter", -1)) + 1 + rollouts
            self._begin_anew("load_state", {w: (own[w], first, self.version) for w in own})
