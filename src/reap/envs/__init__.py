"""Environments: `GymEnv`, `SerialEnv`, one wrapper per supported library, and `as_env`, which converts any of them."""

from __future__ import annotations

from tensordict.nn import set_interaction_type as set_exploration_type

from reap.core.policies.exploration import ExplorationType
from reap.envs.accept import as_env
from reap.envs.adapters.dm import DMEnv
from reap.envs.adapters.envpool import EnvPoolEnv
from reap.envs.adapters.gymnasium import GymEnv
from reap.envs.adapters.jax import JaxEnv
from reap.envs.adapters.pettingzoo import PettingZooEnv
from reap.envs.adapters.puffer import PufferLibEnv
from reap.envs.adapters.torch_envs import TorchCartPole, TorchPendulum
from reap.envs.adapters.torch_native import TorchEnv
from reap.envs.base import EnvBase
from reap.envs.parallel.async_pool import AsyncEnvPool
from reap.envs.parallel.parallel_env import ParallelEnv
from reap.envs.serial import SerialEnv

GymWrapper = GymEnv

__all__ = [
    "AsyncEnvPool",
    "DMEnv",
    "EnvBase",
    "EnvPoolEnv",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "JaxEnv",
    "ParallelEnv",
    "PettingZooEnv",
    "PufferLibEnv",
    "SerialEnv",
    "TorchCartPole",
    "TorchEnv",
    "TorchPendulum",
    "as_env",
    "set_exploration_type",
]
