"""Calls: mistakes of torch and PettingZoo envs that rows do not show, found by watching calls of their `step`.

torch env      step ─► reset(mask) inside it, whose observations `step` returns with its done flags: wrong
PettingZoo     step ─► no reward for an agent that acted, or an agent that ended and is still in `env.agents`: remarks
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reap.core.env import Env
from reap.envs.adapters.torch_native import TorchLanes


class CallWatch:
    """Watches the envs behind these lanes from its construction on."""

    def __init__(self, lanes: Env) -> None:
        self._resets_inside = False
        self._unrewarded: dict[str, None] = {}
        self._staying: dict[str, None] = {}
        with contextlib.suppress(AttributeError):  # the class allows no new attributes
            if isinstance(lanes, TorchLanes):
                self._watch_torch(lanes.env)
            for env in getattr(lanes, "parallel_envs", ()):
                self._watch_agents(env)

    def tell(self, wrong: list[str], remarks: list[str]) -> None:
        """Append a sentence for everything that was noticed."""
        if self._resets_inside:
            wrong.append(
                "The env resets itself inside step: with its done flag it returns the first observation of the next "
                "episode, and the last one of this episode is lost. Return that one; reap calls reset(mask)."
            )
        if self._unrewarded:
            named = ", ".join(map(repr, self._unrewarded))
            remarks.append(f"step returned no reward for {named}, which acted; 0 is delivered.")
        if self._staying:
            named = ", ".join(map(repr, self._staying))
            remarks.append(
                f"Agents that were terminated or truncated stay in env.agents ({named}): reap takes them for called "
                f"back at once, and ends the episode when one step has ended all. PettingZoo's envs take them out."
            )

    def _watch_torch(self, env: Any) -> None:
        begin, go = env.reset, env.step
        inside: list[list[tuple[Tensor, Tensor]]] = []  # resets inside each running step: masks and observations

        def reset(mask: Tensor) -> Any:
            first = begin(mask)
            if inside:
                inside[-1] += [(mask.clone(), leaf.clone()) for leaf in _leaves(first)]
            return first

        def step(action: Any) -> Any:
            inside.append([])
            try:
                result = go(action)
            finally:
                resets = inside.pop()
            if resets and isinstance(result, (tuple, list)) and len(result) == 4:
                done = (result[2].bool() | result[3].bool()).reshape(-1)
                for leaf in _leaves(result[0]):
                    self._resets_inside |= any(_holds_reset(leaf, done & mask, first) for mask, first in resets)
            return result

        env.reset, env.step = reset, step

    def _watch_agents(self, env: Any) -> None:
        go = env.step

        def step(actions: Mapping[str, Any]) -> Any:
            result = go(actions)
            _, earned, over, cut = result[:4]
            self._unrewarded.update({name: None for name in actions if name not in earned})
            self._staying.update({name: None for name in env.agents if over.get(name, False) or cut.get(name, False)})
            return result

        env.step = step


def _leaves(observation: Any) -> list[Tensor]:
    if isinstance(observation, Mapping):
        return [leaf for one in observation.values() for leaf in _leaves(one)]
    return [observation] if isinstance(observation, Tensor) else []


def _holds_reset(leaf: Tensor, where: Tensor, first: Tensor) -> bool:
    """Return whether the lanes that ended and were reset hold what the reset returned."""
    return leaf.shape == first.shape and bool(where.any()) and torch.equal(leaf[where], first[where])
