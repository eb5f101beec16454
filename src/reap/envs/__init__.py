"""Environments: `GymEnv`, `SerialEnv`, and whatever a collector accepts as an env."""

from __future__ import annotations

from tensordict.nn import set_interaction_type as set_exploration_type

from reap.core.exploration import ExplorationType
from reap.envs.accept import as_env
from reap.envs.base import EnvBase
from reap.envs.dm import DMEnv
from reap.envs.envpool import EnvPoolEnv
from reap.envs.gymnasium import GymEnv
from reap.envs.jax import JaxEnv
from reap.envs.parallel import ParallelEnv
from reap.envs.pettingzoo import PettingZooEnv
from reap.envs.puffer import PufferLibEnv
from reap.envs.serial import SerialEnv
from reap.envs.torch_envs import TorchCartPole, TorchPendulum
from reap.envs.torch_native import TorchEnv

GymWrapper = GymEnv

__all__ = [
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
