"""AsyncEnvPool: what is refused changes nothing, and what has failed is not waited for."""

from __future__ import annotations

import os
import resource
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from reap.collectors import AsyncBatchedCollector
from reap.envs import AsyncEnvPool, GymEnv, ParallelEnv
from reap.errors import SpecMismatch, UsageError, WorkerDied, WorkerRaised, WrongArgument, WrongState
from reap.modules import ProcessInferenceServer
from reap.testing import CountingEnv, EchoPolicy, FaultyEnv, no_leaks

WHERE = [
    {"backend": "threading"},
    {"backend": "multiprocessing"},
    {"backend": "multiprocessing", "worker_threads": True, "envs_per_worker": 3},
]


def makers(count=3):
    return [lambda n=n: GymEnv(CountingEnv((9,), n)) for n in range(count)]


def actions(values, dtype=torch.float32):
    return TensorDict({"action": torch.tensor(values, dtype=dtype)[:, None]}, [len(values)])


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_a_send_that_is_refused_changes_nothing(where):
    with AsyncEnvPool(makers(), **where) as pool:
        pool.reset()
        for first, second in ((8.0, 800.0), (16.0, 1600.0)):
            pool.async_step_send(actions([first] * 3))
            with pytest.raises(WrongState, match="env 0 has not been received since it was sent to"):
                pool.async_step_send(actions([second] * 3))
            got = pool.async_step_recv(min_get=3)
            assert (got["action"] == first).all()
            assert (got["next", "reward"] == got["next", "observation"][:, 2:] + first / 8).all()


def test_actions_that_look_different_wait_until_all_is_received():
    with AsyncEnvPool(makers(2), envs_per_worker=2) as pool:
        pool.reset()
        pool.async_step_send(actions([8.0, 8.0]))
        (first,) = pool.async_step_recv(max_get=1)["env_index"].tolist()
        with pytest.raises(
            WrongState, match="other shapes or types than those sent before"
        ):  # the other's answer lies there still
            pool.async_step_send(actions([8.0], torch.float64), env_index=first)
        assert pool.async_step_recv()["next", "reward"].item() == 2.0
        pool.async_step_send(actions([8], torch.int64), env_index=first)
        assert pool.async_step_recv()["next", "observation"].tolist() == [[first, 0, 2]]


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_an_action_that_does_not_fit_costs_no_env(where):
    with AsyncEnvPool(makers(), **where) as pool:
        td = pool.reset()
        for good in (8.0, 16.0):
            td = pool.step(td.set("action", torch.full((3, 1), good)))
            assert (td["next", "reward"] == td["next", "observation"][:, 2:] + good / 8).all()
            for _ in range(2):
                with pytest.raises(SpecMismatch, match=r"'action' as float32\[2\], the env's action space is Box"):
                    pool.step(TensorDict({"action": torch.zeros(3, 2)}, [3]))


class Leaver(CountingEnv):
    """Calls sys.exit(), as simulators do when their window is closed."""

    def __init__(self, when):
        super().__init__((9,), 1)
        self.when = when
        self._leave("built")

    def _leave(self, when):
        if when == self.when:
            sys.exit(3)

    def reset(self, **keywords):
        self._leave("reset")
        return super().reset(**keywords)

    def step(self, action):
        self._leave("step")
        return super().step(action)


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("when", ["built", "reset", "step"])
def test_an_env_that_calls_exit_leaves_nobody_waiting(where, when):
    def collect():
        options = {"env_backend" if name == "backend" else name: value for name, value in where.items()}
        made = [*makers(1), lambda: Leaver(when)]
        with AsyncBatchedCollector(made, EchoPolicy(), frames_per_batch=10, **options) as collector:
            for _ in collector:  # the other goes on meanwhile
                pass

    with no_leaks():
        with pytest.raises((WorkerRaised, WorkerDied), match=r"SystemExit\(3\)|exited with code 3") as caught:
            collect()
        del caught


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_after_a_failure_nobody_waits_again(where, fault):
    if fault == "kill" and where["backend"] == "threading":
        pytest.skip("a thread cannot be killed")
    made = [*makers(2), lambda: GymEnv(FaultyEnv(CountingEnv((9,), 2), fault=fault, at=0))]
    with no_leaks():
        pool = AsyncEnvPool(made, **where)
        pool.reset()
        pool.async_step_send(actions([0.0] * 3))
        with pytest.raises((WorkerRaised, WorkerDied)):
            for _ in range(3):
                pool.async_step_recv()
        for call in ("async_step_recv", "reset", "async_reset_recv", "async_reset_send"):
            with pytest.raises(WrongState, match=r"AsyncEnvPool has failed: worker of lanes? .*; close it and make"):
                getattr(pool, call)()
        with pytest.raises(WrongState, match="AsyncEnvPool has failed"):
            pool.async_step_send(actions([0.0]), env_index=0)
        pool.close()
        del pool


