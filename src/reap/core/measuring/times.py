"""Measures where the time goes: every step of one rollout in sixteen, and always the time between rollouts.

    worker ──► waits for a slot ──► rollout: policy, env, the loop's own work ──► hands it over ──► waits
               wait_seconds         policy_ + env_ + loop_seconds                 transport_seconds

Timing every step would cost more than the loop itself takes. So the shares of env and policy in the timed rollouts are
applied to the seconds of all rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

EVERY = 16  # one of every 16 rollouts is timed
_now = time.perf_counter


class StepTimes:
    """The seconds that env and policy took in the timed rollouts."""

    def __init__(self) -> None:
        self._policy = self._env = self._total = 0.0
        self._rollouts = 0

    def around(self, act: Any, step: Any, reset: Any, after_step: Any) -> tuple[Any, Any, Any, Any]:
        """Return wrappers of these functions that measure their time."""
        if self._rollouts == 1:
            self._policy = self._env = self._total = 0.0  # drop the first rollout, which includes one-time costs
        timed = [self._timed(act, policy=True), self._timed(step), self._timed(reset)]
        return timed[0], timed[1], timed[2], None if after_step is None else self._timed(after_step)

    def _timed(self, function: Callable[..., Any], *, policy: bool = False) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            began = _now()
            try:
                return function(*arguments)
            finally:
                if policy:
                    self._policy += _now() - began
                else:
                    self._env += _now() - began

        return called

    def end(self, seconds: float) -> None:
        """Add the duration of a timed rollout."""
        self._total += seconds
        self._rollouts += 1

    def shares(self, seconds: float) -> dict[str, float]:
        """Return how many of `seconds` spent in rollouts belong to env and policy."""
        if not self._total:
            return {"env_seconds": 0.0, "policy_seconds": 0.0}
        scale = seconds / self._total
        return {"env_seconds": self._env * scale, "policy_seconds": self._policy * scale}


class WorkClock:
    """Measures the seconds in which its owner (a worker, a collector) had something to do, and those between.

    The count starts with the first thing to do, so building envs and processes is not included.
    """

    def __init__(self) -> None:
        self._busy = self._waited = 0.0
        self._since: float | None = None  # when the current span began; None: there was nothing to do yet

    def begin(self) -> float:
        """Note that there is something to do, and return the current time."""
        now = _now()
        if self._since is not None:
            self._waited += now - self._since
        self._since = now
        return now

    def end(self) -> None:
        """Note that there is nothing left to do."""
        now = _now()
        if self._since is not None:
            self._busy += now - self._since
        self._since = now

    def so_far(self, *, working: bool) -> tuple[float, float]:
        """Return the seconds of work and of waiting until now. `working`: there is something to do right now."""
        open_since = 0.0 if self._since is None else _now() - self._since
        return (self._busy + open_since, self._waited) if working else (self._busy, self._waited + open_since)

    def seconds(self, collected: float) -> dict[str, float]:
        """Return the seconds under their names in `stats()`; `collected` of the seconds of work were rollouts."""
        return {"transport_seconds": max(self._busy - collected, 0.0), "wait_seconds": self._waited}
