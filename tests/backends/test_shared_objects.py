"""What a factory holds that lives in more than one process: pipes, sockets, queues, locks, values, shared memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import socket
import threading
import time
from multiprocessing import shared_memory

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.multiprocessing
from tensordict import TensorDict

from reap.collectors import AsyncCollector, Collector, Evaluator, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, ParallelEnv
from reap.errors import UsageError
from reap.modules import ProcessInferenceServer
from reap.testing import no_leaks
from tests.worlds.waiting import until


class TalkingEnv(gym.Env):
    """Does something to what it was given with each step."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, talk, *things):
        self._talk, self._things, self._t = talk, things, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._t += 1
        self._talk(*self._things)
        return np.full(2, self._t, np.float32), 1.0, self._t == 4, False, {}


def collected(make):
    """Batches are what they would be without any talking."""
    return [batch["next", "observation"][..., 0].flatten().tolist() for batch in make]


@contextlib.contextmanager
def in_workers(make_env):
    with MultiSyncCollector([make_env] * 2, frames_per_batch=8, total_frames=8, cat_results=0) as collector:
        yield collected(collector)


@contextlib.contextmanager
def in_one_worker(make_env):
    with AsyncCollector(make_env, frames_per_batch=4, total_frames=4) as collector:
        yield collected(collector)


@contextlib.contextmanager
def in_parallel_env(make_env):
    env = ParallelEnv(2, make_env)
    with Collector(env, frames_per_batch=8, total_frames=8) as collector:
        yield collected(collector)


@contextlib.contextmanager
def in_pool(make_env):
    env = AsyncEnvPool([make_env] * 2, backend="multiprocessing")
    with Collector(env, frames_per_batch=8, total_frames=8) as collector:
        yield collected(collector)


@contextlib.contextmanager
def in_threads_of_processes(make_env):
    env = AsyncEnvPool([make_env] * 2, backend="multiprocessing", envs_per_worker=2, worker_threads=True)
    with Collector(env, frames_per_batch=8, total_frames=8) as collector:
        yield collected(collector)


@contextlib.contextmanager
def in_evaluator(make_env):
    with Evaluator(make_env, policy=_still, num_trajectories=2, backend="process") as evaluator:
        evaluator.evaluate()
        yield None


def _still(observation):
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


PLACES = [in_workers, in_one_worker, in_parallel_env, in_pool, in_threads_of_processes, in_evaluator]
CONTEXTS = {
    "fork": multiprocessing.get_context("fork"),
    "spawn": multiprocessing.get_context("spawn"),
    "torch": torch.multiprocessing.get_context("spawn"),
}


def _count_all(things):
    """In an env: say "hello" through everything there is."""
    if things["done"].is_set():
        return
    with things["lock"], things["rlock"], things["value"].get_lock():
        if things["done"].is_set():
            return
        things["pipe"].send("hello")
        things["socket"].sendall(b"hello")
        things["queue"].put("hello")
        things["simple"].put("hello")
        things["joinable"].put("hello")
        things["value"].value += 1
        things["raw"].value += 1
        things["array"][1] += 1
        things["memory"].buf[3] += 1
        things["shared"][1] = 7
        things["semaphore"].release()
        with things["condition"]:
            things["condition"].notify_all()
        assert things["barrier"].parties == 1
        things["barrier"].wait()
        things["done"].set()


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
@pytest.mark.parametrize("place", PLACES)
def test_what_multiprocessing_makes_works_in_an_env(place, context):
    ours, theirs = context.Pipe()
    here, there = socket.socketpair()
    memory = shared_memory.SharedMemory(create=True, size=16)
    things = {
        "pipe": theirs,
        "socket": there,
        "queue": context.Queue(),
        "simple": multiprocessing.get_context(context.get_start_method()).SimpleQueue(),
        "joinable": context.JoinableQueue(),
        "lock": context.Lock(),
        "rlock": context.RLock(),
        "semaphore": context.Semaphore(0),
        "done": context.Event(),
        "condition": context.Condition(),
        "barrier": context.Barrier(1),
        "value": context.Value("i", 0),
        "raw": context.RawValue("i", 0),
        "array": context.Array("d", 3),
        "shared": torch.zeros(3).share_memory_(),
        "memory": memory,
    }
    try:
        with place(functools.partial(TalkingEnv, _count_all, things)) as batches:
            assert batches is None or sorted(sum(batches, []))[-1] == 4  # noqa: RUF017
            assert ours.recv() == "hello"
            assert here.recv(16) == b"hello"
            assert things["queue"].get(timeout=10) == "hello"
            assert things["simple"].get() == "hello"
            assert things["joinable"].get(timeout=10) == "hello"
            assert things["semaphore"].acquire(timeout=10)
            assert things["done"].wait(10)
            assert (things["value"].value, things["raw"].value, things["array"][:]) == (1, 1, [0, 1, 0])
            assert things["shared"].tolist() == [0, 7, 0]
        assert bytes(memory.buf[:4]) == b"\0\0\0\1"  # whoever ended has not taken it along
        shared_memory.SharedMemory(memory.name).close()
    finally:
        memory.close()
        memory.unlink()
        for end in (ours, theirs, here, there):
            end.close()


