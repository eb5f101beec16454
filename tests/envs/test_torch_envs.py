"""CartPole and Pendulum in torch: what Gymnasium computes, step by step, over thousands of steps."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from reap.collectors import Collector
from reap.envs import TorchCartPole, TorchEnv, TorchPendulum
from reap.errors import UsageError, WrongArgument

LANES = 8


class Beside:
    """A torch env and Gymnasium's, begun at the same states and given the same actions."""

    def __init__(self, env, name):
        self.env = env
        self.theirs = [gym.make(name) for _ in range(env.num_envs)]
        self.seen = np.zeros((env.num_envs, *env.single_observation_space.shape), np.float32)
        self.terminated = self.truncated = 0
        env.reset(torch.ones(env.num_envs, dtype=torch.bool))
        self.begin(range(env.num_envs), seed=3)

    def begin(self, lanes, seed=None):
        for lane in lanes:
            self.seen[lane], _ = self.theirs[lane].reset(seed=None if seed is None else seed + lane)
            self.env.state[:, lane] = torch.from_numpy(self.theirs[lane].unwrapped.state)

    def settle(self):
        """States may differ in a last bit of float64, which is a library's sine. It is not to add up."""
        states = np.stack([one.unwrapped.state for one in self.theirs], 1)
        np.testing.assert_array_max_ulp(self.env.state.numpy() + 8, states + 8, 2)
        self.env.state.copy_(torch.from_numpy(states))

    def step(self, action):
        got = [one.numpy() for one in self.env.step(torch.from_numpy(action))]
        want = [one.step(a)[:4] for one, a in zip(self.theirs, action)]
        for mine, theirs in zip(got, map(np.array, zip(*want))):
            np.testing.assert_array_equal(mine, theirs.astype(mine.dtype))
        self.settle()
        self.seen, _, terminated, truncated = got
        self.terminated, self.truncated = self.terminated + terminated.sum(), self.truncated + truncated.sum()
        over = terminated | truncated
        if over.any():
            before = self.env.state.clone()
            looks = self.env.reset(torch.from_numpy(over))
            assert torch.equal(self.env.state[:, ~over], before[:, ~over]), "a lane that was not to be reset was"
            assert torch.equal(looks, self.env.observe(self.env.state))
            assert (self.env.steps.numpy()[over] == 0).all()
            self.begin(np.flatnonzero(over))


def test_cartpole_is_gymnasiums_over_thousands_of_steps():
    beside, rng = Beside(TorchCartPole(LANES), "CartPole-v1"), np.random.default_rng(0)
    for t in range(1500):
        noise = rng.random(LANES) < (0.02 if t < 1100 else 0.9)  # first upright for 500 steps, then falling soon
        upright = beside.seen[:, 2] + 0.5 * beside.seen[:, 3] > 0
        beside.step(np.where(noise, rng.integers(0, 2, LANES), upright).astype(np.int64))
    assert beside.terminated > 20
    assert beside.truncated > 5


def test_pendulum_is_gymnasiums_over_thousands_of_steps():
    beside, rng = Beside(TorchPendulum(LANES), "Pendulum-v1"), np.random.default_rng(0)
    for _ in range(1001):
        beside.step(rng.uniform(-3, 3, (LANES, 1)).astype(np.float32))  # beyond the bounds, where it clips
    assert beside.truncated == 5 * LANES


@pytest.mark.parametrize("make", [TorchCartPole, TorchPendulum])
def test_first_states_are_uniform_and_follow_the_seed(make):
    env, everyone = make(4096), torch.ones(4096, dtype=torch.bool)
    env.seed(1)
    first = env.reset(everyone)
    bound = torch.tensor(env._high, dtype=torch.float64)[:, None]
    scaled = env.state / bound
    assert -1 <= scaled.min() < -0.99
    assert 0.99 < scaled.max() <= 1
    assert scaled.mean().abs() < 0.05
    assert (scaled.std() - 3**-0.5).abs() < 0.02
    assert not torch.equal(env.reset(everyone), first)
    env.seed(1)
    assert torch.equal(env.reset(everyone), first)


@pytest.mark.parametrize("make", [TorchCartPole, TorchPendulum])
def test_a_step_asks_the_device_nothing_and_keeps_its_memory(make):
    env = make(4)
    address = env.state.data_ptr(), env.steps.data_ptr()
    action = torch.ones(4, *env.single_action_space.shape)
    env.reset(torch.ones(4, dtype=torch.bool))
    env.step(action)
    assert (env.state.data_ptr(), env.steps.data_ptr()) == address
    env.state, env.steps = env.state.to("meta"), env.steps.to("meta")  # there are no numbers to ask for
    shapes = [tuple(one.shape) for one in env.step(action.to("meta"))]
    assert shapes == [(4, *env.single_observation_space.shape), (4,), (4,), (4,)]


def test_a_collector_takes_them():
    with Collector(TorchEnv(TorchCartPole(6, limit=7)), frames_per_batch=60) as c:
        c.set_seed(0)
        batch = c.next()
    assert batch.shape == (6, 10)
    assert batch["next", "truncated"][:, 6].all()
    assert batch["next", "truncated"].sum() == 6
    alive = batch["collector", "traj_ids"][:, 1:] == batch["collector", "traj_ids"][:, :-1]
    assert torch.equal(batch["observation"][:, 1:][alive], batch["next", "observation"][:, :-1][alive])
    assert (batch["observation"][:, 7].abs() <= 0.05).all()


def test_bad_arguments_are_named():
    with pytest.raises(WrongArgument, match="device must name a device, got 'nope'"):
        TorchCartPole(2, device="nope")
    with pytest.raises(WrongArgument, match="num_envs must be a whole number ≥ 1, got 0"):
        TorchCartPole(0)
    with pytest.raises(WrongArgument, match=r"dtype must be a floating-point torch dtype, got torch\.int64"):
        TorchPendulum(2, dtype=torch.int64)
    with pytest.raises(UsageError, match="limit must be a whole number of steps ≥ 1, got 0"):
        TorchPendulum(2, limit=0)
