"""Forks of the process that owns collectors, envs, servers and buffers."""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import itertools
import os
import pickle
import sys
import traceback

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from reap.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    BaseCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from reap.collectors.distributed import DistributedCollector, RPCCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, ParallelEnv
from reap.errors import ReapError
from reap.modules import InferenceServer, ProcessInferenceServer


def in_fork(work):
    """What `work()` returns in a fork of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            data = pickle.dumps(work())
            os.write(writing, data)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                gc.collect()
                atexit._run_exitfuncs()  # as a script that ends does
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pickle.loads(data)


def refusals(verbs):
    """The verbs, by name, that did not refuse with an error that says why."""
    wrong = {}
    for name, verb in verbs.items():
        try:
            verb()
            wrong[name] = "did it"
        except ReapError as error:
            if "fork" not in str(error):
                wrong[name] = str(error)
        except BaseException as error:
            wrong[name] = repr(error)
    return wrong


def verbs_of(collector):
    return {
        "next": collector.next,
        "iter": lambda: next(iter(collector)),
        "rollout": collector.rollout,
        "update_policy_weights_": collector.update_policy_weights_,
        "set_seed": lambda: collector.set_seed(1),
        "reset": collector.reset,
        "state_dict": collector.state_dict,
        "load_state_dict": lambda: collector.load_state_dict({"frames": 0, "iter": 0, "traj_pool": {}}),
        "start": collector.start,
        "pause": collector.pause,
        "is_running": collector.is_running,
        "stats": collector.stats,
        "map_fn": lambda: collector.map_fn("env.close"),
        "get_distant_attr": lambda: collector.get_distant_attr("policy"),
        "getattr_env": lambda: collector.getattr_env("spec"),
        "getattr_policy": lambda: collector.getattr_policy("training"),
    }


ENDS = {"shutdown", "async_shutdown", "close"}  # nothing that is not a fork's own is ended by these


def all_verbs_of(thing):
    """Every public method, and what Python's own syntax calls; without arguments, which nobody may get to miss."""
    found = {}
    for name in dir(type(thing)):
        member = inspect.getattr_static(type(thing), name)
        if inspect.isfunction(member) and not name.startswith("_") and name not in {*ENDS, "in_fork"}:
            found[f"{type(thing).__name__}.{name}"] = getattr(thing, name)
    if hasattr(type(thing), "__iter__"):
        found["iter"] = lambda: next(iter(thing))
    return found


def wrong_properties_of(thing):
    """Properties that raise something else than a refusal; those that look at nobody else say what they always do."""
    found = {}
    for name in dir(type(thing)):
        if isinstance(inspect.getattr_static(type(thing), name), property) and not name.startswith("_"):
            try:
                getattr(thing, name)
            except ReapError as error:
                if "fork" not in str(error):
                    found[name] = str(error)
    return found


class Clock(gym.Env):
    """One long episode; an observation is the time, and who stepped it."""

    observation_space = gym.spaces.Box(0, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)
    made = itertools.count()

    def __init__(self):
        self._who = os.getpid() * 100 + next(self.made)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.array([0, self._who], np.float64), {}

    def step(self, action):
        self._t += 1
        return np.array([self._t, self._who], np.float64), 1.0, False, False, {}


def policy():
    return torch.nn.Linear(2, 2, dtype=torch.float64)


MAKERS = {
    "Collector": lambda **o: Collector(Clock, policy(), frames_per_batch=4, **o),
    "ParallelEnv": lambda **o: Collector(ParallelEnv(2, Clock), policy(), frames_per_batch=4, **o),
    "AsyncEnvPool": lambda **o: Collector(
        AsyncEnvPool([Clock] * 2, backend="multiprocessing"), policy(), frames_per_batch=4, **o
    ),
    "MultiSyncCollector": lambda **o: MultiSyncCollector([Clock] * 2, policy(), frames_per_batch=4, **o),
    "MultiAsyncCollector": lambda **o: MultiAsyncCollector([Clock] * 2, policy(), frames_per_batch=4, **o),
}


