"""Names that batches and samples use for themselves: an observation that has one is refused by name, never mixed up."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from reap.collectors import AsyncBatchedCollector, Collector, RandomPolicy
from reap.collectors.utils import split_trajectories
from reap.data import (
    LazyTensorStorage,
    MultiStep,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from reap.envs import AsyncEnvPool
from reap.errors import SpecMismatch
from tests.worlds.buffers import line


class Named(gym.Env):
    """Its second observation has the name that is asked for; it counts up from 7, in episodes of 5 steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, name, shape=(2,), dtype=np.float32):
        self._name, self._shape, self._dtype, self._t = name, shape, dtype, 0
        box = gym.spaces.Box(-100, 100, shape, dtype)
        self.observation_space = gym.spaces.Dict({"observation": box, name: box})

    def _look(self):
        return dict.fromkeys(("observation", self._name), np.full(self._shape, 7 + self._t, self._dtype))

    def reset(self, *, seed=None, options=None):
        self._t = 0
        return self._look(), {}

    def step(self, action):
        self._t += 1
        return self._look(), 1.0, self._t == 5, False, {}


def named(name, **kwargs):
    return lambda: Named(name, **kwargs)


def collected(name, make=Collector, env=None, **options):
    collector = make(env or named(name), RandomPolicy(), frames_per_batch=10, total_frames=10, **options)
    try:
        return next(iter(collector))
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    "name",
    ["done", "terminated", "truncated", "reward", "next", "action", "collector", "policy_version", "_frame", "_ready"],
)
def test_names_every_batch_has(name):
    with pytest.raises(SpecMismatch, match=f"'{name}' has a name that a batch uses for something else; rename it"):
        collected(name)


def test_lanes_that_come_as_they_are_ready_are_told_by_two_names():
    for name in ("env_index", "_ready"):
        with pytest.raises(SpecMismatch, match=f"'{name}' has a name that a batch uses for something else; rename it"):
            collected(name, AsyncBatchedCollector, [named(name)] * 2)
        with pytest.raises(SpecMismatch, match=f"'{name}' has a name that a batch uses for something else; rename it"):
            AsyncEnvPool([named(name)] * 2)


@pytest.mark.parametrize("shape", [(2,), ()])
def test_an_observation_that_only_sounds_like_one_of_ours_is_data(shape):
    """Elsewhere these names mean lanes, frames and trajectories; here they are the env's, and nothing else."""
    numbers = [7.0, 8, 9, 10, 11] * 2
    for name in ("env_index", "mask", "traj_ids", "index", "gamma"):
        env = named(name, shape=shape, dtype=np.float32)
        for options in ({"trajs_per_batch": 2}, {"split_trajs": True}, {}):
            batch = collected(name, env=env, **options)
            assert batch[name].reshape(10, -1)[:, 0].tolist() == numbers
    for name in ("mask", "traj_ids", "env_index"):
        batch = collected(name, env=named(name, shape=shape), postproc=MultiStep(1.0, 3))
        assert batch["next", "reward"][:, 0].tolist() == [3.0, 3, 3, 2, 1] * 2


def test_trajectory_ids_of_the_users_own_cut_runs():
    """At the root, without successors: as batches that were made by hand have them."""
    batch = line(6).exclude("collector")
    batch["traj_ids"] = torch.tensor([0, 0, 1, 1, 1, 1])
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2), batch_size=4)
    buffer.extend(batch)
    assert buffer._memory.runs.table()[1].tolist() == [2, 4]
    batch["next", "traj_ids"] = batch["traj_ids"] + 1
    other = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2), batch_size=4)
    other.extend(batch)
    assert other._memory.runs.table()[1].tolist() == [6]


def test_splitting_at_the_root():
    for name in ("mask", "traj_ids"):
        batch = collected(name).exclude("collector")
        with pytest.raises(SpecMismatch, match=f"'{name}' is an observation of this batch"):
            split_trajectories(batch)
        whole = collected(name)
        assert split_trajectories(whole)[name].reshape(10, -1)[:, 0].tolist() == [7.0, 8, 9, 10, 11] * 2


def rows(name):
    data = line(6)
    data[name] = torch.arange(6.0)
    return data


def make(kind=TensorDictReplayBuffer, **options):
    return kind(storage=LazyTensorStorage(8), batch_size=4, **options)


BUFFERS = {
    "index": make,
    "priority_weight": lambda: make(sampler=PrioritizedSampler(8, 1, 1)),
    "burn_in": lambda: make(sampler=SliceSampler(slice_len=2, burn_in=1)),
    "gamma": lambda: make(ReplayBuffer, transform=MultiStep(0.9, 2)),
    "steps_to_next_obs": lambda: make(ReplayBuffer, transform=MultiStep(0.9, 2)),
    ("next", "original_reward"): lambda: make(ReplayBuffer, transform=MultiStep(0.9, 2)),
    "_plain": lambda: make(ReplayBuffer),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_names_a_sample_has(name):
    last = name if isinstance(name, str) else name[-1]
    buffer = BUFFERS[name]()
    with pytest.raises(SpecMismatch, match=f"'{last}'.*rename it"):
        buffer.extend(rows(name))
    assert not buffer.initialized
    nested = rows("x").exclude("x").set(name, TensorDict({"inside": torch.zeros(6)}, [6]))
    with pytest.raises(SpecMismatch, match=f"'{last}'.*rename it"):
        buffer.extend(nested)
    buffer.extend(line(6))
    buffer.sample()


@pytest.mark.parametrize("name", list(BUFFERS)[:-1])
def test_what_another_process_wrote_is_refused_where_it_is_sampled(name):
    import os

    writer = make(ReplayBuffer)
    writer.extend(rows(name))  # it knows nothing of how it will be sampled
    writer.sample()
    fds, description = writer.handle()
    like = BUFFERS[name]()
    reader = type(like).open([os.dup(fd) for fd in fds], description, sampler=like.sampler)
    for transform in like.transforms:
        reader.append_transform(transform)
    with pytest.raises(SpecMismatch, match="rename it"):
        reader.sample()


def test_an_end_of_slices_is_marked_in_flags_only():
    sampler = SliceSampler(slice_len=2, truncated_key="observation")
    with pytest.raises(SpecMismatch, match="truncated_key.*'observation'"):
        make(sampler=sampler).extend(line(6))


def test_multi_step_as_postproc_refuses_too():
    with pytest.raises(SpecMismatch, match=r"'gamma'.*rename it"):
        MultiStep(0.9, 2)(rows("gamma"))
