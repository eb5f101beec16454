"""Atari games: skip drawing a screen that is not used.

    game.step(action)  =  the emulator acts (50 µs), draws its screen (20 µs), returns reward, flags and info
    undrawn            =  the emulator acts,                                   returns reward, flags and info

DQN repeats an action for four frames, and three of their screens are not used. During such a step the game's method
that reads the screen is replaced by one that returns `UNDRAWN`; the rest is the game's own step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

UNDRAWN = object()  # stands for the observation of a step whose screen was not drawn
_SCREEN_METHOD = "_get_obs"
_PASSIVE = (OrderEnforcing, PassiveEnvChecker, TimeLimit)  # after their checks these do not read observations


def undrawn_step(env: gym.Env[Any, Any], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `step` (the step of `env` without its checks) in a form that draws no screen; or `step`, unchanged.

    The screen is left out only if `env` is one of ale_py's own games and no wrapper around it could read observations.
    """
    inner: Any = env
    while type(inner) in _PASSIVE:
        inner = inner.env
    kind = type(inner)
    if kind.__name__ != "AtariEnv" or not kind.__module__.startswith("ale_py."):
        return step
    if any(getattr(vars(kind).get(name), "__module__", None) != kind.__module__ for name in ("step", _SCREEN_METHOD)):
        return step  # a method was replaced, or this version of ale_py lacks it
    game = inner

    def undrawn(action: Any) -> Any:
        held = vars(game)
        if _SCREEN_METHOD in held or "step" in held:  # the user has replaced a method of this object
            return step(action)
        try:
            held[_SCREEN_METHOD] = _no_screen
            return step(action)
        finally:
            held.pop(_SCREEN_METHOD, None)

    return undrawn


def _no_screen() -> object:
    return UNDRAWN