OWNERS = {
    **MAKERS,
    "AsyncCollector": lambda: AsyncCollector(Clock, policy(), frames_per_batch=4),
    "AsyncBatchedCollector": lambda: AsyncBatchedCollector([Clock] * 2, policy(), frames_per_batch=4),
    "lanes": lambda: ParallelEnv(2, Clock),
    "ready lanes": lambda: ParallelEnv(2, Clock, ready=1),
    "a pool": lambda: AsyncEnvPool([Clock] * 2, backend="multiprocessing"),
    "a pool of threads": lambda: AsyncEnvPool([Clock] * 2),
    "Evaluator": lambda: Evaluator(Clock, policy(), num_trajectories=1, max_steps=4),
    "Evaluator in a process": lambda: Evaluator(Clock, policy(), num_trajectories=1, max_steps=4, backend="process"),
    "InferenceServer": lambda: InferenceServer(policy()).start(),
    "InferenceServer that has not begun": lambda: InferenceServer(policy()),
    "ProcessInferenceServer": lambda: ProcessInferenceServer(policy),
}
FAR = {
    "DistributedCollector": lambda: DistributedCollector([Clock], policy(), frames_per_batch=4),
    "RPCCollector": lambda: RPCCollector([Clock], policy(), frames_per_batch=4),
}


@pytest.mark.parametrize("kind", [*OWNERS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAR)])
def test_no_verb_of_whatever_owns_processes_threads_or_sockets_is_forgotten_in_a_fork(kind):
    """Found by looking: a verb that is new is among them."""
    one = (OWNERS | FAR)[kind]()
    end = getattr(one, "shutdown", None) or one.close
    try:
        verbs = all_verbs_of(one)
        assert len(verbs) > 2

        def child():
            again = all_verbs_of(one)
            assert again.keys() == verbs.keys()
            wrong = refusals(again) | wrong_properties_of(one)
            end()
            return wrong

        assert in_fork(child) == {}
        if isinstance(one, BaseCollector):
            assert one.next() is not None
    finally:
        end()


def times(batches):
    """The times that each stream has seen, in order."""
    found = {}
    for batch in batches:
        for time, who in batch["observation"].reshape(-1, 2).tolist():
            found.setdefault(who, []).append(time)
    return found


@pytest.mark.parametrize("kind", MAKERS)
def test_every_verb_of_a_collector_refuses_in_a_fork_and_its_owner_goes_on(kind):
    with MAKERS[kind]() as collector:
        batches = [collector.next() for _ in range(3)]
        seen = times(batches)

        def child():
            nonlocal collector
            wrong = refusals(verbs_of(collector))
            collector.shutdown()  # ends nothing that is not its own
            batches.clear()  # nor do slots go back to workers from here
            collector = None
            return wrong

        assert in_fork(child) == {}
        assert times(batches) == seen
        batches += [collector.next() for _ in range(10)]
        assert all(stream == list(range(len(stream))) for stream in times(batches).values())
        assert collector.stats()["frames"] == sum(map(len, times(batches).values())) == 52


@pytest.mark.parametrize("kind", ["Collector", "MultiSyncCollector", "MultiAsyncCollector"])
def test_a_fork_leaves_a_collector_in_the_background_alone(kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    with MAKERS[kind](replay_buffer=buffer, total_frames=400) as collector:
        collector.start()
        buffer.sample()
        assert in_fork(lambda: refusals(verbs_of(collector))) == {}
        while collector.is_running():
            buffer.sample()
        collector.shutdown()
        assert buffer.write_count == 400
        streams = times([buffer[:]])
        assert all(stream == list(range(len(stream))) for stream in streams.values())


def test_a_fork_reads_and_writes_a_buffer_as_any_process_does():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8, prefetch=2)
    rows = TensorDict({"x": torch.arange(8)}, [8])
    buffer.extend(rows)
    buffer.sample()  # from here on there is a thread that prepares samples

    def child():
        buffer.extend(rows + 8)
        return sorted(set(buffer.sample(64)["x"].tolist()) - set(range(16))), len(buffer.sample())

    assert in_fork(child) == ([], 8)
    assert buffer[:]["x"].tolist() == list(range(16))
    assert len(buffer.sample()) == 8
    buffer.shutdown()


