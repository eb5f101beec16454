"""Backend: where workers live and how full slots reach the consumer.

    start ─► take ─► take ─► … ─► close          publish: weights, any time between two takes

A taken rollout is the consumer's; its slot is released when the last tensor on it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from reap.core.slot import Finals, Layout
from reap.spec import Key


@dataclass(frozen=True)
class Rollout:
    """The columns of one full slot, and what is known about them."""

    arrays: Mapping[Key, np.ndarray[Any, Any]]
    layout: Layout
    frames: int
    version: int
    worker: int = 0
    finals: Finals | None = None
    parts: Sequence[Rollout] = ()  # where workers' rollouts have different lengths: one by one


class Halted(BaseException):
    """Raised by a take that was broken off on purpose, from another thread."""


class Backend(Protocol):
    """What every way of running workers can do."""

    @property
    def elsewhere(self) -> bool:
        """Whether `close` ends whatever a take waits for; else it is broken off after the step it is in."""

    on_rollout: Callable[..., None] | None  # told worker, span, frames and version of each rollout

    def profile(self, settings: Any) -> None:
        """Let workers trace their rollouts: settings by worker (core/profiling.py), None to end it."""

    def start(self) -> None:
        """Build the workers. Errors of their construction are raised here."""

    def take(self, *, random: bool = False) -> Rollout:
        """The next full rollout; `random` asks for random actions."""

    def breaker(self) -> Callable[[], None]:
        """From now on a take can be broken off from another thread, by calling this; it raises `Halted`."""

    def publish(self, weights: Any = None) -> int:
        """Give workers new weights (None: those of the policy they were built with); returns the new version."""

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        """Begin new episodes."""

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        """Seed everything and begin new episodes; returns the seed that follows."""

    def state_dict(self) -> dict[str, Any]:
        """Env state, trajectory counter, version."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart."""

    def close(self, *, failed: bool = False) -> None:
        """End the workers. May be called twice. `failed`: an error waits to be told, so it may go on in a thread."""
