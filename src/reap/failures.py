"""Failures: what is done about a worker that died, raised or fell silent, and how often.

raise     everything is closed, and the waiting consumer gets the error
restart   a new worker takes its place, unless there were `max_restarts` within `window` seconds
drop      the others go on without it, until none is left
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from reap._system.worker_log import record
from reap.arguments import function, one_of, seconds, whole
from reap.errors import ReapError, UsageError, WorkerDied, WrongArgument

T = TypeVar("T")
FailureAction = Literal["raise", "restart", "drop"]
ACTIONS: tuple[FailureAction, ...] = ("raise", "restart", "drop")


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed, and what was done about it: the argument of `on_restart`.

    Args:
        worker: its number.
        cause: the error that `on_failure="raise"` would have raised.
        action: "restart" or "drop".
        restarts: how many workers of this collector have been restarted so far, including this one.
        seconds: from noticing the failure until the new worker was ready; 0 for a dropped one.
    """

    worker: int
    cause: ReapError
    action: FailureAction
    restarts: int
    seconds: float


@dataclass(frozen=True)
class FailurePolicy:
    """What to do about workers that fail. `max_restarts` None means no limit.

    `deaths_only`: a worker that raised something is not restarted.
    """

    action: FailureAction = "raise"
    max_restarts: int | None = 10
    window: float = 600.0
    on_restart: Callable[[WorkerFailure], object] | None = None
    deaths_only: bool = False

    def chosen_for(self, error: ReapError, *, building: bool, replaces: bool = False) -> FailureAction:
        """Return what to do about this error.

        `building`: the worker failed while it was being built; `replaces`: in place of another.
        """
        mistaken = building and (
            isinstance(error, UsageError) or (not replaces and (self.action == "drop" or self.deaths_only))
        )
        return "raise" if mistaken or (self.deaths_only and not isinstance(error, WorkerDied)) else self.action

    def report(self, failure: WorkerFailure) -> None:
        """Log what happened, and call the user's callback if there is one."""
        told = str(failure.cause).partition("\n")[0]
        if failure.action == "restart":
            text = "%s; restarted after %.2f s (restart %d)"
            record("restart", str(failure.worker), text, told, failure.seconds, failure.restarts)
        else:
            record("drop", str(failure.worker), "%s; the others continue without it", told)
        if self.on_restart is not None:
            self.on_restart(failure)


IN_A_ROW = 10  # failures in a row before a worker is even ready, also where `max_restarts` sets no limit


class RestartBudget:
    """Counts restarts, lately and in all."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy, self._lately = policy, deque[float]()
        self.count = 0

    def spend(self, in_a_row: int) -> str | None:
        """Count one more restart and return None; or return the reason why it is not allowed.

        `in_a_row`: how many replacements in the same place have failed before they were ready.
        """
        if in_a_row >= IN_A_ROW:
            return f"{in_a_row} replacements in a row failed before they were ready; no more are started"
        now, most, window = time.monotonic(), self.policy.max_restarts, self.policy.window
        while self._lately and now - self._lately[0] > window:
            self._lately.popleft()
        if most is not None and len(self._lately) >= most:
            return (
                f"the restart limit is reached: {len(self._lately)} within {window:g} s (max_restarts={most}, "
                f"restart_window={window:g})"
            )
        self._lately.append(now)
        self.count += 1
        return None

    def build(self, number: int, make: Callable[[], T]) -> T:
        """Return the first worker from `make`; if it fails, try replacements as long as the policy allows."""
        try:
            return make()
        except ReapError as error:
            if self.policy.chosen_for(error, building=True) != "restart":
                raise
            return self.replace(number, error, make)

    def replace(self, number: int, error: ReapError, make: Callable[[], T]) -> T:
        """Return a replacement from `make` for a worker that failed; replacements that fail are counted too."""
        began, tries = time.monotonic(), 0
        while (why := self.spend(tries)) is None:
            try:
                made = make()
            except ReapError as again:
                if self.policy.chosen_for(again, building=True) == "raise":
                    raise
                error, tries = again, tries + 1
                continue
            self.policy.report(WorkerFailure(number, error, "restart", self.count, time.monotonic() - began))
            return made
        raise refused(error, why)

    def count_rebuilt(self, number: int, error: ReapError, seconds: float) -> None:
        """Count an env that raised and was rebuilt elsewhere; raise its error if that exceeds the limit."""
        if (why := self.spend(0)) is not None:
            raise refused(error, why)
        self.policy.report(WorkerFailure(number, error, "restart", self.count, seconds))


def refused(error: ReapError, why: str) -> ReapError:
    """Return a worker's error, extended by the reason why it is not restarted."""
    error.args = (f"{error.args[0] if error.args else ''} ({why})", *error.args[1:])
    return error


class RemoteRebuilds:
    """Rebuilds envs in a process that does not count restarts itself.

    It calls `tell` with the error of each env, and the seconds it took to rebuild it. The receiver counts, and ends
    everything if there were too many.
    """

    def __init__(self, tell: Callable[[ReapError, float], object]) -> None:
        self._tell = tell

    def replace(self, number: int, error: ReapError, make: Callable[[], T]) -> T:
        """Return what `make` makes in place of an env that raised; if that fails, so does the process that steps it."""
        began = time.monotonic()
        made = make()
        self._tell(error, time.monotonic() - began)
        return made


class Rebuilds:
    """Rebuilds the envs of single lanes that raised, in the worker that steps them.

        env.step raises in lane 2 ──► a new env from its factory ──► lanes 3, 4, … are stepped
                                                                 └─► lane 2 made no frame, and begins a new episode

    `budget` limits how often. `why_not` is the reason why this worker never does it, or None.
    """

    def __init__(self, budget: RestartBudget | RemoteRebuilds | None, env: Any, plan: Any) -> None:
        self._budget, self._env = budget, env
        self.driver: object = None  # token of the loop that moves the lanes; rebuilds under others would go unreported
        self.why_not = None if budget is None else self._set_up(env, plan)

    def _set_up(self, env: Any, plan: Any) -> str | None:
        if plan.compact:
            return "compact_obs needs whole rows, but a step in which an env raises makes no frame"
        if not plan.reset_when_done:
            return "reset_when_done=False lets lanes rest, and a rebuilt lane could not be told from one that rests"
        if plan.deterministic:
            return (
                "deterministic=True makes a lane continue exactly where it was, but a rebuilt env cannot resume "
                "exactly where the old one was"
            )
        if env.reports_cuts or env.rebuild_lanes(self._replace):
            return None
        return env.why_not_rebuilt()  # type: ignore[no-any-return]

    def _replace(self, lane: int, error: ReapError, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, in place of an env that raised."""
        if self._budget is None or self._env.driver is not self.driver:
            raise error from error.__cause__
        return self._budget.replace(0, error, make)


def failure_policy(action: Any, most: Any, window: Any, on_restart: Any) -> FailurePolicy:
    """Return the policy given by the options `on_failure`, `max_restarts`, `restart_window` and `on_restart`."""
    one_of("on_failure", action, ACTIONS)
    most = whole("max_restarts", most, least=0, none=True)
    seconds("restart_window", window)
    if window is None:
        raise WrongArgument("restart_window must be a number of seconds, got None")
    function("on_restart", on_restart)
    if on_restart is not None and action == "raise":
        raise UsageError("on_restart is never called with on_failure='raise'; give 'restart' or 'drop'")
    return FailurePolicy(action, most, window, on_restart)
