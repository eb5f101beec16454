"""Lanes that can only be reset together."""

from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode

from reap.collectors import Collector
from reap.envs import PettingZooEnv, SerialEnv, TorchEnv
from reap.envs.transforms import StepCounter, TimeLimit, TransformedEnv
from reap.errors import UsageError, WorkerRaised
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from tests.worlds.envs import PLAN, CountingTorch, CountingVector, Town


def test_lanes_that_cannot_be_reset_singly_say_so_at_once():
    town = PettingZooEnv(Town(PLAN), mode="lanes")
    with pytest.raises(UsageError, match="max_frames_per_traj needs an env that resets single lanes"):
        Collector(town, frames_per_batch=8, max_frames_per_traj=2)
    for transform in (TimeLimit(2), StepCounter()):
        name = type(transform).__name__
        with pytest.raises(
            UsageError, match=f"^{name} needs an env that resets single lanes, which this one cannot do$"
        ):
            TransformedEnv(PettingZooEnv(Town(PLAN), mode="lanes"), transform)
    with pytest.raises(UsageError, match="cannot reset single lanes"):
        Collector(PettingZooEnv(Town(PLAN), mode="lanes"), frames_per_batch=8).reset(0)
    for env in (CountingVector([(3,)], AutoresetMode.SAME_STEP), TorchEnv(CountingTorch([(3,)]))):
        with pytest.raises(UsageError, match="steps all its lanes at once"):
            Collector(env, frames_per_batch=8, reset_when_done=False)


def test_lanes_that_are_one_env():
    env = CountingEnv()
    for make in (env, lambda: env):
        with pytest.raises(UsageError, match="same env object"):
            SerialEnv(2, make)


def test_same_step_without_single_resets_can_begin_again():
    c = Collector(CountingVector([(1,), (5,)], AutoresetMode.SAME_STEP), EchoPolicy(), frames_per_batch=8)
    c.next()
    c.reset()
    batch = c.next()
    assert batch["observation"][:, 0, 2].tolist() == [0, 0]
    with pytest.raises(WorkerRaised):

        class Bad(CountingVector):
            def reset(self, **_):
                raise OSError

        Collector(Bad([(1,)], AutoresetMode.SAME_STEP), frames_per_batch=4)
    assert_same(
        Collector(CountingVector([(2,)], AutoresetMode.SAME_STEP), EchoPolicy(), frames_per_batch=4).next(),
        CountingWorld([(2,)]).batch(4),
    )
