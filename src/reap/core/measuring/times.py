"""Where the time goes: of one rollout in sixteen every step is timed; what lies between rollouts is timed always.

    worker ──► waits for a slot ──► rollout: policy, env, the loop's own work ──► hands it over ──► waits
               wait_seconds         policy_ + env_ + loop_seconds                 transport_seconds

Timing each step would cost more than the loop itself has to spend. The rollouts that are timed say which share of the
others' seconds belongs to env and policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

EVERY = 16  # rollouts, of which one is timed
_now = time.perf_counter


class StepTimes:
    """Seconds that env and policy took in the rollouts that were timed."""

    def __init__(self) -> None:
        self._policy = self._env = self._whole = 0.0
        self._rollouts = 0

    def around(self, act: Any, step: Any, reset: Any, after_step: Any) -> tuple[Any, Any, Any, Any]:
        """Return the same functions, timed."""
        if self._rollouts == 1:
            self._policy = self._env = self._whole = 0.0  # the first rollout has much in it that happens once
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
        """A rollout whose steps were timed took so long."""
        self._whole += seconds
        self._rollouts += 1

    def shares(self, seconds: float) -> dict[str, float]:
        """Of so many seconds in rollouts, those of env and policy."""
        if not self._whole:
            return {"env_seconds": 0.0, "policy_seconds": 0.0}
        scale = seconds / self._whole
        return {"env_seconds": self._env * scale, "policy_seconds": self._policy * scale}


class WorkClock:
    """Seconds in which there was something to do, rollouts among it, and those between.

    They are counted from the first time there is something to do: before that envs and processes are made.
    """

    def __init__(self) -> None:
        self._busy = self._waited = 0.0
        self._since: float | None = None  # nobody has asked for anything yet

    def begin(self) -> float:
        """Note that there is something to do; returns the time."""
        now = _now()
        if self._since is not None:
            self._waited += now - self._since
        self._since = now
        return now

    def end(self) -> None:
        """Note that what there was to do is done."""
        now = _now()
        if self._since is not None:
            self._busy += now - self._since
        self._since = now

    def so_far(self, *, working: bool) -> tuple[float, float]:
        """Seconds in which there was something to do, and those between, until now; `working`: there is right now."""
        open_since = 0.0 if self._since is None else _now() - self._since
        return (self._busy + open_since, self._waited) if working else (self._busy, self._waited + open_since)

    def seconds(self, collected: float) -> dict[str, float]:
        """By the names they have in `stats()`; so many of them were rollouts."""
        return {"transport_seconds": max(self._busy - collected, 0.0), "wait_seconds": self._waited}
