"""Closing while others wait, and closing after a failure: who waits is told at once, in reap's words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedSyncCollector, RPCSyncCollector
from reap.envs import AsyncEnvPool, ParallelEnv, SerialEnv
from reap.envs.parallel.env_child import STEP_SOME
from reap.errors import WorkerRaised, WorkerSilent, WrongState
from reap.testing import CountingEnv, EchoPolicy, no_leaks
from tests.worlds.faults import (
    BOUND,
    KINDS,
    ClosesWhenLet,
    RaisesThen,
    Stuck,
    alive,
    all_gone,
    collect,
    faulty,
    healthy,
    pids,
    within,
)
from tests.worlds.waiting import until

pytestmark = pytest.mark.timeout(60)


class Waiting(CountingEnv):
    """Takes a step when it is let: writes to a pipe that it is there, reads from another that it may."""

    def __init__(self, there, may, lane=0):
        super().__init__((3, 1, 5), lane)
        self.there, self.may = there, may

    def step(self, action):
        with open(self.there, "w"):
            pass
        with open(self.may):
            pass
        return super().step(action)


@pytest.fixture
def waiting(tmp_path):
    """An env that waits in its first step, and a call that returns when it does."""
    there, may = tmp_path / "there", tmp_path / "may"
    for path in (there, may):
        os.mkfifo(path)
    return lambda: Waiting(str(there), str(may)), lambda: open(there).close()


WAITERS = {
    "next": lambda c: c.next(),
    "iterate": lambda c: list(c),
    "rollout": lambda c: c.rollout(),
}


@pytest.mark.parametrize(("kind", "use"), [(KINDS[0], "next"), (KINDS[1], "iterate"), (KINDS[0], "rollout")])
def test_who_waits_while_another_thread_closes_is_told_so(kind, use, waiting):
    make, until_it_waits = waiting
    with no_leaks():
        others = [] if use == "iterate" else [healthy(1)]  # between two batches of another's the iteration just ends
        c, errors = collect(kind, [make, *others]), []

        def wait():
            try:
                WAITERS[use](c)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until_it_waits()
        with within(BOUND):
            c.shutdown()
        thread.join()
        (error,) = errors
        assert isinstance(error, WrongState)
        assert "closed" in str(error)
        assert "shutdown() was called" in str(error)
        c = error = None
        errors.clear()


def test_who_waits_for_lanes_while_another_thread_closes_is_told_so(waiting):
    make, until_it_waits = waiting
    with no_leaks():
        c, errors = Collector(ParallelEnv(1, make), EchoPolicy(), frames_per_batch=8), []

        def wait():
            try:
                c.next()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until_it_waits()
        c.shutdown()
        thread.join()
        assert [type(error) for error in errors] == [WrongState]
        c = None
        errors.clear()


class InSteps(CountingEnv):
    """Says when it is in a step, and waits there until it is let go on; notes what is done to it meanwhile."""

    def __init__(self):
        super().__init__((3, 1, 5), 0)
        self.there, self.may, self.inside = threading.Event(), threading.Event(), False
        self.steps, self.closed_inside, self.closed = 0, False, threading.Event()

    def step(self, action):
        self.inside, self.steps = True, self.steps + 1
        self.there.set()
        until(self.may.is_set)  # a signal that comes just before a wait for a lock is not heard until it ends
        self.inside = False
        return super().step(action)

    def close(self):
        self.closed_inside = self.closed_inside or self.inside
        self.closed.set()


def in_a_thread(work):
    """The thread, and a list for what is raised or returned there."""
    found = []

    def run():
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("use", WAITERS)
def test_a_rollout_in_this_process_is_broken_off_after_the_step_it_is_in(use, lanes):
    """By another thread that closes: no batch comes of it, and the env is closed when nobody is in it any more."""
    envs = [InSteps() for _ in range(lanes)]
    for env in envs[1:]:
        env.may.set()
    c = Collector(SerialEnv(lanes, [lambda env=env: env for env in envs]), EchoPolicy(), frames_per_batch=80)
    waits, found = in_a_thread(lambda: WAITERS[use](c))
    envs[0].there.wait()
    closes, raised = in_a_thread(c.shutdown)
    until(lambda: c.closed)
    envs[0].may.set()
    closes.join()
    waits.join()
    assert raised == [None]
    assert [type(one) for one in found] == [WrongState]
    assert "shutdown() was called" in str(found[0])
    assert envs[0].steps == 1
    assert all(env.closed.is_set() and not env.closed_inside for env in envs)


def test_a_step_that_does_not_end_keeps_its_env_until_it_does():
    env = InSteps()
    c = Collector(lambda: env, EchoPolicy(), frames_per_batch=8)
    waits, found = in_a_thread(c.next)
    env.there.wait()
    with pytest.raises(WorkerSilent, match=r"did not leave (.|\n)*in step"):
        c.shutdown(timeout=0.1)
    assert c.closed
    assert not env.closed.is_set()
    env.may.set()
    waits.join()
    assert [type(one) for one in found] == [WrongState]
    assert env.closed.is_set()
    assert not env.closed_inside


def test_a_signal_handler_that_closes_is_not_in_the_way_of_the_step_it_interrupts():
    env = InSteps()
    c = Collector(lambda: env, EchoPolicy(), frames_per_batch=8)
    main = threading.main_thread().ident

    def close(*_):
        c.shutdown()
        env.may.set()

    before = signal.signal(signal.SIGUSR2, close)

    def tell():
        env.there.wait()
        signal.pthread_kill(main, signal.SIGUSR2)

    thread = threading.Thread(target=tell)
    try:
        thread.start()
        with pytest.raises(WrongState, match=r"shutdown\(\) was called"):
            c.next()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert env.closed.is_set()
    assert not env.closed_inside
    assert env.steps == 1


def test_a_signal_handler_may_close(waiting):
    """As scripts do that want to end in order when they are told to."""
    make, until_it_waits = waiting
    c = collect(MultiSyncCollector, [make])
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGUSR2, lambda *_: c.shutdown())

    def tell():
        until_it_waits()
        signal.pthread_kill(main, signal.SIGUSR2)

    thread = threading.Thread(target=tell)
    try:
        thread.start()
        with within(BOUND), pytest.raises(WrongState, match=r"shutdown\(\) was called"):
            c.next()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_an_endless_collector_is_true(kind):
    makers = CountingEnv if kind is Collector else [CountingEnv]
    with kind(makers, EchoPolicy(), frames_per_batch=8, total_frames=-1) as c:
        assert c
        with pytest.raises(TypeError):
            len(c)


class SlowToClose(CountingEnv):
    """Takes its time to close; says so when it has."""

    def __init__(self, note, seconds):
        super().__init__((3, 1, 5), 0)
        self.note, self.seconds = note, seconds

    def close(self):
        time.sleep(self.seconds)
        self.note.touch()


@pytest.fixture(scope="module")
def a_first_of_each():
    """Torch keeps a pipe of the first store, and descriptors of the first agent, for the rest of the process."""
    for kind in (DistributedSyncCollector, RPCSyncCollector):
        collect(kind, [healthy()]).shutdown()


@pytest.mark.parametrize("kind", [MultiSyncCollector, ParallelEnv, DistributedSyncCollector, RPCSyncCollector])
@pytest.mark.parametrize("beside", [pytest.param("deaf", marks=pytest.mark.slow), "slow"])
def test_an_error_does_not_wait_for_others_to_close(kind, beside, tmp_path, a_first_of_each):
    """It comes while the other process is still there; that is closed after, and `shutdown` waits for it."""
    other = faulty("deaf", where="close") if beside == "deaf" else lambda: ClosesWhenLet(tmp_path)
    makers = [other, faulty("raise", at=2)]
    env = None
    with no_leaks():
        if kind is ParallelEnv:
            env = ParallelEnv(2, makers)
            workers = [process.child.pid for process in env.lanes_env.processes]
            c = Collector(env, EchoPolicy(), frames_per_batch=8)
        else:
            c = collect(kind, makers)
            workers = pids(c)
        with pytest.raises(WorkerRaised, match="an injected fault"), c:
            c.next()
        assert alive(workers[0]), "the error came after it had ended"
        assert c.closed
        (tmp_path / "may").touch()
        c.shutdown()
        assert all_gone(workers, 0)
        assert (tmp_path / "closed").exists() == (beside == "slow")
        c = env = None


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["deaf", "stop"])
@pytest.mark.parametrize("kind", [*KINDS, DistributedSyncCollector, RPCSyncCollector])
def test_an_error_does_not_wait_for_one_that_is_stuck(kind, fault, tmp_path, a_first_of_each):
    """One that is stopped is woken to be ended; one that is deaf is killed after a while."""
    with no_leaks():
        note = tmp_path / "stuck"
        c = collect(kind, [lambda: Stuck(note, fault), lambda: RaisesThen(note)])
        workers = pids(c)
        with pytest.raises(WorkerRaised, match="an injected fault"):
            while True:
                c.next()
        assert fault == "stop" or alive(workers[0]), "the error came after it had ended"
        with within(2.0 if fault == "stop" else BOUND):
            c.shutdown()
        assert all_gone(workers, 0)
        c = None


def test_closing_an_env_is_not_interrupted(tmp_path):
    """Workers are told to go by the end of their connection and by a signal, which does not break off the closing."""
    notes = [tmp_path / str(n) for n in range(4)]
    collect(MultiSyncCollector, [lambda note=note: SlowToClose(note, 0.05) for note in notes]).shutdown()
    assert all(note.exists() for note in notes)


class Locking(CountingEnv):
    """Takes a lock that others know, for a part of each step; and says when it has it."""

    def __init__(self, lock, has_it, stuck=False):
        super().__init__((3, 1, 5), 0)
        self.lock, self.has_it, self.stuck = lock, has_it, stuck

    def step(self, action):
        self.lock.acquire()
        self.has_it.release()
        time.sleep(60 if self.stuck else 0.002)
        self.lock.release()
        return super().step(action)


def taken_in_a_step(lock, stuck=False):
    """A semaphore that says how often a lock was taken, and an env that takes it."""
    has_it = multiprocessing.get_context("spawn").Semaphore(0)
    return has_it, lambda: Locking(lock, has_it, stuck)


def test_a_step_ends_before_its_worker_does():
    """The env is in the middle of a step, with a lock: after an ordinary shutdown nobody has it."""
    for _ in range(4):
        locks = [multiprocessing.get_context("spawn").Lock() for _ in range(5)]
        said, envs = zip(*[taken_in_a_step(lock) for lock in locks])
        c = collect(MultiAsyncCollector, list(envs))
        c.next()
        for has_it in said:
            assert has_it.acquire(timeout=10)
        c.shutdown()
        for lock in locks:
            assert lock.acquire(timeout=1), "a worker has taken its lock with it"


def test_a_step_ends_before_the_process_of_its_lane_does():
    lock = multiprocessing.get_context("spawn").Lock()
    has_it, env = taken_in_a_step(lock)
    with collect(Collector, ParallelEnv(1, env)) as c:
        c.next()
        while has_it.acquire(block=False):
            pass
        c.env.send(range(1), c.env.shared_row())
        assert has_it.acquire(timeout=10)
    assert lock.acquire(timeout=1), "the process has taken the lock with it"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_does_not_end_is_broken_off(kind):
    lock = multiprocessing.get_context("spawn").Lock()
    has_it, env = taken_in_a_step(lock, stuck=True)
    c = collect(kind, [env], timeout=30)
    told = []

    def wait():
        try:
            c.next()
        except WrongState as error:
            told.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    assert has_it.acquire(timeout=10)
    workers = pids(c)
    with within(BOUND):
        c.shutdown()
    waits.join()
    assert told
    assert all_gone(workers, 0)


def test_an_order_that_is_read_when_all_end_is_dropped_silently(capfd):
    def slow():
        from reap.testing import CountingEnv

        class Slow(CountingEnv):
            def step(self, action):
                time.sleep(0.3)  # its process is told to end meanwhile
                return super().step(action)

        return Slow((50,), 0)

    pool = AsyncEnvPool([slow] * 2, backend="multiprocessing", envs_per_worker=2, worker_threads=True)
    first = pool.reset()
    pool.async_step_send(first.set("action", torch.zeros(2, 1)))
    pool._lane_workers.order([0], STEP_SOME, [0])  # another, which waits in the pipe
    pool.close()
    assert "Traceback" not in capfd.readouterr().err
