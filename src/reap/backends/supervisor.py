"""Supervisor: starts, calls, watches, replaces and ends workers, whatever transport reaches them.

    start ──► all at once ──► each worker reports the layout of its rollouts
    call  ──► a number, a name ──► answer │ raised │ died │ silent
    fill  ──► a slot ──► arrived, in the order in which rollouts come in │ raised │ died │ silent
    close ──► goodbye ──► SIGTERM ──► SIGKILL, within a few deadlines

A worker that died, raised or fell silent has failed. What happens then depends on the `FailurePolicy`:

    raise     the first failure is kept, and the next thread that listens raises it
    restart   launch ──► layout ──► joining: memory, weights, ids ──► the call and slots its predecessor left undone
    drop      the worker receives no more work

Nothing blocks on a worker that joins: its answers are received along with the messages of the others.

One thread at a time listens: it holds `listen_lock`. Ctrl-C is raised only while waiting, when nothing is half done, so
the caller can repeat the call as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reap._system.conversation import Answer
from reap._system.fork_server.client import limits_as_worker_died
from reap._system.interrupts import Interrupts
from reap._system.messages.pickling import dumps
from reap._system.messages.remote_errors import Raised
from reap._system.processes import BOOT, LEAVE
from reap._system.silence import Silence
from reap._system.threads import LINGER, run_shutdown
from reap._system.worker_log import record
from reap.backends.base import Halted, Transport
from reap.backends.worker_handle import WorkerHandle
from reap.backends.worker_server import HELLO, EnvRebuilt, Job, RolloutReady
from reap.core.measuring.episode_log import EpisodeLog
from reap.core.measuring.moments import StatisticsPool
from reap.errors import NotReady, ReapError, SpecMismatch, UsageError, WorkerDied
from reap.failures import FailurePolicy, RestartBudget, WorkerFailure, refused
from reap.seeding import fresh_seed

OnAnswer = Callable[[WorkerHandle, Any], None]
UNREQUESTED = 0  # stands for the call number of a worker's `WorkerInfo`, which answers no call


class _Reports(threading.local):
    """Calls `on_restart` with the failures that a thread has found, after the outermost operation of that thread.

    The function may use the collector, and none of its operations can begin in the middle of another one.
    """

    def __init__(self, tell: Callable[[WorkerFailure], object] | None) -> None:
        self._tell, self._operations = tell, 0
        self.found: deque[WorkerFailure] = deque()

    @contextlib.contextmanager
    def afterwards(self) -> Iterator[None]:
        """Report failures after the block. After Ctrl-C they are reported by the next operation."""
        raised = None
        self._operations += 1
        try:
            yield
        except ReapError as error:
            raised = error
        finally:
            self._operations -= 1
        while self.found and not self._operations:
            failure = self.found.popleft()
            if self._tell is not None:
                self._tell(failure)
        if raised is not None:
            raise raised


class Supervisor:
    """Starts, calls and watches the workers behind one transport.

    `calls_for_newcomer(worker)` yields the name and arguments of each call that brings a restarted worker up to date.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float | None = None,
        on_failure: FailurePolicy | None = None,
        calls_for_newcomer: Callable[[WorkerHandle], Iterator[tuple[str, Sequence[Any]]]] | None = None,
    ) -> None:
        policy = on_failure or FailurePolicy()
        self._reports = reports = _Reports(policy.on_restart)
        self.on_failure = replace(policy, on_restart=lambda failure: reports.found.append(failure))
        self.transport = transport
        self._calls_for_newcomer = None if calls_for_newcomer is None else weakref.WeakMethod(calls_for_newcomer)
        self._budget = RestartBudget(self.on_failure)
        self._causes: dict[int, ReapError] = {}  # why each worker whose replacement is starting had failed
        # Replacements that are not launched yet, each with the failure before the last one in its place, if there was.
        self._to_launch: deque[tuple[WorkerHandle, ReapError | None]] = deque()
        self.on_restarted: Callable[[WorkerHandle], None] | None = None  # called with each worker that was restarted
        self.catch_up: Callable[[], None] | None = None  # adds up what free-running workers have collected
        self.silence = Silence(timeout)
        self.workers: list[WorkerHandle] = []
        self.former: list[WorkerHandle] = []  # the workers it had, after `close`
        self.arrived: deque[tuple[WorkerHandle, RolloutReady]] = deque()  # rollouts that were not taken yet
        self.episodes = EpisodeLog()
        self.statistics = StatisticsPool()  # running statistics of the workers' envs
        self.on_rollout: Callable[..., None] | None = None  # called with each rollout that arrives
        self.calls = 0  # the number of the last call
        self._on_answer: OnAnswer | None = None  # called with each answer to the last call as it arrives
        self.interrupts = Interrupts()
        self.listen_lock = threading.RLock()  # one thread at a time listens
        self._random_frames = 0  # the first frames of the run that have random actions
        self._frames_ordered = 0  # in this run so far
        self._failure: ReapError | None = None  # the first failure that was not handled
        self._opened = self._halted = False
        self._owner = os.getpid()

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self, jobs: Sequence[Job]) -> list[WorkerHandle]:
        """Start workers all at once, and return them when each has reported its `WorkerInfo`."""
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
        if self.on_failure.action != "restart":
            for worker in new:
                worker.job = None  # this also closes our duplicates of the file descriptors in it
        for index, info in self.await_answers(new, UNREQUESTED, grace=BOOT).items():
            self.workers[index].info = info
            self._started(self.workers[index])
        return new

    def _started(self, worker: WorkerHandle) -> None:
        layout = worker.info.layout
        lanes = worker.info.lanes
        what = f"{lanes} lane{'s' * (lanes > 1)}"
        record("start", worker.name, "worker %s is ready: %s, rollouts of %d steps", worker.name, what, layout.steps)

    @property
    def restarts(self) -> int:
        """How many times a worker was restarted."""
        return self._budget.count

    @property
    def failed(self) -> bool:
        """Whether there was a failure that no restart and no drop has handled."""
        return self._failure is not None

    @property
    def living(self) -> list[WorkerHandle]:
        """The workers that were not dropped."""
        return [worker for worker in self.workers if not worker.dropped]

    def change_jobs(self, **changes: Any) -> None:
        """Change these fields in the jobs from which workers are restarted."""
        for worker in self.workers:
            if worker.job is not None:
                worker.job = replace(worker.job, **changes)

    def close(self, *, failed: bool = False) -> None:
        """End all workers within a few deadlines. `failed`: an error is about to be raised; a thread may do it."""
        if self._owner != os.getpid():
            return  # a fork of the process that owns the workers
        with self.interrupts.held():  # a few seconds at most; an interrupt would leave workers running
            alone = self.listen_lock.acquire(blocking=False)
            if not alone:  # another thread waits for workers: it must leave before the transport is closed
                self.halt()
                alone = self.listen_lock.acquire(timeout=LEAVE)
            try:
                workers, self.workers = self.workers, []
                self.former = workers or self.former
                run_shutdown(functools.partial(self.transport.close, workers), LINGER if failed else None)
                for worker in workers:
                    if worker.connection is not None and not worker.dropped:
                        record("end", str(worker.index), "worker %d was ended", worker.index)
                self.interrupts.close()
            finally:
                if alone:
                    self.listen_lock.release()

    def halt(self) -> None:
        """Make the thread that waits for workers, if any, stop waiting and raise `Halted`."""
        self._halted = True
        self.interrupts.wake()

    # ---- listening ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold Ctrl-C back within the block. Failures are reported after it."""
        with self._reports.afterwards(), self.interrupts.held():
            yield

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Let only this thread listen within the block, and hold Ctrl-C back. Failures are reported after it."""
        with self._reports.afterwards(), self.listen_lock, self.interrupts.held():
            yield

    def listen(self, *, rollouts_first: bool = False, within: float | None = None) -> None:
        """Wait until a worker has sent something or is gone, and process its messages.

        `rollouts_first`: raise no failure while there are rollouts to take. `within`: the most seconds to wait; 0 does
        not wait.
        """
        if self._failure is None:
            self._launch_replacements()
        if self._failure is None:
            silent = self.silence.patience(self._silent_since())
            waits = [seconds for seconds in (within, silent) if seconds is not None]
            ready = self.transport.wait(min(waits, default=None))
            self.interrupts.let_in()
            if self._halted:
                raise Halted
            for index in ready:
                if not self.workers[index].dropped:
                    self._receive(self.workers[index])
            self._check_silence()  # last: a worker that has sent something is not silent, however late it is read
        if self._failure is not None and not (rollouts_first and self.arrived):
            raise self._failure

    def _receive(self, worker: WorkerHandle) -> None:
        connection = worker.live_connection
        messages, ended = connection.receive()
        for message in messages:
            worker.busy_since = time.monotonic()
            if message == HELLO:
                continue
            if isinstance(message, EnvRebuilt):
                self._count_rebuilt(worker, message)
                continue
            if isinstance(message, Raised):
                self.fail(worker, message.unpack())
                return
            if isinstance(message, RolloutReady):
                self._record_rollout(worker, message)
                continue
            call, value = (message.call, message.value) if isinstance(message, Answer) else (UNREQUESTED, message)
            if worker.joining is not None:
                self._continue_joining(worker, value)
            elif call == worker.pending_call:  # else the call was interrupted, and nobody waits for the answer
                worker.answered(message)
                if call != UNREQUESTED and self._on_answer is not None and not isinstance(value, Raised):
                    self._on_answer(worker, value)
            if worker.live_connection is not connection:
                return  # it has failed while joining, and was launched again
        if ended and worker.live_connection is connection:
            self.fail(worker, worker.child.death())

    def _record_rollout(self, worker: WorkerHandle, ready: RolloutReady) -> None:
        worker.pending_slots.pop(ready.slot, None)
        worker.keep_stats(ready.stats)
        worker.state_after = ready.state_after
        if ready.statistics is not None:
            self.statistics.report(worker.index, ready.statistics)
        if ready.episodes is not None:
            # By our clock the rollout has ended now or earlier: the smallest of these differences is the best estimate.
            worker.clock_behind = min(worker.clock_behind, time.perf_counter() - ready.span[1])
            self.episodes.add(ready.episodes, worker.index, shift=worker.clock_behind)
        worker.frames, worker.rollouts = worker.frames + ready.frames, worker.rollouts + 1
        self.arrived.append((worker, ready))
        if self.on_rollout is not None:
            self.on_rollout(worker.index, ready.span, frames=ready.frames, version=ready.version)

    def at(self, worker: WorkerHandle, error: ReapError) -> ReapError:
        """Return an error with its worker's name and position added."""
        return error.at(worker=worker.name, **self.transport.position(worker))

    def _silent_since(self) -> list[tuple[WorkerHandle, float | None]]:
        """Return workers, each with the time since when it has been silent; None: nothing is expected of it."""
        return [(worker, worker.busy_since if worker.busy else None) for worker in self.workers]

    def _check_silence(self) -> None:
        if self._failure is None and (found := self.silence.check(self._silent_since())) is not None:
            self.fail(*found)

    def poll_failures(self) -> None:
        """Raise the failure of a worker, if there is one. Does not wait."""
        with self.uninterrupted():  # an interrupt would lose a message that is half read
            if self.listen_lock.acquire(blocking=False):  # else another thread listens already
                try:
                    self.listen(within=0)
                finally:
                    self.listen_lock.release()

    # ---- failures -------------------------------------------------------------------------------------------------

    def fail(self, worker: WorkerHandle, error: ReapError) -> None:
        """Handle a failed worker: replace it, drop it, or keep the error, which the next thread that listens raises."""
        error = self.at(worker, error)
        record("death", worker.name, "%s", str(error).partition("\n")[0])
        building = not worker.begun or worker.joining is not None
        action = self.on_failure.chosen_for(error, building=building, replaces=worker.restarts > 0)
        if self._failure is not None or action == "raise" or self._halted:
            self._failure = self._failure or error
        elif action == "drop":
            # Frames with random actions that other workers must collect.
            lost = sum(worker.pending_slots.values()) * worker.size
            self._frames_ordered = min(self._frames_ordered, self._random_frames) - lost
            worker.drop()
            self.statistics.retire(worker.index)
            self._end(worker)
            self.on_failure.report(WorkerFailure(worker.index, error, "drop", self.restarts, 0.0))
            if not self.living:
                self._failure = error
        elif (why := self._budget.spend(worker.failed_starts)) is None:
            self._restart(worker, error)
        else:
            self._failure = refused(error, why)

    def _end(self, worker: WorkerHandle) -> None:
        """End what is left of a worker, and release the frames it had claimed."""
        self.transport.retire(worker)
        if self.catch_up is not None:
            self.catch_up()
        self.transport.release_claims(worker)

    def _count_rebuilt(self, worker: WorkerHandle, rebuilt: EnvRebuilt) -> None:
        """Count an env that a worker has rebuilt; too many of them are a failure."""
        try:
            self._budget.count_rebuilt(worker.index, self.at(worker, rebuilt.cause.unpack()), rebuilt.seconds)
        except ReapError as error:
            self._failure = self._failure or error

    def _restart(self, worker: WorkerHandle, error: ReapError) -> None:
        """Launch a replacement for a worker. It joins while the other workers continue.

        1. `fail` notices the failure, and asks the `FailurePolicy` and the `RestartBudget`.
        2. `_restart` ends what is left of the worker, and begins `_join`, which awaits its successor's messages.
        3. `_launch_replacements` launches the successor. Until 7, what it sends comes through `_receive` to
           `_continue_joining`, which passes it on to `_join`; if it fails meanwhile, all this begins again.
        4. Its `WorkerInfo` arrives: `_join` compares the layout of its rollouts with its predecessor's.
        5. If that had begun, `_join` sends the first of the `calls_for_newcomer`: memory, state, seed, weights.
        6. Each answer makes `_join` send the next one.
        7. After the last answer, `_finish_joining` calls `WorkerHandle.resend_pending`: the call and the slots that the
           predecessor left undone. The user's `on_restart` is called when the operation that listened has ended.
        """
        if worker.joining is None:
            worker.failed_at = time.monotonic()
        worker.failed_starts += 1
        earlier, self._causes[worker.index] = self._causes.get(worker.index), error
        if worker.job is not None:
            worker.job = replace(worker.job, entropy=fresh_seed(), restarts=worker.restarts + 1)
        if not worker.can_resume:  # else its replacement loads what its env had seen, and reports that again
            self.statistics.retire(worker.index)
        self._end(worker)
        worker.joining = self._join(worker)
        next(worker.joining)
        self._to_launch.append((worker, earlier))
        self._launch_replacements()

    def _launch_replacements(self) -> None:
        """Launch the replacements that are due. If Ctrl-C breaks a launch off, the next call repeats it."""
        while self._to_launch and self._failure is None:
            worker, earlier = self._to_launch[0]
            try:
                with limits_as_worker_died("its replacement"):
                    self.transport.launch([worker])
            except WorkerDied as again:  # it could not be started, or died before it could be asked anything
                self._to_launch.popleft()
                self.fail(worker, again)
                continue
            except (ConnectionError, ReapError) as why:  # nothing is left that could start one
                error = self._causes[worker.index]
                self._failure = self.at(worker, WorkerDied(f"{error.args[0] if error.args else error}; {why}"))
                self._failure.__cause__ = earlier or error
                return
            self._to_launch.popleft()
            worker.busy_since = time.monotonic() + self.transport.startup_grace

    def _join(self, worker: WorkerHandle) -> Generator[None, Any, None]:
        """Bring a newcomer up to date, one call at a time: each `yield` receives the answer to the last call."""
        info = yield
        if worker.begun and not info.layout.same_as(worker.info.layout):
            raise SpecMismatch(f"worker {worker.index} was restarted, but its rollouts now have a different layout")
        worker.info = info
        calls = None if self._calls_for_newcomer is None else self._calls_for_newcomer()
        if worker.begun and calls is not None:
            for name, arguments in calls(worker):
                self.send_call(worker, name, *arguments)
                yield

    def _continue_joining(self, worker: WorkerHandle, answer: Any) -> None:
        if isinstance(answer, Raised):
            self.fail(worker, answer.unpack())
            return
        assert worker.joining is not None
        try:
            worker.joining.send(answer)
        except SpecMismatch as error:
            self._failure = self._failure or self.at(worker, error)
        except StopIteration:
            self._finish_joining(worker)

    def _finish_joining(self, worker: WorkerHandle) -> None:
        """Give a restarted worker that is up to date now its pending work, and report the restart."""
        if worker.pending_call == UNREQUESTED:  # `start` waits for its `WorkerInfo`
            worker.answered(worker.info)
        else:
            self._started(worker)
        worker.failed_starts = 0
        worker.resend_pending()
        if self.on_restarted is not None:
            self.on_restarted(worker)
        seconds, cause = time.monotonic() - worker.failed_at, self._causes.pop(worker.index)
        self.on_failure.report(WorkerFailure(worker.index, cause, "restart", self.restarts, seconds))

    def wait_until_loaded(self, workers: Sequence[int]) -> None:
        """Wait until these workers have loaded what they were sent: in a restart, or a call that Ctrl-C broke off."""
        each = [self.workers[w] for w in workers]
        while any(worker.joining is not None or worker.pending_call is not None for worker in each):
            self.listen()

    # ---- calls ----------------------------------------------------------------------------------------------------

    def await_answers(self, workers: Sequence[WorkerHandle], call: int, grace: float = 0.0) -> dict[int, Any]:
        """Expect an answer of each worker to this call, wait for all, and return them by worker number.

        They are `Answer`s; for `UNREQUESTED`, `WorkerInfo`s.
        """
        for worker in workers:
            worker.expect_answer(call, grace)
        while not all(worker.inbox or worker.dropped for worker in workers):
            self.listen()
        return {worker.index: worker.inbox.popleft() for worker in workers if not worker.dropped}

    def call(
        self, name: str, arguments: Mapping[int, Sequence[Any]], on_answer: OnAnswer | None = None
    ) -> dict[int, Any]:
        """Call workers (by number) all at once; they answer between two rollouts.

        Return their answers by number. Workers that are dropped, before or meanwhile, give none. `on_answer` is called
        with each answer as it arrives: a worker may fail, and its replacement depend on it, before all have answered.
        """
        with self.listening():
            self.calls += 1
            self._on_answer = on_answer
            workers = [self.workers[w] for w in arguments if not self.workers[w].dropped]
            for worker in workers:
                worker.call(dumps((self.calls, name, tuple(arguments[worker.index])), name))
            answers = {index: answer.value for index, answer in self.await_answers(workers, self.calls).items()}
            names = {worker.index: worker.name for worker in workers}
        for index, answer in answers.items():
            if isinstance(answer, Raised):
                raise answer.unpack().at(worker=names[index])
        return answers

    def notify_all(self, name: str, *, wait: bool = True) -> None:
        """Call all workers without waiting for answers. `wait`: wait for a listening thread; else skip the call."""
        with self.interrupts.held():
            if self.listen_lock.acquire(blocking=wait):
                try:
                    for worker in self.living:
                        if worker.joining is None:
                            self.send_call(worker, name)
                finally:
                    self.listen_lock.release()

    def send_call(self, worker: WorkerHandle, name: str, *arguments: Any) -> None:
        """Send one worker a call without waiting for the answer."""
        self.calls += 1
        worker.live_connection.call(dumps((self.calls, name, arguments), name))

    def check_numbers(self, workers: Sequence[int]) -> Sequence[int]:
        """Return these numbers, or raise `UsageError` if one of them is no worker's."""
        if unknown := [w for w in workers if not 0 <= w < len(self.workers)]:
            raise UsageError(f"there is no worker {unknown[0]}; the workers are 0 to {len(self.workers) - 1}")
        return workers

    def everyone(self, *arguments: Any) -> dict[int, Sequence[Any]]:
        """Return a dict with the same arguments for each worker that was not dropped."""
        return {worker.index: arguments for worker in self.living}

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def set_random_frames(self, frames: int) -> None:
        """Collect the first `frames` frames of the run with random actions."""
        self._random_frames = frames
        self.transport.set_random_frames(frames)

    def fill(self, worker: WorkerHandle, slot: int) -> None:
        """Give a worker a slot to fill. A dropped worker gets none: its last rollouts may still be taken later."""
        if worker.dropped:
            return
        self.share_statistics(worker)
        before, self._frames_ordered = self._frames_ordered, self._frames_ordered + worker.size
        worker.fill(slot, random=before < self._random_frames)

    def share_statistics(self, worker: WorkerHandle) -> None:
        """Send a worker the running statistics of the other envs, if they are new to it. Wait for no answer."""
        pool = self.statistics
        if pool.version > worker.statistics_sent and worker.joining is None:
            worker.statistics_sent = pool.version
            self.send_call(worker, "hear_statistics", pool.for_worker(worker.index))

    def recount_ordered(self, restarting: Sequence[int]) -> None:
        """Recount the ordered frames, without the frames not yet taken of workers in `restarting`."""
        self._frames_ordered = 0
        for worker in self.workers:
            extra = -self.waiting(worker)[0] if worker.index in restarting else len(worker.pending_slots) * worker.size
            self._frames_ordered += worker.frames + extra

    def waiting(self, worker: WorkerHandle) -> tuple[int, int]:
        """Return the number of frames and rollouts of a worker that were not taken yet."""
        found = [ready.frames for other, ready in self.arrived if other is worker]
        return sum(found), len(found)

    def drain(self, within: float | None = None) -> None:
        """Wait up to `within` seconds until workers have finished their slots; the rollouts stay in `arrived`."""
        began, left, listened = time.monotonic(), within, False
        with self.listening():
            while any(worker.pending_slots for worker in self.living):
                if within is not None and left == 0 and listened:
                    raise NotReady(f"workers are still busy after {round(within, 2):g} s")
                self.listen(within=left)
                listened = True
                left = None if within is None else max(began + within - time.monotonic(), 0)
