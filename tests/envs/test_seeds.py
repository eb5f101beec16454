"""Seeds that were given to an env by hand, or reach a pool."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from reap.collectors import Collector
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