def _note(shared, names, inner, inbox):
    """In an env: write into everything a manager has made."""
    with shared["lock"]:
        shared["steps"] = shared.get("steps", 0) + 1
    names.last = "step"
    inner[0].append(1)
    if inbox.empty():
        inbox.put("hello")


@pytest.mark.parametrize("place", PLACES)
def test_what_a_manager_makes_works_in_an_env(place):
    with multiprocessing.Manager() as manager:
        shared, names, inner, inbox = manager.dict(), manager.Namespace(), manager.list(), manager.Queue()
        shared["lock"] = manager.Lock()  # a proxy inside a proxy comes without the key
        inner.append(manager.list())
        with place(functools.partial(TalkingEnv, _note, shared, names, inner, inbox)):
            assert shared["steps"] >= 4
            assert len(inner[0]) >= 4
            assert names.last == "step"
            assert inbox.get(timeout=10) == "hello"


class Wrapper:
    """Pickles by itself what it holds, as TorchRL's and Gymnasium's wrappers of factories do."""

    def __init__(self, inside):
        self.inside = inside

    def __getstate__(self):
        return cloudpickle.dumps(self.inside)

    def __setstate__(self, state):
        self.inside = pickle.loads(state)

    def __call__(self):
        return self.inside()


def test_a_pipe_inside_a_wrapper_that_pickles_by_itself_is_the_same_pipe():
    ours, theirs = multiprocessing.Pipe()
    value = multiprocessing.Value("i", 0)

    def say(end, value):
        end.send("hello")
        value.value += 1

    with in_one_worker(Wrapper(functools.partial(TalkingEnv, say, theirs, value))) as batches:
        assert batches == [[1, 2, 3, 4]]
        assert [ours.recv() for _ in range(4)] == ["hello"] * 4
        assert value.value >= 4


@pytest.mark.parametrize("buffering", ["slots", "buffer"])
def test_every_descriptor_reaches_what_it_belongs_to(buffering):
    """With many ends in one factory none is the number of something of ours."""
    pipes = [multiprocessing.Pipe() for _ in range(12)]

    def say(ends):
        for n, end in enumerate(ends):
            end.send(n)

    make = functools.partial(TalkingEnv, say, [theirs for _, theirs in pipes])
    buffer = ReplayBuffer(storage=LazyTensorStorage(100)) if buffering == "buffer" else None
    collector = MultiSyncCollector(
        [make] * 2, torch.nn.Linear(2, 2), frames_per_batch=16, total_frames=16, cat_results=0, replay_buffer=buffer
    )
    with collector:
        batches = list(collector)
        data = batches[0] if buffer is None else buffer[:]
        assert sorted(data["next", "observation"][..., 0].flatten().tolist()) == sorted([1, 2, 3, 4] * 4)
    for n, (ours, _) in enumerate(pipes):
        assert [ours.recv() for _ in range(16)] == [n] * 16


def test_a_pipe_ends_when_its_worker_does():
    ours, theirs = multiprocessing.Pipe()
    collector = AsyncCollector(
        functools.partial(TalkingEnv, lambda end: None, theirs), frames_per_batch=4, total_frames=-1
    )
    theirs.close()  # the worker has the only one now
    collector.shutdown()
    with pytest.raises(EOFError):
        ours.recv()


