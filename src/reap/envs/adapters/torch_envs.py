"""CartPole and Pendulum in torch: all lanes at once, on any device, with the same results as Gymnasium's.

    state [S, N] float64 ──► dynamics(state, action), pure ──► the same memory again
                                                      └──► observation [N, …] float32, reward, terminated, truncated

Guarantees:
- the same operations in the same order and the same precision as Gymnasium's `CartPole-v1` and `Pendulum-v1`: results
  are equal, except for the last bit where the two libraries' sine or cosine differ;
- nothing inside `step` and `reset` synchronises with the device, and state keeps its address: a CUDA graph can record
  them. First states are drawn from `generator`; the code that records a graph must register it with the graph.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from reap.core.device.devices import named_device
from reap.errors import UsageError, WrongArgument


class TorchClassic(abc.ABC):
    """The base of the classic-control envs: a state, a step counter, and first states drawn at random."""

    keeps_nothing = True  # actions and masks are read, not kept
    single_observation_space: gym.Space[Any]
    single_action_space: gym.Space[Any]
    limit: int  # steps after which Gymnasium truncates an episode
    _high: tuple[float, ...]  # first states are uniform between -high and high

    def __init__(
        self,
        num_envs: int,
        *,
        device: Any = None,
        dtype: torch.dtype = torch.float64,
        limit: int | None = None,
        compile: bool = False,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise WrongArgument(f"num_envs must be a whole number ≥ 1, got {num_envs!r}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise WrongArgument(f"dtype must be a floating-point torch dtype, got {dtype!r}")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise UsageError(f"limit must be a whole number of steps ≥ 1, got {limit!r}")
        self.num_envs, self.device = num_envs, named_device("device", device) or torch.device("cpu")
        self.limit = type(self).limit if limit is None else limit
        self.generator = torch.Generator(self.device)
        self.generator.seed()
        self._advance = torch.compile(self._after, dynamic=False) if compile else self._after
        self._bound = torch.tensor(self._high, dtype=dtype, device=self.device)[:, None]
        self.state = torch.zeros(len(self._high), num_envs, dtype=dtype, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def seed(self, seed: int) -> None:
        """Seed the generator that first states are drawn from."""
        self.generator.manual_seed(seed)

    def reset(self, mask: Tensor) -> Tensor:
        """Begin new episodes where `mask` is True, and return the observations of all lanes."""
        unit = torch.rand(self.state.shape, generator=self.generator, dtype=self.state.dtype, device=self.device)
        self.state.copy_(torch.where(mask, (2 * unit - 1) * self._bound, self.state))
        self.steps.masked_fill_(mask, 0)
        return self.observe(self.state)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Step every lane, and return observation, reward, terminated and truncated."""
        following, observation, reward, terminated = self._advance(self.state, action)
        self.state.copy_(following)
        self.steps += 1
        return observation, reward, terminated, self.steps >= self.limit

    @classmethod
    def _after(cls, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        following, reward, terminated = cls.dynamics(state, action)
        return following, cls.observe(following), reward, terminated

    @staticmethod
    @abc.abstractmethod
    def observe(state: Tensor) -> Tensor:
        """Return the observation float32 `[N, …]` of a state `[S, N]`."""

    @staticmethod
    @abc.abstractmethod
    def dynamics(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next state, the reward float32 `[N]` and whether the episode is over. Pure: changes no input."""


_ANGLE, _PLACE = 12 * 2 * math.pi / 360, 2.4


class TorchCartPole(TorchClassic):
    """`CartPole-v1`, many lanes in torch. The state is position, velocity, angle, angular velocity.

    >>> collector = Collector(TorchEnv(TorchCartPole(4096)), policy, frames_per_batch=4096 * 32)

    Args:
        num_envs: how many lanes.
        device: where they live.
        dtype: precision of the state; float64 is Gymnasium's, float32 is faster.
        limit: truncate episodes at this length, in place of 500.
        compile: fuse a step with torch.compile; many times fewer kernels, last bits may differ from Gymnasium's.
    """

    _edge = np.array([_PLACE * 2, np.inf, _ANGLE * 2, np.inf], np.float32)
    single_observation_space = gym.spaces.Box(-_edge, _edge, dtype=np.float32)
    single_action_space = gym.spaces.Discrete(2)
    limit = 500
    _high = (0.05,) * 4

    @staticmethod
    def observe(state: Tensor) -> Tensor:
        return state.T.to(torch.float32, memory_format=torch.contiguous_format)

    @staticmethod
    def dynamics(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gravity, cart, pole, length, tau = 9.8, 1.0, 0.1, 0.5, 0.02
        mass, moment = pole + cart, pole * length
        x, speed, angle, spin = state.unbind()
        force = (action.reshape(-1) == 1).to(state.dtype) * 20.0 - 10.0
        cos, sin = angle.cos(), angle.sin()
        push = (force + moment * spin.square() * sin) / mass
        turn = (gravity * sin - cos * push) / (length * (4.0 / 3.0 - pole * cos.square() / mass))
        pull = push - moment * turn * cos / mass
        x, speed = x + tau * speed, speed + tau * pull
        angle, spin = angle + tau * spin, spin + tau * turn
        over = (x < -_PLACE) | (x > _PLACE) | (angle < -_ANGLE) | (angle > _ANGLE)
        return torch.stack([x, speed, angle, spin]), torch.ones_like(x, dtype=torch.float32), over


class TorchPendulum(TorchClassic):
    """`Pendulum-v1`, many lanes in torch. The state is angle and angular velocity.

    >>> collector = Collector(TorchEnv(TorchPendulum(64)), policy, frames_per_batch=6400)

    Args:
        num_envs: how many lanes.
        device: where they live.
        dtype: precision of the state; float64 is Gymnasium's, float32 is faster.
        limit: truncate episodes at this length, in place of 200.
        compile: fuse a step with torch.compile; many times fewer kernels, last bits may differ from Gymnasium's.
    """

    _edge = np.array([1.0, 1.0, 8.0], np.float32)
    single_observation_space = gym.spaces.Box(-_edge, _edge, dtype=np.float32)
    single_action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
    limit = 200
    _high = (math.pi, 1.0)

    @staticmethod
    def observe(state: Tensor) -> Tensor:
        angle, spin = state.unbind()
        return torch.stack([angle.cos(), angle.sin(), spin], 1).to(torch.float32)

    @staticmethod
    def dynamics(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, spin = state.unbind()
        torque = action.reshape(-1).to(torch.float32).clamp(-2.0, 2.0)  # in single precision, as in Gymnasium
        upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = upright.square() + 0.1 * spin.square() + 0.001 * torque.square()
        spin = (spin + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        over = torch.zeros_like(spin, dtype=torch.bool)
        return torch.stack([angle + spin * 0.05, spin]), (-cost).to(torch.float32), over
