"""Cores: workers and the thread that collects stay on those they were given, and wrong ones are refused."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque

import numpy as np
import pytest

from reap.collectors import AsyncBatchedCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, GymEnv
from reap.envs.parallel.process_workers import ProcessWorkers, ThreadedProcessWorkers
from reap.errors import UsageError
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.waiting import until

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")


def told(cores):
    """Cores as one number."""
    return 100.0 * min(cores) + len({*cores})


class Where(CountingEnv):
    """Its reward says on which cores it is stepped."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, told(os.sched_getaffinity(0)), *rest


class Acting(EchoPolicy):
    """Remembers on which cores it acted, and whether in the main thread."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, observation):
        self.seen.add((threading.current_thread() is threading.main_thread(), told(os.sched_getaffinity(0))))
        return super().forward(observation)


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads in processes"])
@pytest.mark.parametrize("as_function", [False, True], ids=["list", "function"])
def test_workers_and_driver_stay_on_their_cores(threads, as_function):
    before = os.sched_getaffinity(0)
    low, high = min(before), max(before)
    masks, policy = [[high], np.array([low, high])], Acting()
    with AsyncBatchedCollector(
        [lambda n=n: GymEnv(Where((50,), n)) for n in range(4)],
        policy,
        frames_per_batch=40,
        min_batch_size=4,
        env_backend="multiprocessing",
        envs_per_worker=2,
        worker_threads=threads,
        worker_affinity=masks.__getitem__ if as_function else masks,
        driver_affinity=[low],
    ) as c:
        policy.seen.clear()  # where it was tried
        batch = c.next()
    where = [{*batch["next", "reward"][batch["env_index"] == n].flatten().tolist()} for n in range(4)]
    assert where == [{told(masks[0])}] * 2 + [{told(masks[1])}] * 2
    assert policy.seen == {(True, told([low]))}
    assert os.sched_getaffinity(0) == before


def test_a_pool_by_hand():
    core = max(os.sched_getaffinity(0))
    with AsyncEnvPool(
        [lambda: GymEnv(Where())] * 2, backend="multiprocessing", worker_affinity=lambda n: [core]
    ) as pool:
        td = pool.step(pool.rand_action(pool.reset()))
    assert td["next", "reward"].flatten().tolist() == [told([core])] * 2


class Everywhere(CountingEnv):
    """Its reward says on which cores any thread of its process may run."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        threads = map(int, os.listdir("/proc/self/task"))
        return observation, told({core for thread in threads for core in os.sched_getaffinity(thread)}), *rest


class Imported:
    """A factory whose modules start a thread when they are imported, as libraries of linear algebra do."""

    def __setstate__(self, state):
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def __getstate__(self):
        return "to be set again"

    def __call__(self):
        return GymEnv(Everywhere())


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads in processes"])
def test_all_threads_of_a_worker_are_on_its_cores(threads):
    core = max(os.sched_getaffinity(0))
    with AsyncEnvPool(
        [Imported()],
        backend="multiprocessing",
        worker_threads=threads,
        num_sub_threads=3,
        worker_affinity=[[core]],
    ) as pool:
        td = pool.step(pool.rand_action(pool.reset()))
    assert td["next", "reward"].item() == told([core])


def test_a_driver_that_raises_leaves_its_cores():
    before = os.sched_getaffinity(0)

    class Raises(EchoPolicy):
        def forward(self, observation):
            if observation[0, 2] == 4:
                raise RuntimeError("at step 4")
            return super().forward(observation)

    make = [lambda: GymEnv(CountingEnv((50,)))] * 2
    collector = AsyncBatchedCollector(make, Raises(), frames_per_batch=12, driver_affinity=[min(before)])
    with collector as c, pytest.raises(RuntimeError, match="at step 4"):
        c.next()
    assert os.sched_getaffinity(0) == before


def test_ctrl_c_while_cores_change_leaves_them(monkeypatch):
    before, place = os.sched_getaffinity(0), os.sched_setaffinity

    def interrupted(*arguments):
        place(*arguments)
        signal.raise_signal(signal.SIGINT)

    make = [lambda: GymEnv(CountingEnv((50,)))] * 2
    with AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=12, driver_affinity=[min(before)]) as c:
        monkeypatch.setattr(os, "sched_setaffinity", interrupted)
        with pytest.raises(KeyboardInterrupt):
            c.next()
        monkeypatch.undo()
        assert os.sched_getaffinity(0) == before
        assert len(c.next()) == 12


