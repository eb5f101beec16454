"""Atari's games: a screen that nobody looks at is not drawn.

    game.step(action)  =  the emulator acts (50 µs), draws its screen (20 µs), tells how the game stands
    undrawn            =  the emulator acts,                                   tells how the game stands

Of four frames with the same action, as DQN has them, three are looked at by nobody. For the time of such a step the
game's own way to its screen is hidden behind one that returns `UNDRAWN`; all else is the game's own step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

UNDRAWN = object()  # the observation of a step that has none
_DRAWS = "_get_obs"
_PASS_ON = (OrderEnforcing, PassiveEnvChecker, TimeLimit)  # wrappers that look at no observation once they have checked


def undrawn_step(env: gym.Env[Any, Any], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`step`, which is the step of `env` after its checks, without an observation; or as it is.

    Only where `env` is one of ale_py's own games, and nothing around it that could look at what it shows.
    """
    inner: Any = env
    while type(inner) in _PASS_ON:
        inner = inner.env
    kind = type(inner)
    if kind.__name__ != "AtariEnv" or not kind.__module__.startswith("ale_py."):
        return step
    if any(getattr(vars(kind).get(name), "__module__", None) != kind.__module__ for name in ("step", _DRAWS)):
        return step  # somebody has replaced it, or this version has none
    game = inner

    def undrawn(action: Any) -> Any:
        held = vars(game)
        if _DRAWS in held or "step" in held:  # somebody has put one of his own in its place
            return step(action)
        try:
            held[_DRAWS] = _nothing
            return step(action)
        finally:
            held.pop(_DRAWS, None)

    return undrawn


def _nothing() -> object:
    return UNDRAWN
