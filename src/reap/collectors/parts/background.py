"""Background runners: collect while the learner samples.

    ThreadRunner       a thread takes batch after batch; requests to the collector are served between two batches

        request ──► queue ──► ┌─ serve ─► wait while paused, or the buffer has enough ─► one batch ─┐
                              └─────────────────────────────────────────────────────────────────────┘

    BackgroundRunner   workers collect by themselves; this process has nothing to do (backends/background_runner.py)

A runner keeps its error until the collector calls `failure()`. Stopping is bounded: a rollout is broken off after its
current step.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from reap._system.interrupts import Interrupts
from reap._system.threads import CTRL_C, join, stop_at_exit
from reap.backends.base import Halted
from reap.backends.local.pauses import AGAIN, Paused, Pauses
from reap.core.capture.generator_state import use_own_generator
from reap.errors import NotReady, WorkerRaised

T = TypeVar("T")
_POLL_SECONDS = 0.002  # between checks whether the buffer's limiter lets us write: other processes may sample


class Runner(Protocol):
    """Collects in the background."""

    error_raised: bool  # whether the collector has raised this runner's failure already

    def start(self) -> None:
        """Begin to collect."""

    def pause(self, paused: Paused, timeout: float | None = None) -> None:
        """Rest between two batches while this pause holds; return once resting. Several pauses may hold at a time.

        `timeout`: seconds to wait for the batch that is being taken; raises `NotReady` after that.
        """

    def resume(self, paused: Paused | None = None) -> None:
        """End this pause (None: the last one that a caller holds), and continue if no other pause holds."""

    def stop(self, timeout: float) -> None:
        """Stop collecting; raise if that takes more than `timeout` seconds. May be called twice."""

    @property
    def running(self) -> bool:
        """Whether more rows will come."""

    def paused_without(self, thread: int) -> bool:
        """Return whether the runner rests in pauses that only threads other than this one can end."""

    def failure(self) -> Exception | None:
        """Return the error that ended the run; None if there is none."""

    def run_between_rollouts(self, work: Callable[[], T]) -> T:
        """Call `work` between two batches, and return its result."""


class ThreadRunner:
    """Calls `turn` in a thread until it returns False. The thread does not keep the collector alive."""

    def __init__(self, turn: Callable[[], bool], *, wanted: Callable[[], bool], break_off: Callable[[], None]) -> None:
        self._turn, self._wanted, self._break_off = weakref.WeakMethod(turn), wanted, break_off
        self._lock = threading.RLock()  # of `_change`; taken directly, since Ctrl-C could interrupt `with self._change`
        self._change = threading.Condition(self._lock)
        self._requests: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._pauses, self._interrupts = Pauses(), Interrupts()
        self._resting = self._stopping = self._ended = False
        self._failure: Exception | None = None
        self.error_raised = False
        self._thread = threading.Thread(target=self._run, name="reap-collector", daemon=True)

    def start(self) -> None:
        stop_at_exit(self)
        self._thread.start()

    def _run(self) -> None:
        use_own_generator()
        try:
            while self._wait_for_turn():
                turn = self._turn()
                if turn is None or not turn():
                    break
                del turn
        except Halted:
            pass
        except Exception as error:
            self._failure = error
        except BaseException as cause:
            self._failure = ended_by(cause, "the collecting thread")
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()
            self._serve()  # requests that were queued before `_ended` was set

    def _wait_for_turn(self) -> bool:
        """Serve requests and wait until the next batch is due; return False if the thread must stop."""
        while True:
            self._serve()
            with self._change:
                if self._stopping:
                    return False
                if self._requests:
                    continue
                self._resting = self._pauses.hold
                if not self._resting and self._wanted():
                    return True
                self._change.notify_all()
                self._change.wait(AGAIN if self._resting else _POLL_SECONDS)

    def _serve(self) -> None:
        while self._requests:
            work, future = self._requests.popleft()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            with self._change:
                self._change.notify_all()

    def _wait_until(self, true: Callable[[], bool], timeout: float | None = None) -> None:
        """Wake the thread and wait until `true()`; raise `NotReady` after `timeout` seconds.

        Ctrl-C is raised only between two waits: raised inside `Condition.wait`, it could leave it without its lock.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        with self._interrupts.held():
            while True:
                with self._lock:
                    self._change.notify_all()
                    if true():
                        return
                    if (left := until - time.monotonic()) <= 0:
                        raise NotReady(f"a batch is still being taken after {timeout:g} s")
                    self._change.wait(min(CTRL_C, left))
                self._interrupts.let_in()

    def run_between_rollouts(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        with self._lock:
            here = self._ended or threading.current_thread() is self._thread
            if not here:
                self._requests.append((work, future))
        if here:
            return work()
        self._wait_until(future.done)
        return future.result()

    def pause(self, paused: Paused, timeout: float | None = None) -> None:
        self._pauses.begin(paused)
        if threading.current_thread() is not self._thread:
            self._wait_until(lambda: self._resting or self._ended, timeout)

    def resume(self, paused: Paused | None = None) -> None:
        with self._interrupts.held(), self._lock:
            self._pauses.end(paused)
            self._resting = self._resting and self._pauses.hold
            self._change.notify_all()

    def stop(self, timeout: float) -> None:
        self._stopping = True
        with self._interrupts.held(), self._lock:
            self._change.notify_all()
        self._break_off()
        join(self._thread, timeout, "the collecting thread (which closes its env when it ends)")

    @property
    def running(self) -> bool:
        return not self._ended

    def paused_without(self, thread: int) -> bool:
        return self._pauses.hold_without(thread)

    def failure(self) -> Exception | None:
        return self._failure


def ended_by(cause: BaseException, who: str) -> WorkerRaised:
    """Return the error for a thread that a non-`Exception` ended, such as the SystemExit of an env's sys.exit()."""
    error = WorkerRaised(f"{who} was ended by {cause!r}")
    error.__cause__ = cause
    return error