def test_a_background_driver_stays_on_its_cores():
    before = os.sched_getaffinity(0)
    policy = Acting()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    make = [lambda: GymEnv(CountingEnv())] * 2
    with AsyncBatchedCollector(
        make, policy, frames_per_batch=12, total_frames=48, replay_buffer=buffer, driver_affinity=[min(before)]
    ) as c:
        policy.seen.clear()
        c.start()
        until(lambda: len(buffer) == 48)
    assert policy.seen == {(False, told([min(before)]))}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("crew", [ProcessWorkers, ThreadedProcessWorkers])
def test_a_worker_that_is_not_let_on_its_cores_says_so(crew):
    make = [[(lambda: GymEnv(CountingEnv()), {})]]
    with pytest.raises(UsageError, match=r"worker .*cannot run on the cores \[9999\]: .*Invalid argument"):
        crew(make, cores=[frozenset({9999})])


@pytest.mark.parametrize("kind", [np.array, iter, deque], ids=["array", "iterator", "deque"])
def test_masks_come_in_any_kind_of_list(kind):
    core = min(os.sched_getaffinity(0))
    make = [lambda: GymEnv(Where())] * 2
    with AsyncEnvPool(make, backend="multiprocessing", worker_affinity=kind([[core], [core]])) as pool:
        td = pool.step(pool.rand_action(pool.reset()))
    assert td["next", "reward"].flatten().tolist() == [told([core])] * 2


def test_workers_are_as_many_as_it_takes_to_have_as_many_envs_each():
    message = r"the cores of each worker, 5 here with 1 of 5 envs each, got 3: \[\[0\], \[0\], \[0\]\]"
    with pytest.raises(UsageError, match=message):
        AsyncEnvPool(
            [lambda: GymEnv(CountingEnv())] * 5,
            backend="multiprocessing",
            envs_per_worker=2,
            worker_affinity=[[0]] * 3,
        )


@pytest.mark.parametrize("given", [0, [0.5], ["0"]])
def test_cores_of_the_wrong_kind(given):
    with pytest.raises(TypeError, match="driver_affinity must be a list of numbers of cores, got "):
        AsyncBatchedCollector([lambda: GymEnv(CountingEnv())], frames_per_batch=12, driver_affinity=given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"driver_affinity": []}, r"driver_affinity must be a list of numbers of cores, got \[\]"),
        ({"driver_affinity": 0}, "driver_affinity must be a list of numbers of cores, got 0"),
        ({"driver_affinity": "0"}, "driver_affinity must be a list of numbers of cores, got '0'"),
        ({"driver_affinity": [True]}, r"driver_affinity must be a list of numbers of cores, got \[True\]"),
        ({"driver_affinity": [0.0]}, r"driver_affinity must be a list of numbers of cores, got \[0.0\]"),
        ({"driver_affinity": [-1]}, r"driver_affinity is \[-1\], but this process may run on the cores \[\d"),
        ({"driver_affinity": iter([9999])}, r"driver_affinity is \[9999\], but this process may run on the cores \[\d"),
        ({"driver_affinity": [9999]}, r"driver_affinity is \[9999\], but this process may run on the cores \[\d"),
        ({"worker_affinity": [[0], [0]]}, "worker_affinity places processes on cores; it needs backend='multiproc"),
        (
            {"worker_affinity": 0, "backend": "multiprocessing"},
            "worker_affinity must be a list .* or a function, got 0",
        ),
        (
            {"worker_affinity": [[0]], "backend": "multiprocessing"},
            r"cores of each worker, 2 here .*, got 1: \[\[0\]\]",
        ),
        ({"worker_affinity": [[0], 0], "backend": "multiprocessing"}, r"worker_affinity\[1\] must be a list of numb"),
        (
            {"worker_affinity": lambda n: [], "backend": "multiprocessing"},
            r"worker_affinity\(0\) must be a list of num",
        ),
    ],
)
def test_cores_that_are_none(options, message):
    with pytest.raises(UsageError, match=message):
        AsyncBatchedCollector([lambda: GymEnv(CountingEnv())] * 2, EchoPolicy(), frames_per_batch=12, **options)
