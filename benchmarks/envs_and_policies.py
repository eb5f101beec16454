"""What is run: envs, and one policy in two dresses.

The plain module takes an observation and returns an action. The probabilistic one is the same network in TorchRL's
ProbabilisticActor and keeps the distribution's parameters and the log-probability as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal


class Greedy(nn.Module):
    """A small policy of few operations, for where the way of the data is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: Tensor) -> Tensor:
        return cast(Tensor, self.net(observation).argmax(-1))


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


class Nested(gym.Env[Any, Any]):
    """A robot's nested observation of eight leaves, episodes of 50 steps: as cheap as such an env can be."""

    observation_space = gym.spaces.Dict(
        {
            name: gym.spaces.Dict(
                {part: gym.spaces.Box(-np.inf, np.inf, (n,), np.float32) for part, n in parts.items()}
            )
            for name, parts in {
                "body": {"position": 3, "velocity": 3, "tilt": 4},
                "hands": {"left": 5, "right": 5},
                "goal": {"position": 3, "kind": 2, "distance": 1},
            }.items()
        }
    )
    action_space = gym.spaces.Discrete(4)
    leaves = [(name, part) for name, parts in observation_space.items() for part in cast(Any, parts)]

    def __init__(self) -> None:
        made = np.random.default_rng(0)
        spaces: Any = self.observation_space.spaces
        self._bank = [
            {
                name: {part: made.standard_normal(leaf.shape).astype(np.float32) for part, leaf in parts.items()}
                for name, parts in spaces.items()
            }
            for _ in range(16)
        ]
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._bank[0], {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._bank[self._t % 16], float(action), False, self._t >= 50, {}


class Crowd:
    """32 agents in one parallel PettingZoo world, days of 50 steps, one agent leaving on each of the last 31."""

    metadata = {"name": "crowd", "is_parallelizable": True}
    agents: list[str]

    def __init__(self, count: int = 32, day: int = 50) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(count)]
        self.agents = []
        self._seen = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
        self._acts = gym.spaces.Discrete(4)
        self._bank = np.random.default_rng(0).standard_normal((16, count, 8)).astype(np.float32)
        self._day, self._t = day, 0

    def observation_space(self, agent: str) -> gym.spaces.Box:
        return self._seen

    def action_space(self, agent: str) -> gym.spaces.Discrete:
        return self._acts

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self._t = 0
        self.agents = list(self.possible_agents)
        return dict(zip(self.agents, self._bank[0])), {}

    def step(self, actions: Any) -> Any:
        self._t += 1
        acting = self.agents
        left = max(1, self._day - self._t) if self._t < self._day else 0
        self.agents = acting[:left]
        seen = dict(zip(acting, self._bank[self._t % 16]))
        over = dict.fromkeys(acting, False)
        over.update(dict.fromkeys(acting[left:], True))
        return seen, dict(zip(acting, map(float, actions.values()))), over, dict.fromkeys(acting, False), {}

    def close(self) -> None: ...


class Flat(nn.Module):
    """Images as rows of numbers in [0, 1]; other observations as float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(-3).float() / 255 if x.dtype is torch.uint8 else x.float()


def atari(name: str) -> gym.Env[Any, Any]:
    """Four grey frames of 84×84, every fourth one seen."""
    import ale_py

    gym.register_envs(ale_py)
    seen = gym.wrappers.AtariPreprocessing(gym.make(name, frameskip=1), noop_max=30, frame_skip=4)
    return gym.wrappers.FrameStackObservation(seen, 4)


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


class NaturePolicy(nn.Module):
    """The convolutional network of the Nature paper on four frames of 84×84."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, choices)),
        )

    def forward(self, observation: Tensor) -> Tensor:
        return Categorical(logits=self.net(observation.float() / 255)).sample()


class LargePolicy(DiscretePolicy):
    """Ten million parameters, most of them in a table of which a decision looks up one row: as quick as a small one."""

    def __init__(self, rows: int = 156_250) -> None:
        super().__init__(mlp(4, 2))
        self.table = nn.Embedding(rows, 64)

    def forward(self, observation: Tensor) -> Tensor:
        row = self.table(torch.zeros(observation.shape[:-1], dtype=torch.int64))
        return Categorical(logits=self.net(observation) + row[..., :2]).sample()


class GaussianPolicy(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> Tensor:
        loc, scale = self.net(observation)
        return Normal(loc, scale).sample()


class NestedPolicy(nn.Module):
    """Takes the leaves one by one, as a TensorDictModule hands them over."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(26, 4)

    def forward(self, *leaves: Tensor) -> Tensor:
        return Categorical(logits=self.net(torch.cat(leaves, -1))).sample()


class RecurrentPolicy(nn.Module):
    """An LSTM that declares what it carries."""

    carry = {"hidden": torch.zeros(64), "cell": torch.zeros(64)}

    def __init__(self, inputs: int, choices: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(inputs, 64)
        self.head = nn.Linear(64, choices)

    def forward(self, observation: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, cell = self.lstm(observation, (hidden, cell))
        return Categorical(logits=self.head(hidden)).sample(), hidden, cell


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
        if self.env.startswith("ALE/"):
            return atari(self.env)
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
            if self.env.startswith("ALE/"):
                return NaturePolicy(choices)
            body = mlp(inputs, choices)
            net = nn.Sequential(Flat(), *body) if self.key == "pixels" else body
            if not probabilistic:
                return PixelPolicy(net) if self.key == "pixels" else DiscretePolicy(net)
            params, family = ["logits"], Categorical
        from benchmarks.actors import sampled

        return sampled(net, params, family, key=self.key, return_log_prob=True)
