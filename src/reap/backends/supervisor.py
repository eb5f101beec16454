"""Supervisor: what every set of workers needs, whatever transport reaches them.

    start ──► all at once ──► each says what its rollouts look like
    call  ──► a number, a name ──► answer │ raised │ died │ silent
    fill  ──► a slot ──► arrived, in the order in which rollouts come │ raised │ died │ silent
    close ──► goodbye ──► SIGTERM ──► SIGKILL, by one deadline

The first failure is kept and raised by whoever listens next. A worker that is gone is replaced where that is wanted
(`_start_again`): its connection is another, its slots are given out again, and nobody has to know.

One thread at a time listens: it holds `talking`. Ctrl-C is let in only while waiting, when nothing is in hand: to go on
after it is to go on.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reap._system.conversation import Answer
from reap._system.interrupts import Interrupts
from reap._system.pickling import dumps
from reap._system.processes import BOOT, LEAVE
from reap._system.remote_errors import Raised
from reap._system.silence import Silence
from reap._system.threads import LINGER, see_to
from reap.backends.base import Halted, Transport
from reap.backends.worker_handle import WorkerHandle
from reap.backends.worker_server import HELLO, Job, RolloutReady
from reap.core.stats import EpisodeWindow
from reap.errors import NotReady, ReapError, WorkerDied

FIRST = 0  # the number of what workers say unasked, when they start


class Supervisor:
    """Workers over one transport. `started_again` is called with a worker that took the place of one that died."""

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float | None = None,
        restart: bool = False,
        started_again: Callable[[WorkerHandle], None] | None = None,
    ) -> None:
        self.transport, self._restart = transport, restart
        self._started_again = None if started_again is None else weakref.WeakMethod(started_again)
        self.silence = Silence(timeout)
        self.workers: list[WorkerHandle] = []
        self.former: list[WorkerHandle] = []  # who they were, once it is closed
        self.arrived: deque[tuple[WorkerHandle, RolloutReady]] = deque()  # rollouts nobody has taken yet
        self.episodes = EpisodeWindow()
        self.on_rollout: Callable[..., None] | None = None  # told of each, when it is heard of
        self.calls = 0  # the number of the last one
        self.restarts = 0
        self.interrupts = Interrupts()
        self.talking = threading.RLock()  # one thread at a time listens
        self._random = self._given = 0  # frames of the run that have random actions, and that were ordered so far
        self._failure: ReapError | None = None  # of the first worker that failed
        self._opened = self._halted = False
        self._owner = os.getpid()

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self, jobs: Sequence[Job]) -> list[WorkerHandle]:
        """Start workers, all at once; returns when each has said what it is like."""
        new = [WorkerHandle(job) for job in jobs]
        self.workers.extend(new)
        try:
            if not self._opened:
                self._opened = True
                self.transport.open(self.workers, self.interrupts, self.silence)
            self.transport.launch(new)
        except BaseException:
            self.workers[:] = [worker for worker in self.workers if worker.connection is not None]
            raise
        if not self.transport.replaceable:
            for worker in new:
                worker.job = None  # and with it our duplicates of the descriptors in it
        self._meet(new)
        return new

    def _meet(self, workers: Sequence[WorkerHandle]) -> None:
        for worker, about in zip(workers, self.answers(workers, FIRST, grace=BOOT)):
            worker.about = about

    def _start_again(self, worker: WorkerHandle) -> None:
        """Put another in the place of a worker that is gone. What it was to fill is asked of the new one."""
        slots = worker.take_back_slots()
        if worker.job is not None:
            worker.job = replace(worker.job, entropy=fresh_entropy())
        try:
            self.transport.launch([worker])
        except ConnectionError as error:  # there is nobody left who could start one
            self._failure = self.at(worker, WorkerDied(f"{worker.child.death()}; {error}"))
            return
        self._meet([worker])
        self.restarts += 1
        if self._started_again is not None and (tell := self._started_again()) is not None:
            tell(worker)
        for slot in slots:
            self.fill(worker, slot)

    def change_jobs(self, **changes: Any) -> None:
        """Workers that are started again, are started with these fields of their jobs."""
        for worker in self.workers:
            if worker.job is not None:
                worker.job = replace(worker.job, **changes)

    def close(self, *, failed: bool = False) -> None:
        """End all workers, within one deadline. `failed`: an error waits to be told, so it may go on in a thread."""
        if self._owner != os.getpid():
            return  # a fork of the process that owns the workers
        with self.interrupts.held():  # a few seconds at most; interrupted, it would leave workers to themselves
            alone = self.talking.acquire(blocking=False)
            if not alone:  # another thread waits for workers: it leaves before what it waits on is closed
                self.break_off()
                alone = self.talking.acquire(timeout=LEAVE)
            try:
                workers, self.workers = self.workers, []
                self.former = workers or self.former
                see_to(functools.partial(self.transport.close, workers), LINGER if failed else None)
                self.interrupts.close()
            finally:
                if alone:
                    self.talking.release()

    def break_off(self) -> None:
        """Whoever waits for workers, in whatever thread, waits no longer: `Halted` is raised there."""
        self._halted = True
        self.interrupts.wake()

    # ---- listening ------------------------------------------------------------------------------------------------

    def listen(self, *, first: bool = False, within: float | None = None) -> None:
        """Wait until some worker speaks, or is gone; file it. `first`: what has arrived goes before a failure.

        `within`: wait so many seconds at most; 0: file what is there.
        """
        if self._failure is None:
            silent = self.silence.patience(self._waited_for())
            waits = [seconds for seconds in (within, silent) if seconds is not None]
            ready = self.transport.wait(min(waits, default=None))
            self.interrupts.let_in()
            if self._halted:
                raise Halted
            for index in ready:
                self._hear(self.workers[index])
            self._check_silence()  # after hearing: whoever has spoken is not silent, however long nobody listened
        if self._failure is not None and not (first and self.arrived):
            raise self._failure

    def _hear(self, worker: WorkerHandle) -> None:
        messages, ended = worker.reached.hear()
        for message in messages:
            worker.busy_since = time.monotonic()
            if message == HELLO:
                continue
            if isinstance(message, Raised):
                self._failure = self._failure or self.at(worker, message.unpack())
                return
            if isinstance(message, RolloutReady):
                self._file(worker, message)
                continue
            call = message.call if isinstance(message, Answer) else FIRST
            if call == worker.asked:  # else the caller was interrupted, and has gone
                worker.asked = None
                worker.inbox.append(message)
                worker.made_at_answer = worker.frames, worker.rollouts
        if not ended:
            return
        if self._restart and self._failure is None and worker.asked is None:
            self._start_again(worker)
        else:
            self._failure = self._failure or self.death(worker)

    def _file(self, worker: WorkerHandle, ready: RolloutReady) -> None:
        worker.working.discard(ready.slot)
        worker.stats = ready.stats
        if ready.episodes is not None:  # the last moment of a rollout is, by our clock, now
            self.episodes.add(ready.episodes, shift=time.perf_counter() - ready.span[1])
        worker.frames, worker.rollouts = worker.frames + ready.frames, worker.rollouts + 1
        self.arrived.append((worker, ready))
        if self.on_rollout is not None:
            self.on_rollout(worker.index, ready.span, frames=ready.frames, version=ready.version)

    def at(self, worker: WorkerHandle, error: ReapError) -> ReapError:
        """An error, with the worker it is of and where that was."""
        return error.at(worker=worker.name, **self.transport.place(worker))

    def death(self, worker: WorkerHandle) -> ReapError:
        """The error for a worker that is gone."""
        return self.at(worker, worker.child.death())

    def _waited_for(self) -> list[tuple[WorkerHandle, float | None]]:
        """Workers, and since when each has been silent."""
        return [(worker, worker.busy_since if worker.busy else None) for worker in self.workers]

    def _check_silence(self) -> None:
        if self._failure is None and (found := self.silence.check(self._waited_for())) is not None:
            self._failure = self.at(*found)

    def look(self) -> None:
        """Raise what went wrong with a worker, if anything has. Does not wait."""
        if self.talking.acquire(blocking=False):  # else somebody listens already
            try:
                self.listen(within=0)
            finally:
                self.talking.release()

    # ---- calls ----------------------------------------------------------------------------------------------------

    def answers(self, workers: Sequence[WorkerHandle], call: int, grace: float = 0.0) -> list[Any]:
        """Wait for what each says to this call."""
        for worker in workers:
            worker.expect_answer(call, grace)
        while not all(worker.inbox for worker in workers):
            self.listen()
        return [worker.inbox.popleft() for worker in workers]

    def call(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Ask workers (by number) something, all at once; they answer between two rollouts."""
        with self.talking, self.interrupts.held():
            self.calls += 1
            workers = [self.workers[w] for w in arguments]
            for worker in workers:
                worker.reached.call(dumps((self.calls, name, tuple(arguments[worker.index])), name))
            answers = [answer.value for answer in self.answers(workers, self.calls)]
        for worker, answer in zip(workers, answers):
            if isinstance(answer, Raised):
                raise answer.unpack().at(worker=worker.name)
        return answers

    def tell(self, name: str, *, wait: bool = True) -> None:
        """Call all workers, and want no answers. `wait`: for another thread that talks to them."""
        with self.interrupts.held():
            if self.talking.acquire(blocking=wait):
                try:
                    self.calls += 1
                    for worker in self.workers:
                        worker.reached.call(dumps((self.calls, name, ()), name))
                finally:
                    self.talking.release()

    def everyone(self, *arguments: Any) -> dict[int, Sequence[Any]]:
        """The same arguments for all workers."""
        return {worker.index: arguments for worker in self.workers}

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def let_be_random(self, frames: int) -> None:
        """So many frames of the run have random actions."""
        self._random = frames
        self.transport.let_be_random(frames)

    def fill(self, worker: WorkerHandle, slot: int) -> None:
        """Give a worker a slot to fill."""
        before, self._given = self._given, self._given + worker.size
        worker.fill(slot, random=before < self._random)

    def count_wanted(self, anew: Sequence[int]) -> None:
        """Count ordered frames again: those of workers that begin `anew` which nobody has taken are not wanted."""
        self._given = 0
        for worker in self.workers:
            without = -self.waiting(worker)[0] if worker.index in anew else len(worker.working) * worker.size
            self._given += worker.frames + without

    def waiting(self, worker: WorkerHandle) -> tuple[int, int]:
        """Frames and rollouts of a worker that nobody has taken yet."""
        found = [ready.frames for other, ready in self.arrived if other is worker]
        return sum(found), len(found)

    def drain(self, within: float | None = None) -> None:
        """Wait for what workers were asked for, so many seconds at most; it is kept until somebody takes it."""
        began, left = time.monotonic(), within
        with self.talking, self.interrupts.held():
            while any(worker.working for worker in self.workers):
                self.listen(within=left)
                left = None if within is None else max(began + within - time.monotonic(), 0)
                if left == 0:
                    raise NotReady(f"workers are still busy after {within} s")


def fresh_entropy() -> int:
    """What a worker's own random numbers begin with, unless it is seeded."""
    return int(np.random.SeedSequence().generate_state(1, np.uint32)[0])
