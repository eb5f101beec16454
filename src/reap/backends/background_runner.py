"""BackgroundRunner: lets workers write into a buffer on their own until a number of frames is collected.

start   ─► call "run" ─► worker: claim frames ─► rollout ─► write ─► update the shared counters ─► claim …
pause   ─► set the counter `rest`, then call "look" ─► answered between two rollouts: from then on nothing is written
resume  ─► reset that counter and wake the workers, which would also look at it on their own
failure ─► read connections and sentinels without waiting: the next caller finds a failure
watch   ─► a thread checks at intervals whether each worker has moved on, wherever in a rollout it is (a step, postproc,
           writing), and finds those silent that have not, even if nobody calls. It also corrects the counter `rest`:
           whatever Ctrl-C has interrupted, workers rest as long as a pause holds, and no longer
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from reap._system.silence import Silence, frozen_first
from reap.backends.base import Halted
from reap.backends.delivery import NO_LIMIT
from reap.backends.local.pauses import Paused, Pauses
from reap.backends.local.shared_counters import NOWHERE, SharedCounters
from reap.backends.worker_backend import WorkerBackend
from reap.backends.worker_handle import WorkerHandle
from reap.errors import ReapError

_CHECKS, _MIN_PERIOD = 8, 0.01  # checks in the time a worker may be silent; least seconds between two checks
T = TypeVar("T")


class BackgroundRunner:
    """Lets workers run free, without slots. `count` is called with the frames and rollouts that are newly collected."""

    def __init__(
        self,
        backend: WorkerBackend,
        counters: SharedCounters,
        *,
        left: float,
        random: int,
        count: Callable[[int, int], None],
    ) -> None:
        self._backend, self._supervisor, self._counters = backend, backend.supervisor, counters
        self._count_method = weakref.WeakMethod(count)  # must not keep the collector alive
        self._left, self._random = left, random
        self._began = self._counted = counters.made()
        self._claimed_before, self._over, self._pauses = 0, False, Pauses()
        self._lock = threading.RLock()
        self._silence = Silence(self._supervisor.silence.timeout)
        self._positions: dict[int, tuple[tuple[int, int], float]] = {}  # where each worker is, and since when
        self._watch_over = threading.Event()
        watched = weakref.ref(self), self._watch_over, min(max(self._silence.limit / _CHECKS, _MIN_PERIOD), 1.0)
        self._watch = threading.Thread(target=_watch, args=watched, name="reap-watch", daemon=True)
        self._failure: ReapError | None = None
        self._supervisor.catch_up = self.catch_up  # so that a restarted worker continues to count from there
        self._supervisor.on_restarted = self._run_free
        self.error_raised = False

    def _count(self, frames: int, rollouts: int) -> None:
        count = self._count_method()
        if count is not None:
            count(frames, rollouts)

    def start(self) -> None:
        """Wait until workers have finished their pending slots, then let them run free."""
        counters = self._counters
        frames, rollouts = self._backend.settle()
        self._count(frames, rollouts)
        counters.claimed[:] = [worker.frames for worker in self._backend.workers]  # where claims begin
        self._claimed_before = int(counters.claimed.sum())
        counters.stop, counters.random = False, max(self._claimed_before + self._random - frames, 0)
        counters.total = NO_LIMIT if self._left == float("inf") else self._claimed_before + int(self._left) - frames
        self._supervisor.notify_all("run")  # a worker that fails here is found by the next check, as later
        self._watch.start()

    def pause(self, paused: Paused, timeout: float | None = None) -> None:
        """Make workers rest between two rollouts, and return when all do. Pauses add up.

        `timeout` is not used: only remote workers are given one, and they do not run free.
        """
        self._pauses.begin(paused)
        self.apply_pauses()
        self._supervisor.call("look", self._supervisor.everyone())

    def resume(self, paused: Paused | None = None) -> None:
        """End a pause (None: the last one); workers continue if no other pause holds."""
        with self._supervisor.interrupts.held():
            self._pauses.end(paused)
            self.apply_pauses()

    def apply_pauses(self) -> None:
        """Make workers rest if a pause holds, and continue if none does."""
        with self._lock:
            before, self._counters.rest = self._counters.rest, self._pauses.hold
            woken = before and not self._counters.rest
        if woken:
            # `wait=False`: while another thread listens, they look on their own soon.
            self._supervisor.notify_all("look", wait=False)

    def stop(self, timeout: float) -> None:
        """Note that the run is over. Workers end with the backend, and `catch_up` counts their last frames."""
        self.failure()  # finds what was not noticed until now
        self._over = True

    def stop_watching(self) -> None:
        """End the watching thread, before workers end and their handles with them."""
        with self._supervisor.interrupts.held():
            self._watch_over.set()
            if self._watch.is_alive() and self._watch is not threading.current_thread():
                self._supervisor.halt()  # it may be waiting for an answer of a worker that is stuck
                self._watch.join()

    def catch_up(self) -> None:
        """Count what workers have collected since the last call."""
        with self._lock:
            made = self._counters.made()
            new, self._counted = made - self._counted, made
            for worker, frames, rollouts in zip(self._backend.known_workers, *new.tolist()):
                worker.frames, worker.rollouts = worker.frames + frames, worker.rollouts + rollouts
                if rollouts:  # else its stats may be those of its predecessor
                    worker.keep_stats(self._counters.stats(worker.index))
                self._backend.episodes.add(self._counters.take_ended(worker.index), worker.index)
            frames, rollouts = new.sum(1).tolist()
            self._count(frames, rollouts)

    @property
    def running(self) -> bool:
        """Whether there are still frames to collect or to write; brings pauses and counts up to date first."""
        self.apply_pauses()
        self.catch_up()
        claimed, made = int(self._counters.claimed.sum()), int((self._counted - self._began)[0].sum())
        left = claimed < self._counters.total or claimed - self._claimed_before > made
        return left and not self._over and self._failure is None

    def paused_without(self, thread: int) -> bool:
        """Return whether workers rest, and every pause was requested by another thread than `thread`."""
        return self._pauses.hold_without(thread)

    def failure(self) -> ReapError | None:
        """Return the failure of a worker, if there is one."""
        if self._failure is None and not self._over:
            self.catch_up()
            try:
                self._supervisor.poll_failures()
            except Halted:
                pass  # another thread is closing the collector
            except ReapError as error:
                self._failure = error
        return self._failure

    def check_progress(self) -> bool:
        """Find a worker that is stuck in a rollout, from the counters it writes, and handle it like a silent one.

        Return whether to check again later.
        """
        supervisor = self._supervisor
        if supervisor.on_failure.action == "raise":
            if (found := self._silent()) is not None and self._failure is None:
                self._failure = supervisor.at(*found)
        elif supervisor.listen_lock.acquire(blocking=False):  # else another thread listens, and may be replacing one
            try:
                if (found := self._silent()) is not None:
                    self._positions.pop(found[0].index)
                    supervisor.fail(*found)
            finally:
                supervisor.listen_lock.release()
        # Even if nobody calls: failed workers are replaced or dropped, and answers are read that nobody waits for any
        # more because of Ctrl-C. A worker that cannot send its answer would collect nothing.
        self.failure()
        return self._failure is None

    def _silent(self) -> tuple[WorkerHandle, ReapError] | None:
        """Return a worker that has been in the same place for too long, and the error for it."""
        counters, now, workers = self._counters, time.monotonic(), self._backend.workers
        made = counters.made()[0]
        for worker in workers:
            place = int(counters.step[worker.index]), int(made[worker.index])
            if worker.index not in self._positions or self._positions[worker.index][0] != place:
                self._positions[worker.index] = place, now
        return self._silence.check([(worker, self._silent_since(worker)) for worker in frozen_first(workers)])

    def exchange_statistics(self) -> None:
        """Share the running statistics of all envs among the workers, between two of their rollouts."""
        supervisor = self._supervisor
        learns = any(worker.info.learns for worker in supervisor.living)
        if not learns or not self.running:
            return
        with supervisor.uninterrupted():
            if not supervisor.listen_lock.acquire(blocking=False):
                return
            try:
                workers = [worker for worker in supervisor.living if worker.joining is None]
                reports = supervisor.call("statistics", {worker.index: () for worker in workers})
                for index, seen in reports.items():
                    supervisor.statistics.report(index, seen)
                for worker in workers:
                    supervisor.share_statistics(worker)
            except Halted:
                pass  # as in `failure`
            except ReapError as error:
                self._failure = self._failure or error
            finally:
                supervisor.listen_lock.release()

    @property
    def awaits_newcomer(self) -> bool:
        """Whether a restarted worker is joining: its answers should be read soon."""
        return any(worker.joining is not None for worker in self._backend.workers)

    def _run_free(self, worker: WorkerHandle) -> None:
        """Tell a restarted worker to run free, without slots."""
        if not self._over and self._watch.ident:
            self._supervisor.send_call(worker, "run")

    def _silent_since(self, worker: WorkerHandle) -> float | None:
        (step, _), since = self._positions[worker.index]
        return None if step == NOWHERE or worker.child.gone() else since

    def run_between_rollouts(self, work: Callable[[], T]) -> T:
        """Call `work` at once and return its result: workers answer calls between two rollouts anyway."""
        return work()


def _watch(watched: weakref.ref[BackgroundRunner], ended: threading.Event, period: float) -> None:
    """Run the watching thread, which does not keep its runner alive."""
    wait = period
    while not ended.wait(wait):
        runner = watched()
        if runner is None or not runner.check_progress():
            return
        runner.apply_pauses()
        runner.exchange_statistics()
        wait = _MIN_PERIOD if runner.awaits_newcomer else period
        del runner