def test_what_an_env_puts_into_a_queue_when_it_is_closed_arrives():
    queue = multiprocessing.Queue()

    class Reporting(TalkingEnv):
        def close(self):
            self._things[0].put(b"!" * 1000)

    with AsyncCollector(lambda: Reporting(lambda queue: None, queue), frames_per_batch=4, total_frames=4) as collector:
        list(collector)
    assert queue.get(timeout=10) == b"!" * 1000


def test_a_queue_that_nobody_reads_holds_up_no_shutdown():
    queue = multiprocessing.Queue()
    make = functools.partial(TalkingEnv, lambda queue: queue.put(b"!" * 1_000_000), queue)
    with AsyncCollector(make, frames_per_batch=4, total_frames=4) as collector:
        list(collector)
        began = time.monotonic()
    assert time.monotonic() - began < 4


def test_an_event_wakes_whoever_waited_for_it_before_the_worker_was_there():
    event, heard = multiprocessing.get_context("fork").Event(), threading.Event()
    thread = threading.Thread(target=lambda: event.wait(30) and heard.set(), daemon=True)
    thread.start()
    until(event._cond._sleeping_count.get_value)  # it waits: there is no other sign of it
    with in_one_worker(functools.partial(TalkingEnv, lambda event: event.set(), event)):
        assert heard.wait(10)
    thread.join(10)


def test_a_lock_that_a_fork_has_already_is_refused():
    lock, (ours, theirs) = multiprocessing.get_context("fork").Lock(), multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.recv(), daemon=True)
    child.start()
    try:
        with pytest.raises(UsageError, match=r"create_env_fn cannot be sent .*Lock of multiprocessing's fork context"):
            AsyncCollector(functools.partial(TalkingEnv, print, lock), frames_per_batch=4, total_frames=4)
        assert lock.acquire(timeout=1)
    finally:
        ours.send(None)
        child.join(10)


def test_descriptors_that_travelled_are_not_kept():
    ours, theirs = multiprocessing.Pipe()
    make = functools.partial(TalkingEnv, lambda end: end.send("hello"), theirs)
    with no_leaks():
        for place in (in_workers, in_parallel_env):
            with place(make):
                assert ours.recv() == "hello"


def _policy_with(thing):
    return functools.partial(lambda thing, observation: _still(observation), thing)


def _take(thing, *_):
    return _[0] if _ else None


HOLDING = {
    "create_env_fn": lambda thing: MultiSyncCollector([functools.partial(TalkingEnv, thing)], frames_per_batch=4),
    "create_env_kwargs": lambda thing: MultiSyncCollector(
        [TalkingEnv], frames_per_batch=4, create_env_kwargs={"talk": thing}
    ),
    "policy": lambda thing: MultiSyncCollector(["CartPole-v1"], _policy_with(thing), frames_per_batch=4),
    "policy_factory": lambda thing: MultiSyncCollector(
        ["CartPole-v1"], policy_factory=lambda: _policy_with(thing), frames_per_batch=4
    ),
    "init_fn": lambda thing: MultiSyncCollector(
        ["CartPole-v1"], frames_per_batch=4, init_fn=functools.partial(_take, thing)
    ),
    "postproc": lambda thing: MultiSyncCollector(
        ["CartPole-v1"],
        frames_per_batch=4,
        postproc=functools.partial(_take, thing),
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(100)),
    ),
    "hook": lambda thing: MultiSyncCollector(
        ["CartPole-v1"],
        frames_per_batch=4,
        post_collect_hook=functools.partial(_take, thing),
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(100)),
    ),
    "create_env_fn of ParallelEnv": lambda thing: ParallelEnv(2, functools.partial(TalkingEnv, print, thing)),
    "create_env_fn of AsyncEnvPool": lambda thing: AsyncEnvPool(
        [functools.partial(TalkingEnv, print, thing)], backend="multiprocessing"
    ),
    "create_env_fn of Evaluator": lambda thing: Evaluator(
        functools.partial(TalkingEnv, print, thing), _still, backend="process"
    ),
    "policy_factory of ProcessInferenceServer": lambda thing: ProcessInferenceServer(lambda: _policy_with(thing)),
}


