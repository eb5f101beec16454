"""In the background: who goes on collecting while the learner samples.

    ThreadRunner       a thread takes batch after batch; what is asked of the collector meanwhile is done in between

        asked ──► requests ──► ┌─ serve ─► wait while paused, or the buffer has enough ─► one batch ─┐
                               └─────────────────────────────────────────────────────────────────────┘

    BackgroundRunner   workers go on by themselves; this process has nothing to do (backends/background_runner.py)

What goes wrong is kept until somebody asks. Stopping is bounded: a rollout is broken off after the step it is in.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from reap._system.forks import guard
from reap._system.interrupts import Interrupts
from reap._system.threads import CTRL_C, join
from reap.backends.base import Halted
from reap.backends.local.pauses import AGAIN, Paused, Pauses
from reap.core.capture.chance import beside_the_learner
from reap.errors import NotReady, WorkerRaised, WorkerSilent

T = TypeVar("T")
_LOOK = 0.002  # seconds between looks at a buffer whose limiter has us rest: it may be another process that samples


class Runner(Protocol):
    """Collects in the background."""

    told: bool  # whether its failure has been raised somewhere

    def start(self) -> None:
        """Begin to collect."""

    def pause(self, paused: Paused, timeout: float | None = None) -> None:
        """Rest between two batches while this pause holds; returns when it does. Pauses add up.

        `timeout`: seconds that the batch which is being taken may still take; `NotReady` after that.
        """

    def resume(self, paused: Paused | None = None) -> None:
        """This pause is over, or the last one somebody has; go on, if there is no other."""

    def stop(self, timeout: float) -> None:
        """End, or raise after so many seconds. May be called twice."""

    @property
    def running(self) -> bool:
        """Whether rows are still to come."""

    def paused_without(self, thread: int) -> bool:
        """Return whether it rests until another thread than this one ends its pause."""

    def failure(self) -> Exception | None:
        """Return what went wrong in the background; None if nothing has."""

    def between(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, called between two batches."""


_threads: weakref.WeakSet[ThreadRunner] = weakref.WeakSet()


class ThreadRunner:
    """A thread that calls `turn` until it says that there is no more. It does not keep the collector alive."""

    def __init__(self, turn: Callable[[], bool], *, wanted: Callable[[], bool], break_off: Callable[[], None]) -> None:
        self._turn, self._wanted, self._break_off = weakref.WeakMethod(turn), wanted, break_off
        self._lock = threading.RLock()  # taken by itself: in `with self._change`, Ctrl-C could come when it is
        self._change = threading.Condition(self._lock)
        self._requests: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._pauses, self._interrupts = Pauses(), Interrupts()
        self._resting = self._stopping = self._over = False
        self._failure: Exception | None = None
        self.told = False
        self._thread = threading.Thread(target=self._run, name="reap-collector", daemon=True)
        guard(self)

    def in_fork(self, why: str) -> None:
        """The thread is not here: there is nothing to stop."""
        _threads.discard(self)

    def start(self) -> None:
        atexit.unregister(_stop_all)  # once is enough
        atexit.register(_stop_all)  # a daemon would be cut off in the middle of native code
        _threads.add(self)
        self._thread.start()

    def _run(self) -> None:
        beside_the_learner()
        try:
            while self._next():
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
                self._over = True
                self._change.notify_all()
            self._serve()  # those who asked before they could see that it is over

    def _next(self) -> bool:
        """Do what was asked, then wait until it is time for another batch; False: stop."""
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
                self._change.wait(AGAIN if self._resting else _LOOK)

    def _serve(self) -> None:
        while self._requests:
            work, future = self._requests.popleft()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            with self._change:
                self._change.notify_all()

    def _until(self, true: Callable[[], bool], timeout: float | None = None) -> None:
        """Tell the thread that something is new, and wait until something is true, or raise after `timeout` seconds.

        Ctrl-C is let in now and then: a `Condition` that it breaks off may be left without its lock.
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

    def between(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        with self._lock:
            here = self._over or threading.current_thread() is self._thread
            if not here:
                self._requests.append((work, future))
        if here:
            return work()
        self._until(future.done)
        return future.result()

    def pause(self, paused: Paused, timeout: float | None = None) -> None:
        self._pauses.begin(paused)
        if threading.current_thread() is not self._thread:
            self._until(lambda: self._resting or self._over, timeout)

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
        join(self._thread, timeout, "the collecting thread, whose env is closed when it leaves it,")

    @property
    def running(self) -> bool:
        return not self._over

    def paused_without(self, thread: int) -> bool:
        return self._pauses.hold_without(thread)

    def failure(self) -> Exception | None:
        return self._failure


def ended_by(cause: BaseException, who: str) -> WorkerRaised:
    """Return the error for a thread that was ended by what is no error, as by an env that calls sys.exit()."""
    error = WorkerRaised(f"{who} was ended by {cause!r}")
    error.__cause__ = cause
    return error


def _stop_all() -> None:
    for runner in list(_threads):
        with contextlib.suppress(WorkerSilent):
            runner.stop(1.0)
