"""Detects envs that begin a new episode inside `step`, which loses the observation that ended the last one.

wrapper ─► wrapper ─► env       every layer's `reset` is watched while a `step` runs: if it returns what `step` then
  step ────────────► reset      returns with its done flag, it has overwritten the last observation
"""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium as gym

from reap.testing.values import copied, equal

_FINAL_KEYS = ("final_observation", "final_obs", "terminal_observation")


class ResetWatch:
    """Watches the layers of an env from its construction on."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.caught = False
        self._resets: list[Any] = []  # what resets inside the running step have returned
        self._depth = 0
        for layer in layers(env):
            with contextlib.suppress(AttributeError):  # the class allows no new attributes
                self._watch(layer)

    def _watch(self, layer: Any) -> None:
        begin, go = layer.reset, layer.step

        def reset(*args: Any, **kwargs: Any) -> Any:
            result = begin(*args, **kwargs)
            if self._depth and isinstance(result, tuple):
                self._resets.append(copied(result[0]))
            return result

        def step(action: Any) -> Any:
            before = len(self._resets)
            self._depth += 1
            try:
                result = go(action)
            finally:
                self._depth -= 1
            if result[2] or result[3]:
                self.caught |= any(equal(result[0], first) for first in self._resets[before:])
            if not self._depth:
                self._resets.clear()
            return result

        layer.reset, layer.step = reset, step


def layers(env: gym.Env[Any, Any]) -> list[gym.Env[Any, Any]]:
    """Return the env and the envs it wraps, from the outside in."""
    found = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found


def kept_final(observation: Any, info: Any) -> str | None:
    """Return the info entry that holds the true last observation, where `step` returned another one."""
    return next((key for key in _FINAL_KEYS if info.get(key) is not None and not equal(info[key], observation)), None)