def test_an_env_that_was_never_begun_is_not_stepped():
    with AsyncEnvPool(makers()) as pool:
        pool.async_reset_send(env_index=[0])
        pool.async_reset_recv()
        with pytest.raises(WrongState, match="env 1 has not begun an episode; call reset"):
            pool.async_step_send(actions([0.0] * 2), env_index=[0, 1])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"min_get": 1.5}, "min_get must be a whole number, got 1.5"),
        ({"max_get": 0}, "max_get must be a whole number ≥ 1, got 0"),
        ({"max_get": -1}, "max_get must be a whole number ≥ 1, got -1"),
        ({"min_get": 2, "max_get": 1}, "max_get is 1, below min_get, which is 2"),
        ({"timeout": "1"}, "timeout must be a number of seconds ≥ 0 or None, got '1'"),
    ],
)
def test_numbers_of_answers_are_whole_and_nothing_is_lost(options, told):
    with AsyncEnvPool(makers()) as pool:
        pool.reset()
        pool.async_step_send(actions([0.0] * 3))
        with pytest.raises(UsageError, match=told):
            pool.async_step_recv(**options)
        assert sorted(pool.async_step_recv(min_get=3)["env_index"].tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"timeout": -1}, "timeout must be a number of seconds > 0, got -1"),
        ({"timeout": "a"}, "timeout must be a number of seconds > 0 or None, got 'a'"),
        ({"min_ready": 0}, "min_ready must be a whole number ≥ 1, got 0"),
        ({"max_ready": 0}, "max_ready must be a whole number ≥ 1, got 0"),
        ({"max_frames_per_traj": "x"}, "max_frames_per_traj must be a whole number, got 'x'"),
        ({"num_sub_threads": 0}, "num_sub_threads must be a whole number ≥ 1, got 0"),
        ({"create_env_kwargs": 3}, "create_env_kwargs must be a mapping or a list of them, got 3"),
        ({"device": "nope"}, "device must name a device, got 'nope'"),
    ],
)
def test_arguments_are_refused_before_anything_is_built(options, told):
    def never():
        raise AssertionError("built")

    with pytest.raises((UsageError, WrongArgument), match=told):
        AsyncEnvPool([never], **options)


@pytest.mark.parametrize("limit", [0, -1])
def test_no_limit_is_no_limit(limit):
    with AsyncBatchedCollector(
        makers(2), EchoPolicy(), frames_per_batch=40, max_frames_per_traj=limit, track_traj_ids=True
    ) as collector:
        batch = collector.next()
    assert batch["next", "observation"][:, 2].max() == 9
    assert not (batch["next", "done"] & (batch["next", "observation"][:, 2:] < 9)).any()


def test_a_program_with_many_files_open():
    """Descriptors from 1024 on are as good as others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("so many cannot be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with AsyncEnvPool(makers(2), backend="multiprocessing", timeout=30.0) as pool:
            pool.step(pool.reset().set("action", torch.zeros(2, 1)))
        with ParallelEnv(2, lambda: GymEnv(CountingEnv()), timeout=30.0) as env:
            assert env.rollout(3).shape == (2, 3)
        with ProcessInferenceServer(EchoPolicy) as server:
            assert server.stats()["requests"] == 0
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("given", [1.5, "1", [0.0], [True], object()])
def test_an_env_index_that_names_no_envs_is_refused(given):
    with AsyncEnvPool(makers()) as pool:
        pool.reset()
        pool.async_step_send(actions([0.0] * 3))
        with pytest.raises(UsageError, match="env_index must hold numbers between 0 and 2, got "):
            pool.async_step_recv(env_index=given)
        assert pool.async_step_recv(env_index=[np.int64(1), torch.tensor(2)]).shape == (2,)
        assert pool.async_step_recv(env_index=np.int64(0))["env_index"].tolist() == [0]
