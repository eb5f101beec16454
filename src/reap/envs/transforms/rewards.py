"""Transforms of rewards, and transforms that add an episode's return or length so far, or limit its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap.arguments import whole
from reap.core.env import Env, Rows
from reap.core.slot import Row
from reap.envs.step_limit import STEP_COUNT, StepLimit
from reap.envs.transforms.base import Transform, TransformLanes
from reap.errors import WrongArgument
from reap.spec import AnyKey, Leaf, as_key

Array = np.ndarray[Any, Any]
_NEVER = 2**62  # steps


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WrongArgument(f"{name} must be a number, got {value!r}")
    return float(value)


class ScaleReward(Transform):
    """reward · scale + shift."""

    def __init__(self, scale: float, shift: float = 0.0) -> None:
        self.scale, self.shift = _number("scale", scale), _number("shift", shift)
        if not self.scale:
            raise WrongArgument("scale must not be 0: every reward would be the same")

    def around(self, env: Env) -> Env:
        return _ChangedRewards(env, "ScaleReward", self._change)

    def _change(self, reward: Array) -> Array:
        return reward * self.scale + self.shift

    def inverse(self, reward: Tensor) -> Tensor:
        """Return the env's original rewards."""
        return (reward - self.shift) / self.scale


class ClipReward(Transform):
    """Clip rewards to between `low` and `high`; None: no bound on that side."""

    def __init__(self, low: float | None = -1.0, high: float | None = 1.0) -> None:
        self.low = None if low is None else _number("low", low)
        self.high = None if high is None else _number("high", high)
        if (self.low is None and self.high is None) or (
            self.low is not None and self.high is not None and self.low >= self.high
        ):
            raise WrongArgument(f"low must be less than high, and at most one of them None, got {low!r} and {high!r}")

    def around(self, env: Env) -> Env:
        return _ChangedRewards(env, "ClipReward", self._change)

    def _change(self, reward: Array) -> Array:
        clipped: Array = np.clip(reward, self.low, self.high)
        return clipped


class _ChangedRewards(TransformLanes):
    """An env around another that applies a function to every reward."""

    def __init__(self, env: Env, name: str, change: Any) -> None:
        super().__init__(env, name)
        self._change = change

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        chosen: Any = slice(None) if len(lanes) == self.spec.lanes else list(lanes)
        for reward in row.rewards:
            reward[chosen] = self._change(reward[chosen])
        return ended


class RewardSum(Transform):
    """Adds the sum of an episode's rewards so far, 0 at its beginning. It sums what the transforms before it return.

    Args:
        key: the name of the added observation.
    """

    def __init__(self, key: AnyKey = "episode_reward") -> None:
        self.key = key

    def around(self, env: Env) -> Env:
        return _SummedRewards(env, self.key)


class _SummedRewards(TransformLanes):
    def __init__(self, env: Env, key: AnyKey) -> None:
        (leaf,) = list(env.spec.reward.values())[:1]
        super().__init__(env, "RewardSum", added={as_key(key): Leaf(leaf.shape, torch.float32)})
        self._sum = np.zeros((env.spec.lanes, *leaf.shape))

    def _on_reset(self, lanes: list[int], raw: Rows, into: Rows) -> None:
        self._sum[lanes] = 0.0
        into[self._inner_leaves][lanes] = 0.0

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        chosen = self._frame_lanes(lanes, row)
        self._sum[chosen] += row.rewards[0][chosen]
        row.next[self._inner_leaves][...] = self._sum
        return ended

    def _lane_arrays(self) -> dict[str, Array]:
        return {"sum": self._sum}


class TimeLimit(Transform):
    """Truncates episodes after `max_steps`, and adds `step_count`, the number of steps so far."""

    def __init__(self, max_steps: int, key: AnyKey = STEP_COUNT) -> None:
        self.max_steps, self.key = int(whole("max_steps", max_steps, least=1) or 1), key

    def around(self, env: Env) -> Env:
        return StepLimit(env, self.max_steps, as_key(self.key), transform="TimeLimit")


class StepCounter(Transform):
    """Adds `step_count`: 0 at the beginning of an episode, incremented by each step."""

    def __init__(self, key: AnyKey = STEP_COUNT) -> None:
        self.key = key

    def around(self, env: Env) -> Env:
        return StepLimit(env, _NEVER, as_key(self.key), transform="StepCounter")
