"""compact_obs: each observation once, and the full form back exactly."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule, TensorDictSequential

from reap.collectors import Collector
from reap.envs import SerialEnv
from reap.errors import UsageError
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.trajectories import with_next
from tests import example_count


def lanes(lengths):
    if len(lengths) == 1:
        return CountingEnv(lengths[0])
    return SerialEnv(len(lengths), [lambda one=one, i=i: CountingEnv(one, i) for i, one in enumerate(lengths)])


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 7),
    limit=st.none() | st.integers(1, 4),
)
@settings(max_examples=example_count(50), deadline=None)
def test_with_next_is_the_full_batch(lengths, steps, limit):
    c = Collector(
        lanes(lengths), EchoPolicy(), frames_per_batch=steps * len(lengths), compact_obs=True, max_frames_per_traj=limit
    )
    world = CountingWorld(lengths, limit=limit)
    kept = [c.next() for _ in range(4)]
    for batch in kept:
        assert ("next", "observation") not in batch.keys(True)
        assert ("next", "reward") in batch.keys(True)
        assert_same(with_next(batch), world.batch(steps))


class Image(CountingEnv):
    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)

    def _observation(self):
        return np.full((64, 64, 3), (self.episode * 7 + self.t) % 256, np.uint8)


def test_memory_of_pixels():
    steps, count = 256, 4
    c = Collector(SerialEnv(count, lambda: Image((100,))), frames_per_batch=steps * count, compact_obs=True)
    batch = c.next()
    slot = c._backend.worker.pool._slots[0]
    size = slot.block.nbytes + sum(v.nbytes for v in slot.finals.values.values())
    size += sum(c_.nbytes for c_ in c._backend.worker.loop.current)
    assert size <= 1.15 * (steps + 1) * count * 64 * 64 * 3
    full = with_next(batch)
    plain = Collector(SerialEnv(count, lambda: Image((100,))), frames_per_batch=steps * count).next()
    assert torch.equal(full["next", "pixels"], plain["next", "pixels"])


def test_compact_and_recurrent():
    class Steps(torch.nn.Module):
        carry = {"seen": torch.zeros(1)}

        def forward(self, observation, seen):
            return observation[..., :1], seen + 1

    batch = Collector(lanes([(3, 1), (2,)]), Steps(), frames_per_batch=16, compact_obs=True).next()
    full = with_next(batch)
    assert torch.equal(full["seen"], full["observation"][..., 2:])
    assert torch.equal(full["next", "seen"], full["next", "observation"][..., 2:])


def test_what_does_not_go_with_it():
    for options in (
        {"split_trajs": True},
        {"return_same_td": True},
        {"reset_when_done": False},
        {"trajs_per_batch": 2},
    ):
        with pytest.raises(UsageError, match="compact_obs"):
            Collector(lanes([(3,)]), EchoPolicy(), frames_per_batch=6, compact_obs=True, **options)
    with pytest.raises(UsageError, match="with_next needs"):
        with_next(Collector(lanes([(3,)]), EchoPolicy(), frames_per_batch=6).next())


def test_compact_refuses_what_it_could_not_rebuild():
    overwrites = TensorDictSequential(
        TensorDictModule(lambda o: o + 1, ["observation"], ["observation"]),
        TensorDictModule(lambda o: o[..., :1], ["observation"], ["action"]),
    )
    with pytest.raises(UsageError, match="the policy overwrites"):
        Collector(CountingEnv(), overwrites, frames_per_batch=4, compact_obs=True)
    batch = Collector(SerialEnv(2, CountingEnv), EchoPolicy(), frames_per_batch=8, compact_obs=True).next()
    for bad in (batch.reshape(-1), batch[:, :2]):
        with pytest.raises(UsageError, match="neither cut nor reshaped|as a compact_obs collector delivers it"):
            with_next(bad)
