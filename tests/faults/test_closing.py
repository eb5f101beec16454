"""Closing while others wait, and closing after a failure: who waits is told at once, in reap's words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import ParallelEnv
from reap.errors import WorkerRaised, WrongState
from reap.testing import CountingEnv, EchoPolicy, no_leaks
from tests.faults.worlds import BOUND, KINDS, alive, all_gone, collect, faulty, healthy, pids, within

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
        c, errors = collect(kind, [make, healthy(1)]), []

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
    """Says when it was closed, after a while."""

    def __init__(self, note, seconds):
        super().__init__((3, 1, 5), 0)
        self.note, self.seconds = note, seconds

    def close(self):
        time.sleep(self.seconds)
        self.note.touch()


@pytest.mark.parametrize("kind", [MultiSyncCollector, ParallelEnv])
@pytest.mark.parametrize("beside", [pytest.param("deaf", marks=pytest.mark.slow), "slow"])
def test_an_error_does_not_wait_for_others_to_close(kind, beside, tmp_path):
    """It comes while the other process is still there; that is closed after, and `shutdown` waits for it."""
    note = tmp_path / "closed"
    other = faulty("deaf", where="close") if beside == "deaf" else lambda: SlowToClose(note, 1.5)
    makers = [other, faulty("raise", at=2)]
    env = None
    with no_leaks():
        if kind is ParallelEnv:
            env = ParallelEnv(2, makers)
            workers = [remote.child.pid for remote in env.lanes_env.remotes]
            c = Collector(env, EchoPolicy(), frames_per_batch=8)
        else:
            c = collect(kind, makers)
            workers = pids(c)
        with pytest.raises(WorkerRaised, match="an injected fault"), c:
            c.next()
        assert alive(workers[0]), "the error came after it had ended"
        assert c.closed
        c.shutdown()
        assert all_gone(workers, 0)
        assert note.exists() == (beside == "slow")
        c = env = None


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