@pytest.mark.parametrize("where", HOLDING)
def test_what_cannot_travel_is_refused_by_name_before_anything_starts(where, tmp_path):
    closed = multiprocessing.Pipe()[0]
    closed.close()
    name = where.partition(" ")[0]
    with open(tmp_path / "a", "wb") as binary, open(tmp_path / "b", "w") as text, no_leaks():
        for thing in (binary, text, closed):
            with pytest.raises(UsageError, match=rf"{name}.* cannot be sent to another process"):
                HOLDING[where](thing)


class Counted(torch.nn.Module):
    """A policy that counts its calls where others see it."""

    def __init__(self, calls, end=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.calls, self.end = calls, end

    def forward(self, observation):
        with self.calls.get_lock():
            self.calls.value += 1
        if self.end is not None:
            self.end.send("hello")
        return _still(observation)


def test_a_policy_and_a_policy_factory_may_hold_a_value():
    calls = multiprocessing.Value("i", 0)
    for given in ({"policy": Counted(calls)}, {"policy_factory": lambda: Counted(calls)}):
        before = calls.value
        with MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=8, total_frames=8, **given) as collector:
            list(collector)
            assert calls.value >= before + 8


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_copies_its_policy_but_not_what_that_shares(backend):
    calls, (ours, theirs) = multiprocessing.Value("i", 0), multiprocessing.Pipe()
    policy = Counted(calls, theirs)
    with Evaluator("CartPole-v1", policy, num_trajectories=1, backend=backend) as evaluator:
        evaluator.evaluate()
    assert calls.value > 0
    assert ours.recv() == "hello"
    del evaluator
    gc.collect()
    theirs.send("still open")


def test_an_inference_server_of_another_process_may_hold_a_value():
    calls = multiprocessing.Value("i", 0)
    with ProcessInferenceServer(lambda: Counted(calls)) as server:
        server.client()(TensorDict({"observation": torch.zeros(4)}))
    assert calls.value == 1


def test_workers_do_not_write_into_the_trainers_shared_weights():
    """Parameters and buffers come by version, also where the trainer keeps them in shared memory."""
    policy = Counted(multiprocessing.Value("i", 0)).share_memory()
    for given in ({"policy": policy}, {"policy_factory": lambda: policy}):
        with MultiSyncCollector(["CartPole-v1"], frames_per_batch=4, total_frames=-1, **given) as collector:
            collector.next()
            collector.update_policy_weights_({"weight": torch.tensor(3.0), "scale": torch.tensor(5.0)})
            collector.next()
            assert collector.get_cached_weights()["scale"] == 5
            assert (policy.weight.item(), policy.scale.item()) == (0, 1)
            policy.weight.data.fill_(7.0)
            collector.next()
            assert collector.get_cached_weights()["weight"] == 3
            policy.weight.data.zero_()


def test_shared_tensors_are_shared_and_others_copied():
    shared, own = torch.zeros(2, 3).share_memory_(), torch.zeros(3)
    view, td = shared[1:, ::2], TensorDict({"a": torch.zeros(2)}).share_memory_()

    def add(shared, view, own, td):
        shared += 1
        view += 10
        own += 1
        td["a"].add_(1)

    make = functools.partial(TalkingEnv, add, shared, view, own, td)
    with MultiSyncCollector([make], frames_per_batch=4, total_frames=4) as collector:
        assert collected(collector) == [[1, 2, 3, 4]]
        assert shared.tolist() == [[4, 4, 4], [44, 4, 44]]
        assert td["a"].tolist() == [4, 4]
        assert own.tolist() == [0, 0, 0]


class Asks(TalkingEnv):
    """Its reward says whether a variable is there."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(os.environ.get("REAP_TEST", "-1")), *rest


ASKING = {
    "worker": lambda make: AsyncCollector(make, frames_per_batch=4),
    "ParallelEnv": lambda make: Collector(ParallelEnv(1, make), frames_per_batch=4),
    "AsyncEnvPool": lambda make: Collector(AsyncEnvPool([make], backend="multiprocessing"), frames_per_batch=4),
}


@pytest.mark.parametrize("where", ASKING)
def test_workers_have_the_environment_of_the_moment_they_are_started(where, monkeypatch):
    for value in (None, "7", None):
        monkeypatch.delenv("REAP_TEST", raising=False)
        if value is not None:
            monkeypatch.setenv("REAP_TEST", value)
        with ASKING[where](functools.partial(Asks, lambda: None)) as collector:
            assert collector.next()["next", "reward"].unique().tolist() == [float(value or -1)]
