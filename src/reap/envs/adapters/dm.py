"""dm_env: envs with DeepMind's interface (dm_control and others), converted to Gymnasium envs and then to lanes.

last step with discount 0 ──► terminated        last step with any other discount ──► truncated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from reap.envs.adapters.gymnasium import GymEnv
from reap.errors import UsageError, WrongArgument


def space_of(spec: Any) -> gym.Space[Any]:
    """Convert a dm_env spec, or a nest of them, to a Gymnasium space."""
    if isinstance(spec, Mapping):
        return gym.spaces.Dict({str(name): space_of(part) for name, part in spec.items()})
    if isinstance(spec, (list, tuple)):
        return gym.spaces.Tuple([space_of(part) for part in spec])
    if hasattr(spec, "num_values"):
        return gym.spaces.Discrete(int(spec.num_values))
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "fiub":
        raise UsageError(f"spec {spec} has dtype {dtype}, which has no tensor form")
    if dtype.kind == "b":
        return gym.spaces.Box(0, 1, tuple(spec.shape), np.int8)
    if hasattr(spec, "minimum"):
        low, high = (np.broadcast_to(np.asarray(x, dtype), spec.shape) for x in (spec.minimum, spec.maximum))
    elif dtype.kind == "f":
        low, high = (np.full(spec.shape, x, dtype) for x in (-np.inf, np.inf))
    else:
        info = np.iinfo(dtype)
        low, high = (np.full(spec.shape, x, dtype) for x in (info.min, info.max))
    return gym.spaces.Box(low, high, tuple(spec.shape), dtype.type)


def is_dm(thing: Any) -> bool:
    """Whether this is a `dm_env.Environment`, without importing dm_env."""
    return all(callable(getattr(thing, name, None)) for name in ("observation_spec", "action_spec", "reward_spec"))


class DmAsGym(gym.Env[Any, Any]):
    """Gymnasium's interface to a `dm_env.Environment`."""

    def __init__(self, env: Any) -> None:
        if not all(hasattr(env, name) for name in ("observation_spec", "action_spec", "reset", "step")):
            raise WrongArgument(f"DMEnv takes a dm_env.Environment, got {type(env).__name__}")
        self.env = env
        self.observation_space = space_of(env.observation_spec())
        self.action_space = space_of(env.action_spec())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed(seed)
        return self._observation(self.env.reset().observation), {}

    def _seed(self, seed: int) -> None:
        """Seed the env by replacing its generator `_random`, as in dm_control's tasks: dm_env has no call for it."""
        task = getattr(self.env, "task", getattr(self.env, "_task", None))
        holder = next(
            (h for h in (task, self.env) if isinstance(getattr(h, "_random", None), np.random.RandomState)), None
        )
        if holder is None:
            raise UsageError(
                f"{type(self.env).__name__} cannot be seeded from outside; give it its seed when making it"
            )
        holder._random = np.random.RandomState(seed % 2**32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        step = self.env.step(action)
        last = bool(step.last())
        over = last and float(step.discount or 0.0) == 0.0
        reward = 0.0 if step.reward is None else float(step.reward)
        return self._observation(step.observation), reward, over, last and not over, {}

    def _observation(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): self._observation(part) for name, part in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return tuple(self._observation(part) for part in value)
        array = np.asarray(value)
        return array.astype(np.int8) if array.dtype == np.bool_ else array

    def close(self) -> None:
        self.env.close()


class DMEnv(GymEnv):
    """An env with the dm_env interface, for instance from dm_control.

    >>> env = DMEnv(suite.load("cartpole", "balance"))

    Args:
        env: a `dm_env.Environment`.
        **options: the options of `GymEnv`.
    """

    def __init__(self, env: Any, **options: Any) -> None:
        super().__init__(DmAsGym(env), **options)
