"""`as_env`: turn anything a collector accepts as an env into lanes. Every accepted kind is listed here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec as Registered

from reap.core.env import Env
from reap.envs.adapters.dm import DMEnv, is_dm
from reap.envs.adapters.envpool import EnvPoolEnv, is_envpool
from reap.envs.adapters.gymnasium import GymEnv, GymLanes
from reap.envs.adapters.gymnasium_vector import VectorLanes
from reap.envs.adapters.jax import JaxEnv, is_brax, is_gymnax
from reap.envs.adapters.pettingzoo import PettingZooEnv, is_pettingzoo
from reap.envs.adapters.puffer import PufferLibEnv, is_puffer
from reap.envs.adapters.torch_native import TorchBatch
from reap.envs.base import EnvBase
from reap.envs.step_limit import STEP_COUNT, StepLimit
from reap.envs.torchrl.lanes import is_torchrl, torchrl_lanes
from reap.errors import WrongArgument, WrongState
from reap.spec import Key

# For each foreign library: a test that recognises its envs, and the class that wraps them.
_FOREIGN: tuple[tuple[Callable[[Any], bool], Callable[[Any], EnvBase]], ...] = (
    (is_envpool, EnvPoolEnv),  # before Gymnasium's vector envs, whose class it may have
    (is_dm, DMEnv),
    (is_pettingzoo, PettingZooEnv),
    (is_gymnax, JaxEnv),
    (is_brax, JaxEnv),
    (is_puffer, PufferLibEnv),
)


def as_env(
    source: Any, kwargs: Mapping[str, Any] | None = None, limit: int | None = None, count: Key = STEP_COUNT
) -> Env:
    """Turn anything a collector accepts as an env into lanes that the rollout loop can step.

    With `limit`, episodes are truncated after that many steps, and the step count is an observation under `count`.
    """
    made, kwargs_left = _call_factory(source, kwargs)
    if is_torchrl(made):
        return torchrl_lanes(made, kwargs_left, limit, count)
    env = _as_lanes(made, kwargs_left)
    if type(env) is GymLanes and env.remake is None and not is_env(source):
        env.remake = functools.partial(_rebuild_lane_env, source, kwargs)
    return env if limit is None else StepLimit(env, limit, count)


def _rebuild_lane_env(source: Any, kwargs: Mapping[str, Any] | None, lane: int) -> gym.Env[Any, Any]:
    """Build the env of one lane again from what `as_env` was given, and close the other envs built along with it."""
    env = as_env(source, kwargs)
    assert isinstance(env, GymLanes)
    for other, one in enumerate(env.envs):
        if other != lane:
            one.close()
    return env.envs[lane]


def _as_lanes(source: Any, kwargs: dict[str, Any]) -> Env:
    if kwargs and is_env(source):
        raise WrongState(f"create_env_kwargs {sorted(kwargs)} need a factory or an id; the env is already made")
    if isinstance(source, (str, Registered)):
        return GymEnv(source, **kwargs).lanes_env
    for recognises, wrap in _FOREIGN:
        if recognises(source):
            return wrap(source).lanes_env
    if isinstance(source, EnvBase):
        if source.is_closed:
            raise WrongState(f"{type(source).__name__} is closed; make a new one")
        return source.lanes_env
    if isinstance(source, gym.vector.VectorEnv):
        return VectorLanes(source)
    if isinstance(source, gym.Env):
        return GymLanes([source])
    if isinstance(source, Env):
        return source
    raise WrongArgument(
        f"create_env_fn must be an env, a Gymnasium id or a factory, got {type(source).__name__}{torch_hint(source)}"
    )


def _call_factory(source: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Call `source` if it is a factory. Return the env or id, and the keywords that no factory has consumed yet."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise WrongArgument(f"create_env_kwargs must be a mapping, got {kwargs!r}")
    kwargs = dict(kwargs or {})
    if not callable(source) or is_env(source):
        return source, kwargs
    _check_factory(source, kwargs)
    made = source(**kwargs)
    if callable(made) and not is_env(made):
        raise WrongArgument(f"create_env_fn returned {type(made).__name__}, not an env")
    return made, {}


def _check_factory(source: Any, kwargs: dict[str, Any]) -> None:
    """Raise `WrongArgument` if the factory cannot be called with these keywords, or is a module, not a factory."""
    if isinstance(source, torch.nn.Module):
        hint = torch_hint(source) or ": the env comes first, then the policy"
        raise WrongArgument(f"create_env_fn is {type(source).__name__}, a module{hint}")
    try:
        signature = inspect.signature(source)
    except (TypeError, ValueError):  # callables written in C may have no signature
        return
    try:
        signature.bind(**kwargs)
    except TypeError as cause:
        given = f"the create_env_kwargs {sorted(kwargs)}" if kwargs else "no arguments"
        raise WrongArgument(
            f"create_env_fn is called with {given}, which does not fit its parameters {signature}: {cause}; "
            f"pass its arguments in create_env_kwargs (the policy is the next positional argument)"
        ) from None


def torch_hint(thing: Any) -> str:
    """Return an error hint for an env written in torch that was not wrapped in `TorchEnv`; "" for anything else."""
    torch_env = not isinstance(thing, type) and isinstance(thing, TorchBatch)
    return f"; it looks like an env written in torch: wrap it, TorchEnv({type(thing).__name__}(…))" if torch_env else ""


def is_env(source: Any) -> bool:
    """Whether `source` is an env, even if it is callable too. A class is never an env, whatever members it has."""
    if isinstance(source, type):
        return False
    if isinstance(source, (Env, EnvBase, gym.Env, gym.vector.VectorEnv)):
        return True
    return is_torchrl(source) or any(recognises(source) for recognises, _ in _FOREIGN)
