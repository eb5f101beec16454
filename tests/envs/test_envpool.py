"""EnvPool, for real, and the predictable world through a pool that behaves like one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import EnvPoolEnv
from reap.envs.envpool import EnvPoolLanes
from reap.errors import UsageError
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same


class CountingPool:
    """CountingEnvs behind EnvPool's interface: ended envs reset on their next step; subsets can be reset or stepped."""

    def __init__(self, lengths, batch_size=0):
        self.envs = [CountingEnv(one, lane) for lane, one in enumerate(lengths)]
        self.spec = SimpleNamespace(config=SimpleNamespace(num_envs=len(lengths), batch_size=batch_size))
        self.observation_space, self.action_space = CountingEnv.observation_space, CountingEnv.action_space
        self.all_env_ids = np.arange(len(lengths))
        self.over = np.zeros(len(lengths), bool)

    def send(self, action, env_id=None): ...

    def recv(self): ...

    def async_reset(self): ...

    def reset(self, env_id=None):
        ids = self.all_env_ids if env_id is None else np.asarray(env_id)
        self.over[ids] = False
        return np.stack([self.envs[i].reset()[0] for i in ids]), {"env_id": ids}

    def step(self, action, env_id=None):
        ids = self.all_env_ids if env_id is None else np.asarray(env_id)
        assert not self.over[ids].any(), "a step would be spent on a reset"
        out = [self.envs[i].step(a)[:4] for i, a in zip(ids, action)]
        obs, reward, terminated, truncated = (np.array(x) for x in zip(*out))
        self.over[ids] = terminated | truncated
        turn = np.roll(np.arange(len(ids)), 1)  # arrival order is not lane order
        return obs[turn], reward[turn], terminated[turn], truncated[turn], {"env_id": ids[turn]}

    def close(self): ...


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
)
@settings(max_examples=30, deadline=None)
def test_the_predictable_world(lengths, steps, limit):
    c = Collector(CountingPool(lengths), EchoPolicy(), frames_per_batch=steps * len(lengths), max_frames_per_traj=limit)
    world = CountingWorld(lengths, limit=limit)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


def test_resting_lanes_are_not_stepped():
    c = Collector(CountingPool([(2,), (6,)]), EchoPolicy(), frames_per_batch=8, reset_when_done=False)
    assert c.next()["collector", "mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert c.next()["observation"][:, 0].tolist() == [[0, 1, 0], [1, 0, 4]]


def test_asynchronous_pools_are_refused():
    with pytest.raises(UsageError, match="answers 1 of 2 envs at a time"):
        Collector(CountingPool([(2,), (6,)], batch_size=1), frames_per_batch=8)


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_real_pools(task):
    envpool = pytest.importorskip("envpool")
    for env in (EnvPoolEnv(task, num_envs=4), envpool.make(task, env_type="gymnasium", num_envs=4)):
        c = Collector(env, frames_per_batch=400)
        assert type(c.env) is EnvPoolLanes
        ends = 0
        for _ in range(3):
            batch = c.next()
            assert batch.batch_size == torch.Size([4, 100])
            done = batch["next", "done"][..., 0]
            ends += int(done.sum())
            going = ~done[:, :-1]
            assert torch.equal(batch["next", "observation"][:, :-1][going], batch["observation"][:, 1:][going])
            if task == "CartPole-v1":
                begun = batch["observation"][:, 1:][~going]
                assert (begun.abs() <= 0.05).all()
                out = batch["next", "observation"][done]
                assert ((out[:, 0].abs() > 2.4) | (out[:, 2].abs() > 0.2094)).all()  # the true last observation
                assert (batch["next", "reward"] == 1).all()
        assert ends > 0 or task != "CartPole-v1"
        c.shutdown()


def test_real_pool_with_a_limit_and_info():
    pytest.importorskip("envpool")
    env = EnvPoolEnv("Pendulum-v1", num_envs=3, info_keys={"elapsed_step": np.int32})
    batch = Collector(env, frames_per_batch=30, max_frames_per_traj=4).next()
    assert batch["next", "truncated"].sum() == 6
    assert torch.equal(batch["next", "elapsed_step"].long(), batch["next", "step_count"][..., 0])
