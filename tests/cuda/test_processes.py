"""Workers in processes, with a GPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from reap.collectors import AsyncBatchedCollector, AsyncCollector, Collector, MultiSyncCollector
from reap.envs import GymEnv, ParallelEnv, SerialEnv
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def uses_gpu(pid: int) -> bool:
    found = False
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found |= "nvidia" in os.readlink(fd)
    return found


def test_the_policy_on_the_gpu_in_each_worker():
    make = [lambda w=w: GymEnv(CountingEnv((3, 5), w)) for w in (0, 1)]
    with MultiSyncCollector(make, EchoPolicy(), frames_per_batch=20, policy_device="cuda") as c:
        worlds = [CountingWorld([(3, 5)], first_lane=w, worker=w, workers=2) for w in (0, 1)]
        for _ in range(3):
            for got, world in zip(c.next(), worlds):
                assert_same(got, world.batch(10))
        policy = EchoPolicy().cuda()
        with torch.no_grad():
            policy.weight.fill_(2.0)
        c.update_policy_weights_(policy)  # weights from the trainer's GPU to the workers' GPU
        batch = c.next()
        want = (batch["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True) * 2
        assert torch.equal(batch["action"], want)


def test_batches_on_the_gpu():
    make = lambda: SerialEnv(4, lambda: GymEnv("CartPole-v1"))  # noqa: E731
    with AsyncCollector(make, nn.Linear(4, 2), frames_per_batch=80, storing_device="cuda", total_frames=400) as c:
        for batch in c:
            assert batch["observation"].is_cuda
            assert batch["next", "observation"].is_cuda
            follows = (batch["next", "observation"][:, :-1] == batch["observation"][:, 1:]).all(-1)
            assert torch.equal(follows, ~batch["next", "done"][:, :-1, 0])
        pids = [remote.child.pid for remote in c._backend.workers]
        assert not any(uses_gpu(pid) for pid in pids), "a worker that needs no GPU has opened it"


def test_lanes_elsewhere_and_the_policy_on_the_gpu():
    lengths = [(3, 1), (4,), (2, 6)]
    make = [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]
    env = ParallelEnv(3, make, num_workers=2)
    with Collector(env, EchoPolicy(), frames_per_batch=30, policy_device="cuda") as c:
        world = CountingWorld(lengths)
        for _ in range(3):
            assert_same(c.next(), world.batch(10))
        assert uses_gpu(os.getpid())
        assert not any(uses_gpu(process.child.pid) for process in env.lanes_env.processes)


def test_shared_slots_are_pinned_here_and_env_workers_have_no_gpu():
    make = [lambda lane=lane: GymEnv(CountingEnv((3, 1), lane)) for lane in range(4)]
    env = ParallelEnv(4, make, num_workers=2)
    with Collector(env, EchoPolicy(), frames_per_batch=40, policy_device="cuda") as c:
        c.next()
        slot = c._backend.worker.pool.acquire()
        assert torch.from_numpy(slot.block).is_pinned()
        c._backend.worker.pool.release(slot)
        assert not any(uses_gpu(process.child.pid) for process in env.lanes_env.processes)


def test_the_log_of_ready_lanes_is_pinned_and_env_workers_have_no_gpu():
    make = [lambda lane=lane: GymEnv(CountingEnv((3, 1), lane)) for lane in range(4)]
    with AsyncBatchedCollector(
        make, EchoPolicy(), frames_per_batch=40, policy_device="cuda", env_backend="multiprocessing"
    ) as c:
        c.next()
        worker = c._backend.worker
        assert torch.from_numpy(worker._log.block).is_pinned()
        assert not any(uses_gpu(process.child.pid) for process in worker.env.lane_workers._processes)
