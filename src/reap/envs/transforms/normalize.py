"""Normalise observations and rewards by running statistics of all lanes and workers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from reap.core.env import Env, Rows
from reap.core.measuring.moments import LearnedStatistics, RunningStatistics
from reap.core.slot import Row
from reap.envs.transforms.base import LearningLanes, Transform, chosen_keys, float_leaf
from reap.errors import UsageError, WrongArgument
from reap.spec import AnyKey, Key, as_key, show, show_keys

Array = np.ndarray[Any, Any]


class _Normalizer(Transform):
    """The base of both normalisers: their statistics, and whether these are still learned."""

    def __init__(self, epsilon: float, clip: float | None) -> None:
        for name, value in (("epsilon", epsilon), ("clip", clip)):
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if not number and not (value is None and name == "clip"):
                raise WrongArgument(f"{name} must be a positive number, got {value!r}")
        self.epsilon, self.clip, self.training = epsilon, clip, True
        self._learned = LearnedStatistics()

    def frozen(self) -> Self:
        """Return a copy for evaluation, which reads these statistics, now and as they change, but never updates them.

        >>> evaluation = TransformedEnv(make_env(), normalize.frozen())
        """
        other = copy.copy(self)
        other.training = False
        return other

    def statistics(self, key: AnyKey = "observation") -> RunningStatistics:
        """Return the running mean, variance and count of the values under one key."""
        known = self._learned.found
        if as_key(key) not in known:
            raise UsageError(f"no statistics for {show(as_key(key))} yet; there are statistics for {show_keys(known)}")
        return known[as_key(key)]

    def learned_of(self, key: Key, shape: tuple[int, ...]) -> RunningStatistics:
        """Return the statistics for a key, after a check that their values have this shape."""
        found = self._learned.of(key)
        try:
            found.expect(shape)
        except ValueError as error:
            name = type(self).__name__
            raise UsageError(f"{name} of {show(key)}: {error}; give each kind of env its own {name}") from None
        return found


class NormalizeObservation(_Normalizer):
    """(observation − mean) / √(variance + epsilon), by the running mean and variance of all observations.

    Every observation counts once, as soon as the env returns it: first those of all lanes in a step, then the first
    observations of the lanes that were reset. Statistics cover all lanes and, updated between rollouts, all workers.

    Args:
        keys: which observations to normalise; None: all tensors except counters and infos.
        epsilon: added to the variance.
        clip: clip results to ± this value; None: do not clip.
    """

    def __init__(
        self, keys: Collection[AnyKey] | AnyKey | None = None, *, epsilon: float = 1e-8, clip: float | None = None
    ) -> None:
        super().__init__(epsilon, clip)
        self.keys = keys

    def around(self, env: Env) -> Env:
        return _NormalizedObservations(env, self)

    def inverse(self, observation: Tensor, key: AnyKey = "observation") -> Tensor:
        """Return the env's original observations; exact only where nothing was clipped."""
        found = self.statistics(key)
        mean, scale = (
            torch.as_tensor(value, device=observation.device) for value in (found.mean, found.scale(self.epsilon))
        )
        return (observation * scale + mean).to(observation.dtype)


class _NormalizedObservations(LearningLanes):
    def __init__(self, env: Env, transform: NormalizeObservation) -> None:
        name = "NormalizeObservation"
        keys = chosen_keys(name, transform.keys, env.spec)
        own = env.spec.observation
        learned = [transform.learned_of(key, own[key].shape) for key in keys]
        changed = {key: float_leaf(own[key]) for key in keys}
        super().__init__(env, name, learned, training=transform.training, changed=changed)
        places = {key: at for at, key in enumerate(own)}
        self._parts = [
            (places[key], one, np.zeros((env.spec.lanes, *own[key].shape))) for key, one in zip(keys, learned)
        ]
        self._epsilon, self._clip = transform.epsilon, transform.clip

    def _on_reset(self, lanes: list[int], raw: Rows, into: Rows) -> None:
        for at, statistics, _ in self._parts:
            values = raw[at][lanes].astype(np.float64)
            if self._training:
                statistics.update(values)
            into[at][lanes] = self._normalised(values, statistics)

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        whole = len(lanes) == self.spec.lanes and row.mask is None
        chosen = None if whole else self._frame_lanes(lanes, row)
        for at, statistics, memory in self._parts:
            if whole:
                memory[...] = raw[at]
                values = memory
            else:
                values = raw[at][chosen].astype(np.float64)
            if self._training and len(values):
                statistics.update(values)
            row.next[at][... if whole else chosen] = self._normalised(values, statistics)
        return ended

    def _normalised(self, values: Array, statistics: RunningStatistics) -> Array:
        """Normalise `values` in place, and return them."""
        values -= statistics.mean
        values /= statistics.scale(self._epsilon)
        if self._clip is not None:
            np.clip(values, -self._clip, self._clip, out=values)
        return values


class NormalizeReward(_Normalizer):
    """reward / √(variance + epsilon), by the running variance of the lanes' discounted returns.

    A lane's return is G ← γ·G + reward, and is reset to 0 after an episode's end. Every lane's G counts once per step,
    including the last step of an episode. Rewards are not shifted: a mean of zero would change what is good.

    Args:
        gamma: the discount.
        epsilon: added to the variance.
        clip: clip results to ± this value; None: do not clip.
    """

    def __init__(self, gamma: float = 0.99, *, epsilon: float = 1e-8, clip: float | None = None) -> None:
        super().__init__(epsilon, clip)
        if isinstance(gamma, bool) or not isinstance(gamma, (int, float)) or not 0 <= gamma <= 1:
            raise WrongArgument(f"gamma must lie between 0 and 1, got {gamma!r}")
        self.gamma = gamma

    def around(self, env: Env) -> Env:
        return _NormalizedRewards(env, self)

    def inverse(self, reward: Tensor) -> Tensor:
        """Return the env's original rewards; exact only where nothing was clipped."""
        scale = torch.as_tensor(self.statistics("reward").scale(self.epsilon), device=reward.device)
        return (reward * scale).to(reward.dtype)


class _NormalizedRewards(LearningLanes):
    def __init__(self, env: Env, transform: NormalizeReward) -> None:
        leaves = env.spec.reward
        if len(leaves) != 1 or next(iter(leaves.values())).shape != (1,):
            raise UsageError(f"NormalizeReward is for one reward per lane; this env has {list(leaves)}")
        (self._return_statistics,) = learned = [transform.learned_of(("reward",), ())]
        super().__init__(env, "NormalizeReward", learned, training=transform.training)
        self._gamma, self._epsilon, self._clip = transform.gamma, transform.epsilon, transform.clip
        self._return = np.zeros(env.spec.lanes)

    def _on_reset(self, lanes: list[int], raw: Rows, into: Rows) -> None:
        self._return[lanes] = 0.0

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        chosen = self._frame_lanes(lanes, row)
        reward = row.reward[chosen].astype(np.float64)
        if self._training:
            values = self._return[chosen] * self._gamma
            values += reward
            self._return[chosen] = values
            if len(values):
                self._return_statistics.update(values)
        reward /= self._return_statistics.scale(self._epsilon)
        if self._clip is not None:
            np.clip(reward, -self._clip, self._clip, out=reward)
        row.reward[chosen] = reward
        return ended

    def _lane_arrays(self) -> dict[str, Array]:
        return {"return": self._return}
