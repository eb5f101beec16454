"""Seeds that were given to an env by hand, or reach a pool."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from reap.collectors import Collector, MultiSyncCollector
from reap.envs import EnvPoolEnv, GymEnv


def test_a_seed_given_to_the_env_by_hand_is_used():
    env = GymEnv("CartPole-v1")
    env.set_seed(5)
    batch = Collector(env, frames_per_batch=3).next()
    assert np.array_equal(batch["observation"][0], gym.make("CartPole-v1").reset(seed=5)[0])


def test_a_seed_given_by_hand_reaches_an_env_with_a_limit():
    env = GymEnv("CartPole-v1")
    env.set_seed(5)
    batch = Collector(env, frames_per_batch=3, max_frames_per_traj=50).next()
    assert np.array_equal(batch["observation"][0], gym.make("CartPole-v1").reset(seed=5)[0])


def test_a_pool_is_seeded():
    pytest.importorskip("envpool")

    def first(seed, batches=0, **options):
        c = Collector(EnvPoolEnv("CartPole-v1", num_envs=3, **options), frames_per_batch=30)
        for _ in range(batches):
            c.next()
        c.set_seed(seed)
        batch = c.next()
        return {tuple(row) for row in batch["observation"].reshape(-1, 4)[:: batch.shape[-1]].tolist()}

    for options in ({}, {"batch_size": 2}):
        assert first(11, **options) == first(11, batches=2, **options) != first(12, **options)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=["sync", "async"])
def test_pools_without_a_seed_differ_and_a_given_one_stays(options):
    pytest.importorskip("envpool")

    def begun(**seed):
        c = Collector(EnvPoolEnv("CartPole-v1", num_envs=4, **options, **seed), frames_per_batch=4)
        rows = c.next()["observation"].reshape(-1, 4).tolist()
        c.shutdown()
        return {tuple(row) for row in rows}

    assert not begun() & begun()
    assert begun(seed=42) == begun(seed=42)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=["sync", "async"])
def test_pools_of_several_workers_differ(options):
    pytest.importorskip("envpool")

    def make():
        return EnvPoolEnv("CartPole-v1", num_envs=4, **options)

    def begun(seed=None):
        c = MultiSyncCollector([make] * 2, frames_per_batch=8, cat_results=0)
        try:
            if seed is not None:
                c.set_seed(seed)
            rows = c.next()["observation"].reshape(8, -1, 4)[:, 0].tolist()
        finally:
            c.shutdown()
        return [tuple(row) for row in rows]

    assert len(set(begun())) == 8
    assert len(set(begun(3))) == 8
    assert begun(3) == begun(3)
