"""What is run: envs, and one policy in two dresses.

The plain module takes an observation and returns an action. The probabilistic one is the same network as
TensorDictModules and keeps the distribution's parameters and the log-probability as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Normal


class Pixels(gym.Env[Any, Any]):
    """64×64×3 frames that move, episodes of 200 steps: as cheap as a pixel env can be, so storing dominates."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self._bank = np.random.default_rng(0).integers(0, 256, (16, 64, 64, 3), np.uint8)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._bank[0].copy(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._bank[self._t % 16].copy(), float(action), False, self._t >= 200, {}


class Flat(nn.Module):
    """Images as rows of numbers in [0, 1]; other observations as float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(-3).float() / 255 if x.dtype is torch.uint8 else x.float()


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    return nn.Sequential(*layers)


class DiscretePolicy(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> Tensor:
        return Categorical(logits=self.net(observation)).sample()


class PixelPolicy(DiscretePolicy):
    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels)


class GaussianPolicy(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> Tensor:
        loc, scale = self.net(observation)
        return Normal(loc, scale).sample()


class LocScale(nn.Module):
    def __init__(self, net: nn.Module, actions: int) -> None:
        super().__init__()
        self.net = net
        self.log_scale = nn.Parameter(torch.zeros(actions))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc = self.net(x)
        return loc, self.log_scale.exp().expand_as(loc)


@dataclass(frozen=True)
class Case:
    """One env with so many lanes; `steps` per batch."""

    name: str
    env: str
    lanes: int
    steps: int
    key: str = "observation"
    continuous: bool = False

    @property
    def frames(self) -> int:
        return self.lanes * self.steps

    def make(self) -> gym.Env[Any, Any]:
        return Pixels() if self.env == "pixels" else gym.make(self.env)

    def policy(self, *, probabilistic: bool) -> Any:
        """The policy, with the same weights every time."""
        torch.manual_seed(0)
        space = self.make()
        inputs = int(np.prod(space.observation_space.shape or (1,)))
        if self.continuous:
            actions = int(np.prod(space.action_space.shape or (1,)))
            net: nn.Module = LocScale(nn.Sequential(Flat(), mlp(inputs, actions)), actions)
            if not probabilistic:
                return GaussianPolicy(net)
            params, family = ["loc", "scale"], cast(Any, Normal)
        else:
            assert isinstance(space.action_space, gym.spaces.Discrete)
            choices = int(space.action_space.n)
            body = mlp(inputs, choices)
            net = nn.Sequential(Flat(), *body) if self.key == "pixels" else body
            if not probabilistic:
                return PixelPolicy(net) if self.key == "pixels" else DiscretePolicy(net)
            params, family = ["logits"], Categorical
        return ProbabilisticTensorDictSequential(
            TensorDictModule(net, in_keys=[self.key], out_keys=params),
            ProbabilisticTensorDictModule(
                in_keys=params, out_keys=["action"], distribution_class=family, return_log_prob=True
            ),
        )


CASES = [
    Case("CartPole-v1, 1 lane", "CartPole-v1", 1, 512),
    Case("CartPole-v1, 8 lanes", "CartPole-v1", 8, 128),
    Case("CartPole-v1, 32 lanes", "CartPole-v1", 32, 64),
    Case("CartPole-v1, 128 lanes", "CartPole-v1", 128, 64),
    Case("HalfCheetah-v5, 8 lanes", "HalfCheetah-v5", 8, 64, continuous=True),
    Case("pixels 64×64×3, 8 lanes", "pixels", 8, 64, key="pixels"),
]
