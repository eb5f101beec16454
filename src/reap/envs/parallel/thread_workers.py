"""Lanes stepped by threads of this process, one per group: for envs that wait (for a simulator, a socket, a GPU).

Threads share the interpreter: envs that compute in Python step one after another, however many threads there are, and
are better kept in processes. Nor can a thread be ended from outside: an env that raised is rebuilt in its thread, but
one that hangs is reported, and its thread is left behind when the workers are closed.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from reap._system.fork_server.child import wake_in_time
from reap._system.interrupts import Interrupts
from reap._system.processes import DEADLINE, SOON
from reap.core.columns.batch_columns import current_for, layout_by_hand
from reap.core.env import Env
from reap.core.slot import Layout, Row, RowKeys, Slot
from reap.envs.parallel.env_child import (
    DRAW,
    PING,
    REBUILD,
    RESET,
    UNSEEDED,
    Rebuilt,
    RebuiltLanes,
    Traits,
    advance,
    built,
    reset_some,
)
from reap.envs.parallel.lane_workers import LaneWorkers, Makers, joint_spec, joint_traits, lanes_named
from reap.errors import ReapError, SpecMismatch, WorkerSilent, as_raised
from reap.failures import FailurePolicy
from reap.spec import Key, Leaf


class Orders(Protocol):
    """Where a thread waits for orders: order code, lanes (None: all) and a token to answer with; None ends it."""

    def get(self) -> tuple[int, Sequence[int] | None, int] | None: ...

    def put(self, order: Any) -> None: ...


class LaneGroup:
    """One env with the lanes `[first, last)`. It puts its answers into `answers`: number, error or None, token."""

    def __init__(
        self, number: int, makers: Any, limit: int | None, answers: Any, orders: Any, *, rebuild: bool = False
    ) -> None:
        self.number, self.first, self.last = number, 0, 0
        self._makers, self._limit, self.answers = makers, limit, answers
        self.silent = False  # whether it exceeded the timeout: it is no longer waited for
        self.orders: Orders = orders
        self.env: Env
        self.row: Row
        self.into: list[np.ndarray[Any, Any]] = []
        self.seeds = np.zeros(0, np.int64)
        self.action: Mapping[Key, Leaf] = {}  # shapes and dtypes of actions
        self._rebuild = rebuild  # whether envs that raise are rebuilt in their place
        self.rebuilt: RebuiltLanes | None = None  # collects what was rebuilt
        self._begin()

    def _begin(self) -> None:
        """Have the env built by whichever thread will step it, which then answers."""
        raise NotImplementedError

    def _build(self) -> bool:
        """Build the env and answer; returns whether that worked."""
        try:
            self.env = self._build_env()
        except BaseException as error:
            self.answers.put((self.number, _as_exception(error), 0))
            return False
        self.answers.put((self.number, None, 0))
        return True

    def execute(self, order: tuple[int, Sequence[int] | None, int]) -> None:
        """Carry out an order and answer."""
        try:
            if order[0] == REBUILD:
                self._rebuild_env()
            else:
                self._run(self.env, order[0], order[1])
        except self.reraised:
            raise
        except BaseException as error:
            self.answers.put((self.number, _as_exception(error), 0))
        else:
            rebuilt = self.rebuilt
            told = rebuilt.take() if rebuilt is not None and rebuilt.told else None
            self.answers.put((self.number, told, order[2]))

    def _build_env(self) -> Env:
        env = built(self._makers, self._limit)
        self.rebuilt = RebuiltLanes(env) if self._rebuild else None
        return env

    def _rebuild_env(self) -> None:
        """Replace an env that raised by a new one, at the beginning of an episode."""
        env = self.env
        with contextlib.suppress(Exception):  # it has failed already
            env.close()
        new = self._build_env()
        try:
            joint_spec([env.spec, new.spec])
            if new.spec.lanes != env.spec.lanes:
                raise SpecMismatch(f"the rebuilt env has {new.spec.lanes} lanes, not {env.spec.lanes}")
            new.expect(self.action)
            reset_some(new, range(new.spec.lanes), self.into, self.seeds)
        except BaseException:
            new.close()
            raise
        self.env = new

    def _run(self, env: Env, what: int, lanes: Sequence[int] | None) -> None:
        chosen = range(env.spec.lanes) if lanes is None else [lane - self.first for lane in lanes]
        if what == RESET:
            reset_some(env, chosen, self.into, self.seeds)
        elif what == DRAW:
            env.draw(self.row)
        elif what != PING:
            advance(env, chosen, self.row, self.into, self.rebuilt)

    where = ""  # where its lanes are stepped, for errors
    reraised: tuple[type[BaseException], ...] = ()  # exceptions that are raised, not sent as an answer

    @property
    def name(self) -> str:
        return f"of {lanes_named(self.first, self.last)} ({self.where})"

    def stack(self) -> str:
        """Return the current stack of its thread."""
        raise NotImplementedError

    def wait_closed(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until its env is closed; returns whether it is."""
        raise NotImplementedError


