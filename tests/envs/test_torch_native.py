"""Envs written in torch: the predictable world, and a real one against Gymnasium."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import SerialEnv, TorchEnv
from reap.errors import SpecMismatch, UsageError, WorkerRaised, WrongArgument
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from tests import example_count
from tests.worlds.envs import CountingTorch


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
)
@settings(max_examples=example_count(30), deadline=None)
def test_the_predictable_world(lengths, steps, limit):
    env = TorchEnv(CountingTorch(lengths))
    c = Collector(env, EchoPolicy(), frames_per_batch=steps * len(lengths), max_frames_per_traj=limit)
    world = CountingWorld(lengths, limit=limit)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


class TorchCartPole:
    """Gymnasium's CartPole, in torch."""

    single_observation_space = gym.make("CartPole-v1").observation_space
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, states):
        self.num_envs, self.states = len(states), states
        self.x = torch.zeros(self.num_envs, 4, dtype=torch.float64)

    def reset(self, mask):
        self.x[mask] = self.states[mask]
        return self.x.float()

    def step(self, action):
        assert action.shape == (self.num_envs,)
        x, v, a, w = self.x.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0).double()
        temp = (force + 0.05 * w**2 * a.sin()) / 1.1
        alpha = (9.8 * a.sin() - a.cos() * temp) / (0.5 * (4.0 / 3.0 - 0.1 * a.cos() ** 2 / 1.1))
        acc = temp - 0.05 * alpha * a.cos() / 1.1
        self.x = torch.stack([x + 0.02 * v, v + 0.02 * acc, a + 0.02 * w, w + 0.02 * alpha], 1)
        over = (self.x[:, 0].abs() > 2.4) | (self.x[:, 2].abs() > 12 * 2 * np.pi / 360)
        return self.x.float(), torch.ones(self.num_envs), over, torch.zeros(self.num_envs, dtype=torch.bool)


def test_a_real_one_follows_gymnasium():
    def policy(observation):
        return (observation[..., 2] + observation[..., 3] * 0.3 > 0.02).long()

    makers = [lambda s=s: gym.make("CartPole-v1") for s in range(3)]
    serial = Collector(SerialEnv(3, makers), policy, frames_per_batch=90)
    serial.set_seed(3)
    want = serial.next()
    states = torch.from_numpy(np.stack([e.unwrapped.np_random.uniform(-0.05, 0.05, 4) for e in serial.env.envs])) * 0
    states[:] = want["observation"][:, 0].double()
    got = Collector(TorchEnv(TorchCartPole(states)), policy, frames_per_batch=90).next()
    ends = want["next", "done"][..., 0].int().argmax(1)
    for lane in range(3):
        upto = int(ends[lane]) + 1 if want["next", "done"][lane].any() else 30
        assert torch.allclose(
            got["next", "observation"][lane, :upto], want["next", "observation"][lane, :upto], atol=1e-4
        )
        assert torch.equal(got["action"][lane, :upto], want["action"][lane, :upto])


@pytest.mark.parametrize("form", [lambda o: torch.tensor([1, 0]), lambda o: torch.eye(2)[[1, 0]]])
def test_discrete_actions_as_index_or_scores(form):
    env = TorchCartPole(torch.zeros(2, 4, dtype=torch.float64))
    batch = Collector(TorchEnv(env), form, frames_per_batch=2).next()
    assert batch["next", "observation"][0, 0, 1] > 0 > batch["next", "observation"][1, 0, 1]


def test_what_is_refused():
    with pytest.raises(WrongArgument, match="TorchEnv takes an object with num_envs"):
        TorchEnv(3)

    class Wrong(CountingTorch):
        def look(self):
            return super().look().double()

    with pytest.raises(SpecMismatch, match=r"'observation' as float64\[1, 3\], its space says float32\[3\]"):
        Collector(TorchEnv(Wrong([(3,)])), frames_per_batch=2)

    class Raises(CountingTorch):
        def step(self, action):
            raise OSError("out of memory")

    with pytest.raises(WorkerRaised, match="step 0: env.step raised OSError"):
        Collector(TorchEnv(Raises([(3,)])), frames_per_batch=2).next()
    with pytest.raises(UsageError, match="steps all its lanes at once"):
        c = Collector(TorchEnv(CountingTorch([(1,), (5,)])), EchoPolicy(), frames_per_batch=8, reset_when_done=False)
        c.next()


def test_torch_env_with_an_offset_and_a_state():
    class Offset(CountingTorch):
        single_observation_space = gym.spaces.Dict(state=CountingEnv.observation_space)
        single_action_space = gym.spaces.Discrete(3, start=5)

        def look(self):
            return {"state": super().look()}

        def step(self, action):
            self.got = action
            return super().step(action.unsqueeze(1).float())

    inner = Offset([(4,), (4,)])
    batch = Collector(TorchEnv(inner), lambda observation: torch.tensor([0, 2]), frames_per_batch=4).next()
    assert inner.got.tolist() == [5, 7]
    assert batch["observation"].shape == (2, 2, 3)


def _step_with(change):
    class Wrong(CountingTorch):
        def step(self, action):
            return change(*super().step(action))

    return Wrong([(3,), (2,)])


WRONG_STEPS = {
    "three values": (lambda o, r, te, tr: (o, r, te | tr), "it returned 3 values"),
    "one value": (lambda o, r, te, tr: o, "it returned a Tensor"),
    "floats": (lambda o, r, te, tr: (o, r, te.float(), tr), r"it returned terminated as float32\[2\]"),
    "a plain bool": (lambda o, r, te, tr: (o, r, te, False), "it returned truncated as a bool"),
    "too few rewards": (lambda o, r, te, tr: (o, r[:1], te, tr), r"it returned reward as float32\[1\]"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_step_that_cannot_be_read_is_told_with_what_it_should_be(name):
    change, got = WRONG_STEPS[name]
    wanted = r"env.step must return \(observation, reward, terminated, truncated\), tensors of 2 lanes, both flags bool"
    with pytest.raises(SpecMismatch, match=f"step [01]: {wanted}; {got}"):
        Collector(TorchEnv(_step_with(change)), EchoPolicy(), frames_per_batch=8).next()


def test_a_reset_that_cannot_be_read_is_told():
    class Gymnasiums(CountingTorch):
        def reset(self, mask):
            return super().reset(mask), {}

    with pytest.raises(SpecMismatch, match="env returned 'observation' as a tuple, not as a tensor"):
        Collector(TorchEnv(Gymnasiums([(3,)])), EchoPolicy(), frames_per_batch=8).next()


def test_an_env_in_torch_given_as_it_is():
    with pytest.raises(WrongArgument, match=r"got CountingTorch; .*wrap it, TorchEnv\(CountingTorch\(…\)\)"):
        Collector(CountingTorch([(3,)]), EchoPolicy(), frames_per_batch=8)
