"""Policies that draw, and what it means that two runs are the same."""

from __future__ import annotations

import io

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical, Normal

from reap.envs import GymEnv, SerialEnv


class Samples(nn.Module):
    def __init__(self, seen, choices=0, numbers=0):
        super().__init__()
        self.net, self.choices = nn.Linear(seen, choices or numbers), choices

    def forward(self, observation):
        out = self.net(observation.float())
        return Categorical(logits=out).sample() if self.choices else Normal(out, 1.0).sample()


def same(a, b):
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key in a.keys(True, True):
        one, other = a.get(key), b.get(key)
        equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one.tolist() == other.tolist()
        assert equal, key


class Noisy(nn.Module):
    """What it wrote at one step decides about the next."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, tensordict):
        before = tensordict.get("noise", torch.zeros(*tensordict.batch_size, 1))
        tensordict["noise"] = 0.9 * before + torch.randn(*tensordict.batch_size, 1)
        tensordict["action"] = self.net(tensordict["observation"]) + tensordict["noise"]
        return tensordict


def gym_lanes(name, lanes):
    return lambda: SerialEnv(lanes, lambda: GymEnv(name, categorical_action_encoding=True))


def through_a_file(state):
    """Read without executing anything."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def goes_on(make, *, batches=3):
    first = make()
    first.set_seed(7)
    for _ in range(batches):
        first.next()
    state = through_a_file(first.state_dict())
    expected = [first.next().clone() for _ in range(batches)]
    counted = first.stats()
    first.shutdown()
    second = make()
    second.next()  # another beginning, of which nothing is left
    second.load_state_dict(state)
    for batch in expected:
        same(second.next(), batch)
    for name in ("frames", "episodes", "mean_return", "mean_length"):
        assert second.stats()[name] == counted[name], name
    second.shutdown()


class Own(gym.Env):
    """Cannot be pickled, and says itself what it is in the middle of."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.t, self.never = 0, (n for n in range(3))

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return [self.t], {}

    def step(self, action):
        self.t += 1
        return [self.t], 1.0, self.t >= 10, False, {}

    def get_state(self):
        return self.t

    def set_state(self, t):
        self.t = t


class Secretive(Own):
    get_state = set_state = None
