"""What `gymnasium.make` puts around an env, left out of the step once it can have no effect any more.

    make("X") = TimeLimit(OrderEnforcing(PassiveEnvChecker(X)))
    env.step  ──►  X.step, and TimeLimit's count on the TimeLimit itself

OrderEnforcing asks whether there was a reset, which stays so after the first; PassiveEnvChecker looks at the first
reset and the first two steps. From then on both only pass on what they are given. The env objects stay as they are:
nobody else's `env.step` is another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

_DONE = {OrderEnforcing: ("_has_reset",), PassiveEnvChecker: ("checked_reset", "checked_step", "checked_data_reuse")}


def unchecked_step(env: gym.Env[Any, Any]) -> Callable[[Any], Any] | None:
    """`env.step` without these checks; `env.step` itself where there are none; None while they have not been made.

    They are left out from the outside inwards, up to the first wrapper that is of another kind: a user's stays, and
    sees all that happens inside it.
    """
    limit: Any = None
    inner: Any = env
    checks = 0
    while "step" not in vars(inner):
        kind = type(inner)
        if kind is TimeLimit and limit is None and {"_elapsed_steps", "_max_episode_steps"} <= vars(inner).keys():
            limit = inner
        elif kind in _DONE and not vars(inner).keys().isdisjoint(_DONE[kind]):  # versions have more or fewer of them
            if not all(vars(inner).get(flag, True) for flag in _DONE[kind]):
                return None
            checks += 1
        else:
            break
        inner = inner.env
    if not checks:
        return env.step
    if limit is None:
        return lambda action: inner.step(action)  # looked up each time: somebody may replace it

    def step(action: Any) -> Any:
        told = inner.step(action)
        limit._elapsed_steps += 1
        if limit._elapsed_steps < limit._max_episode_steps:
            return told
        observation, reward, terminated, _, info = told
        return observation, reward, terminated, True, info

    return step
