"""Gymnasium ids: resolved in the caller's process, so that an env registered there works in every worker process.

"MyEnv-v0" ──► the caller's registry ──► EnvSpec ──► a worker: gymnasium.make(spec)
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id

from reap.errors import UsageError, missing

_ATARI = "ALE"


def registered(name: str) -> EnvSpec:
    """Return Gymnasium's spec for this id. `ALE/…` ids need no import of ale_py; "module:id" imports the module."""
    module, _, plain = name.rpartition(":")
    if module:
        importlib.import_module(module)
    try:
        space, short, version = parse_env_id(plain)
        if space == _ATARI and plain not in gym.registry:
            _register_atari()
        if version is None:
            version = find_highest_version(space, short)
            plain = plain if version is None else get_env_id(space, short, version)
        return gym.spec(plain)
    except gym.error.Error as cause:
        raise UsageError(
            f"Gymnasium knows no env {name!r} in this process: {cause} Register it here (gymnasium.register, or import "
            f"the package that does), or give a factory"
        ) from cause


def _register_atari() -> None:
    try:
        ale = importlib.import_module("ale_py")
    except ImportError as cause:
        raise missing("ale_py", "atari") from cause
    gym.register_envs(ale)


def for_workers(source: Any) -> Any:
    """Resolve an id to its spec, so that a worker can make the env. Return anything but a string unchanged."""
    if not isinstance(source, str):
        return source
    spec = registered(source)
    module, _, attribute = spec.entry_point.partition(":") if isinstance(spec.entry_point, str) else ("", "", "")
    if module in ("__main__", "__mp_main__"):  # `__main__` is another module in a worker
        return dataclasses.replace(spec, entry_point=getattr(sys.modules[module], attribute))
    return spec
