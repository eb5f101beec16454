"""Skip the wrappers that `gymnasium.make` puts around an env, once they have no effect any more.

    make("X") = TimeLimit(OrderEnforcing(PassiveEnvChecker(X)))
    env.step  ──►  X.step, and TimeLimit's count on the TimeLimit itself

OrderEnforcing checks that there was a reset, which holds forever after the first. PassiveEnvChecker checks the first
reset and the first two steps. From then on both only pass calls on. The env objects are not modified: `env.step` is
unchanged for all other callers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

_DONE = {OrderEnforcing: ("_has_reset",), PassiveEnvChecker: ("checked_reset", "checked_step", "checked_data_reuse")}


def unchecked_step(env: gym.Env[Any, Any]) -> Callable[[Any], Any] | None:
    """Return a step without these checks: `env.step` if the env has none, None until the checks have passed.

    Wrappers are skipped from the outermost inwards, up to the first of another kind, so that a user's wrapper still
    sees every step of the env inside it.
    """
    limit: Any = None
    inner: Any = env
    checks = 0
    while "step" not in vars(inner):
        kind = type(inner)
        if kind is TimeLimit and limit is None and {"_elapsed_steps", "_max_episode_steps"} <= vars(inner).keys():
            limit = inner
        elif kind in _DONE and not vars(inner).keys().isdisjoint(_DONE[kind]):  # versions differ in their flags
            if not all(vars(inner).get(flag, True) for flag in _DONE[kind]):
                return None
            checks += 1
        else:
            break
        inner = inner.env
    if not checks:
        return env.step
    if limit is None:
        return lambda action: inner.step(action)  # looked up at each step, since it may be replaced

    def step(action: Any) -> Any:
        told = inner.step(action)
        limit._elapsed_steps += 1
        if limit._elapsed_steps < limit._max_episode_steps:
            return told
        observation, reward, terminated, _, info = told
        return observation, reward, terminated, True, info

    return step