def test_every_verb_of_envs_in_processes_refuses_in_a_fork():
    with ParallelEnv(2, Clock) as env, AsyncEnvPool([Clock] * 2, backend="multiprocessing") as pool:
        for one in (env, pool):
            stepped = one.step(one.rand_action(one.reset()))
            assert stepped["next", "observation"][:, 0].tolist() == [1, 1]
        pool.async_step_send(pool.rand_action(stepped["next"].exclude("reward")))
        verbs = {
            "env.reset": env.reset,
            "env.rollout": lambda: env.rollout(3),
            "env.step": lambda: env.step(env.rand_action()),
            "pool.reset": pool.reset,
            "pool.async_step_recv": pool.async_step_recv,
            "pool.async_reset_send": pool.async_reset_send,
        }
        assert in_fork(lambda: refusals(verbs)) == {}
        assert env.rollout(3)["observation"][:, :, 0].tolist() == [[0, 1, 2]] * 2
        assert pool.async_step_recv(min_get=2)["next", "observation"][:, 0].tolist() == [2, 2]


def test_envs_in_threads_refuse_in_a_fork():
    with AsyncEnvPool([Clock] * 2) as pool:
        pool.reset()
        assert in_fork(lambda: refusals({"reset": pool.reset, "recv": pool.async_step_recv})) == {}
        assert pool.reset()["observation"][:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("kind", [InferenceServer, ProcessInferenceServer])
def test_an_inference_server_outlives_forks_and_refuses_in_them(kind):
    with kind(policy_factory=policy) as server:
        ours, theirs = server.client(), server.client("process")
        td = TensorDict({"observation": torch.ones(2, dtype=torch.float64)})
        answer = ours(td)["action"]
        assert theirs(td)["action"].equal(answer)
        verbs = {
            "client": server.client,
            "update_policy_weights_": lambda: server.update_policy_weights_(policy()),
        }
        verbs |= {"ours": lambda: ours(td)} if kind is InferenceServer else {"stats": server.stats}

        def child():
            nonlocal ours, server
            wrong, answered = refusals(verbs), theirs(td)["action"].tolist()  # a client of another process is its own
            server.shutdown()
            verbs.clear()
            ours = server = None
            return wrong, answered

        assert in_fork(child) == ({}, answer.tolist())
        assert ours(td)["action"].equal(answer)
        assert server.client("process")(td)["action"].equal(answer)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_refuses_in_a_fork(backend):
    with Evaluator("CartPole-v1", torch.nn.Linear(4, 2), num_trajectories=2, backend=backend) as evaluator:
        evaluator.trigger_eval()
        verbs = {
            "evaluate": evaluator.evaluate,
            "trigger_eval": evaluator.trigger_eval,
            "poll": evaluator.poll,
            "wait": evaluator.wait,
            "state_dict": evaluator.state_dict,
        }

        def child():
            wrong = refusals(verbs)
            evaluator.shutdown()
            return wrong

        assert in_fork(child) == {}
        assert evaluator.wait(60)["eval/num_episodes"] == 2


@pytest.mark.slow
def test_a_fork_can_have_a_collector_of_its_own():
    def child():
        with MAKERS["MultiSyncCollector"]() as own:
            return [list(stream) for stream in times([own.next(), own.next()]).values()]

    with MAKERS["MultiSyncCollector"]() as collector:
        collector.next()
        assert in_fork(child) == [[0, 1, 2, 3]] * 2
        assert collector.next() is not None