class EnvThread(LaneGroup):
    """Lanes in a thread of their own."""

    def _begin(self) -> None:
        self.where = f"thread reap-lanes-{self.number}"
        self.thread = threading.Thread(target=self._live, name=f"reap-lanes-{self.number}", daemon=True)
        self.thread.start()

    def _live(self) -> None:
        wake_in_time()
        if self._build():
            try:
                while (order := self.orders.get()) is not None:
                    self.execute(order)
            finally:
                self.env.close()

    def wait_closed(self, timeout: float) -> bool:
        if self.thread is threading.current_thread():  # a finalizer may run in any thread
            return True
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def stack(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(it has ended)"


class InlineEnv(LaneGroup):
    """Lanes that the calling thread steps at once: for a debugger."""

    where, reraised = "in this process", (KeyboardInterrupt,)
    closed = False

    def _begin(self) -> None:
        self.orders = self
        self._build()

    def put(self, order: Any) -> None:
        """Carry out an order at once; None closes the env."""
        if order is not None:
            self.execute(order)
        elif hasattr(self, "env") and not self.closed:
            self.closed = True
            self.env.close()

    def get(self) -> None:
        """Return None: no thread waits for orders here."""

    def wait_closed(self, timeout: float) -> bool:
        return True

    def stack(self) -> str:
        return "(stepped by the calling thread)"


def _as_exception(error: BaseException) -> Exception:
    """Return what an env raised as an `Exception`, also `SystemExit` and the like: the caller waits for an answer."""
    return error if isinstance(error, Exception) else as_raised("the env raised", error)


class ThreadWorkers(LaneWorkers):
    """Groups of lanes in threads of this process."""

    def __init__(
        self,
        makers: Makers,
        *,
        timeout: float | None = None,
        limit: int | None = None,
        orders: Callable[[int], Orders] = lambda number: queue.SimpleQueue(),
        kind: type[LaneGroup] = EnvThread,
        on_failure: FailurePolicy | None = None,
        rebuild: bool = False,
    ) -> None:
        super().__init__(on_failure)
        self._rebuild = rebuild or self.on_failure.action == "restart"  # whether envs that raise are rebuilt
        self._building = True
        self.timeout = timeout
        self.queue: queue.SimpleQueue[tuple[int, Exception | Rebuilt | None, int]] = queue.SimpleQueue()
        self._action: dict[Key, Leaf] | None = None
        self._row: Row | None = None
        self.threads: list[LaneGroup] = []
        try:
            for n, own in enumerate(makers):  # one after another: circular imports fail when threads run them together
                self._build(n, functools.partial(self._start, n, kind, own, limit, orders(n)))
            self.spec, self.bounds = joint_spec([worker.env.spec for worker in self.threads])
            self.traits = joint_traits([Traits(worker.env.has_after_step, worker.env.draws) for worker in self.threads])
        except BaseException:
            self.close()
            raise
        self.first = current_for(self.spec.observation, self.spec.lanes)
        self._seeds = np.full(self.spec.lanes, UNSEEDED)
        for worker, (first, last) in zip(self.threads, self.bounds):
            worker.first, worker.last = first, last
            worker.into = [array[first:last] for array in self.first]
            worker.seeds = self._seeds[first:last]
        self._building = False

    def _build(self, n: int, start: Callable[[], None]) -> None:
        try:
            start()
        except WorkerSilent:  # its thread is still inside the factory
            raise
        except ReapError as error:
            if self.on_failure.chosen_for(error, building=True) != "restart":
                raise
            self.budget.replace(n, error, start)

    def _start(self, n: int, kind: type[LaneGroup], makers: Any, limit: int | None, orders: Orders) -> None:
        """Start a thread, and wait until its env is built."""
        self._pending[n] = time.monotonic()
        self.threads[n:] = [kind(n, makers, limit, self.queue, orders, rebuild=self._rebuild)]
        self.answered()

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        if self._action == dict(action):
            return
        self._action = None  # until every env has accepted it
        whole = Slot(layout_by_hand(self.spec, action))
        keys = RowKeys(self.spec)
        if self._restarting:
            self.settle()
        for worker in self.threads:
            worker.env.expect(action)
            worker.action = dict(action)
            spec = worker.env.spec
            layout = Layout(whole.layout.columns, 1, spec.lanes, batched=spec.batched, look=spec.look)
            own = Slot(layout, 0, {key: array[:, worker.first : worker.last] for key, array in whole.arrays.items()})
            (worker.row,) = own.cut(keys, worker.into)
        (self._row,) = whole.cut(keys, self.first)
        self._action = dict(action)
        self.expecting = True

    def row(self) -> Row:
        assert self._row is not None
        return self._row

    def _seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        self._seeds[list(lanes)] = UNSEEDED if seeds is None else seeds

    def _order_group(self, group: int, what: int, lanes: Sequence[int] | None) -> None:
        worker = self.threads[group]
        own = None if lanes is None else [lane for lane in lanes if worker.first <= lane < worker.last]
        worker.orders.put((what, own, 0))

    def _ping(self, group: int, token: int) -> None:
        self.threads[group].orders.put((PING, None, token))

    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        answers, found = self.queue, []
        if answers.empty():
            try:
                found.append(answers.get(wait != 0, wait))
            except queue.Empty:
                return []
        found += [answers.get() for _ in range(answers.qsize())]  # this is its only reader
        if self.dropped:  # a dropped thread that hung may answer after all
            found = [one for one in found if self.bounds[one[0]][0] not in self.dropped]
        for group, error, _ in found:
            if isinstance(error, Rebuilt):
                self._count_rebuilt(group, error)
            elif error is not None:
                self._handle_failure(group, self._named(error, self.threads[group]))
        return [(group, token) for group, error, token in found if not isinstance(error, Exception)]

    def _count_rebuilt(self, group: int, rebuilt: Rebuilt) -> None:
        worker = self.threads[group]
        for raised, seconds in rebuilt.told:
            self.budget.count_rebuilt(group, self._named(raised.unpack(), worker), seconds)
        self.cut.update(worker.first + lane for lane in rebuilt.cut)

    def _handle_failure(self, unit: int, error: ReapError) -> None:
        if self._building:
            raise error
        if isinstance(error, WorkerSilent) and self.on_failure.action == "restart":
            why = "a thread cannot be killed, so it cannot be replaced; run envs that may hang"
            error.args = (f"{error.args[0]}\n({why} in processes: backend='multiprocessing')", *error.args[1:])
            raise error
        super()._handle_failure(unit, error)

    def _retire(self, unit: int) -> None:
        if self.on_failure.action == "drop":
            self.threads[unit].orders.put(None)

    def _start_again(self, unit: int) -> None:
        self.threads[unit].orders.put((REBUILD, None, 0))

    @staticmethod
    def _named(raised: Exception, worker: LaneGroup) -> ReapError:
        error = as_raised("the env raised", raised)
        if error.lane is not None:
            error.lane += worker.first
        return error.at(worker=worker.name)

    def _stack_of(self, group: int) -> str:
        return self.threads[group].stack()

    def _silence_of(self, group: int, timeout: float) -> ReapError:
        worker = self.threads[group]
        worker.silent = True
        error = WorkerSilent(f"sent nothing for {timeout:.1f} s (timeout={timeout}); its stack:\n{worker.stack()}")
        return error.at(worker=worker.name)

    def close(self) -> None:
        with Interrupts().held():  # takes a few seconds at most; an interrupt would leave envs open
            self._close()

    def _close(self) -> None:
        threads, self.threads = self.threads, []
        for worker in threads:
            worker.orders.put(None)
        # Where one thread hangs others may too, and the caller waits for the error.
        until = time.monotonic() + (SOON if any(worker.silent for worker in threads) else DEADLINE)
        left = [worker for worker in threads if not worker.wait_closed(max(0.0, until - time.monotonic()))]
        for worker in left:
            warnings.warn(
                f"the thread {worker.name} is still inside its env, and a thread cannot be killed; it keeps "
                f"running, at:\n{worker.stack()}",
                RuntimeWarning,
                stacklevel=3,
            )

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
