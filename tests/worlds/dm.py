"""The predictable world as a dm_env environment."""

from __future__ import annotations

import numpy as np
import pytest

from reap.testing import CountingEnv

dm_env = pytest.importorskip("dm_env")


class CountingDm(dm_env.Environment):
    """CountingEnv as dm_env would have it."""

    def __init__(self, lengths, lane=0):
        self.inner = CountingEnv(lengths, lane)

    def observation_spec(self):
        return dm_env.specs.Array((3,), np.float32)

    def action_spec(self):
        return dm_env.specs.BoundedArray((1,), np.float32, -1e9, 1e9)

    def reset(self):
        return dm_env.restart(self.inner.reset()[0])

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.inner.step(action)
        if terminated:
            return dm_env.termination(reward, obs)
        return dm_env.truncation(reward, obs) if truncated else dm_env.transition(reward, obs)
