"""An env that is used by hand and by a collector in turn."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch

from reap.collectors import Collector
from reap.envs import AsyncEnvPool, GymEnv
from reap.errors import WrongState
from reap.testing import CountingEnv, EchoPolicy


def test_by_hand_and_by_collector_in_turn():
    class Two(CountingEnv):
        action_space = gym.spaces.Discrete(2)

        def step(self, action):
            self.got = action
            return super().step(0.0)

    inner = Two()
    env = GymEnv(inner)
    c = Collector(env, lambda observation: torch.tensor(1), frames_per_batch=2)
    c.next()
    env.step(env.reset().set("action", torch.tensor([0, 1])))
    assert inner.got == 1
    c.next()
    assert inner.got == 1


def test_rollout_goes_on_where_step_stopped():
    env = GymEnv(CountingEnv((9,)))
    td = env.reset()
    for _ in range(2):
        td = env.step(td.set("action", torch.zeros(1)))["next"]
    out = env.rollout(3, EchoPolicy(), auto_reset=False)
    assert out["observation"][:, 2].tolist() == [2, 3, 4]


def test_who_uses_the_env_by_hand_leaves_no_false_successor():
    """TorchRL goes on as if nobody had touched the env, and delivers a step that never was."""
    env = GymEnv(CountingEnv((100,)))
    c = Collector(env, EchoPolicy(), frames_per_batch=4)
    c.next()
    for use in (lambda: env.rollout(3), env.reset, lambda: Collector(env, EchoPolicy(), frames_per_batch=2).next()):
        use()
        first = c.next()
        assert first["observation"][:, 2].tolist() == [0, 1, 2, 3]
        assert torch.equal(first["next", "observation"][:-1], first["observation"][1:])
        second = c.next()
        assert second["observation"][:, 2].tolist() == [4, 5, 6, 7]
        assert torch.equal(second["collector", "traj_ids"], first["collector", "traj_ids"])


def test_the_same_with_envs_that_answer_as_they_are_ready():
    def send(pool):
        pool.async_reset_send(env_index=1)
        pool.async_reset_recv()

    def step(pool):
        pool.step(pool.rand_action(pool.reset()))

    with AsyncEnvPool([lambda n=n: GymEnv(CountingEnv((100,), n)) for n in range(2)]) as pool:
        c = Collector(pool, EchoPolicy(), frames_per_batch=8)
        for use in (AsyncEnvPool.reset, send, step):
            c.next()
            use(pool)
            batch = c.next()
            for one in batch["collector", "traj_ids"].unique():
                frames = batch[batch["collector", "traj_ids"] == one]
                assert frames["observation"][:, 2].tolist() == list(range(len(frames)))
        with pytest.raises(WrongState, match=r"no env has begun an episode; call reset\(\)"):
            pool.async_step_send(pool.rand_action())


def test_steps_of_a_collector_leave_no_flags_to_steps_by_hand():
    envs = [CountingEnv((1,), n) for n in range(2)]
    with AsyncEnvPool([lambda env=env: GymEnv(env) for env in envs]) as pool:
        c = Collector(pool, EchoPolicy(), frames_per_batch=8)
        c.next()
        for env in envs:
            env.lengths = (9,)
        pool.async_reset_send()
        pool.async_reset_recv(min_get=2)
        assert not pool.step(pool.rand_action())["next", "done"].any()
