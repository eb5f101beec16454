"""Failures: what is done about a worker that died, raised or fell silent, and how often.

raise     everything is closed, and whoever waits is told
restart   another takes its place, unless `max_restarts` have done so within `window` seconds
drop      the others go on without it, until none is left
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from reap._system.worker_log import record
from reap.arguments import function, one_of, seconds, whole
from reap.errors import ReapError, UsageError, WorkerDied, WrongArgument

FailureAction = Literal["raise", "restart", "drop"]
ACTIONS: tuple[FailureAction, ...] = ("raise", "restart", "drop")


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed, and what was done about it: what `on_restart` is called with.

    Args:
        worker: its number.
        cause: the error that is raised where `on_failure="raise"`.
        action: "restart" or "drop".
        restarts: how many workers of this collector have been started again so far, this one among them.
        seconds: from when it was noticed until the new one was there; 0 for one that is dropped.
    """

    worker: int
    cause: ReapError
    action: FailureAction
    restarts: int
    seconds: float


@dataclass(frozen=True)
class FailurePolicy:
    """What to do about workers that fail. `max_restarts` None: as often as it takes.

    `deaths_only`: one that raised something is not started again.
    """

    action: FailureAction = "raise"
    max_restarts: int | None = 10
    window: float = 600.0
    tell: Callable[[WorkerFailure], object] | None = None
    deaths_only: bool = False

    def chosen_for(self, error: ReapError, *, building: bool) -> FailureAction:
        """What to do about this one; `building`: it is one of the first workers, and was not there yet."""
        mistaken = building and (self.action == "drop" or self.deaths_only or isinstance(error, UsageError))
        return "raise" if mistaken or (self.deaths_only and not isinstance(error, WorkerDied)) else self.action

    def report(self, failure: WorkerFailure) -> None:
        """Say in the log what happened, and tell whoever wants to know."""
        told = str(failure.cause).partition("\n")[0]
        if failure.action == "restart":
            text = "%s; started again after %.2f s (restart %d)"
            record("restart", str(failure.worker), text, told, failure.seconds, failure.restarts)
        else:
            record("drop", str(failure.worker), "%s; the others go on without it", told)
        if self.tell is not None:
            self.tell(failure)


IN_A_ROW = 10  # times that a worker may fail before it is even there, also where any number of restarts is allowed


class RestartBudget:
    """How many workers were started again lately, and how many in all."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy, self._lately = policy, deque[float]()
        self.count = 0

    def refusal(self, in_a_row: int) -> str | None:
        """Count one more, if that is allowed; else why it is not.

        `in_a_row`: so many in the same place were never there.
        """
        if in_a_row >= IN_A_ROW:
            return f"{in_a_row} in a row were started again in this place and were never there, and no more may be"
        now, most, window = time.monotonic(), self._policy.max_restarts, self._policy.window
        while self._lately and now - self._lately[0] > window:
            self._lately.popleft()
        if most is not None and len(self._lately) >= most:
            return (
                f"{len(self._lately)} workers were started again within {window:g} s before it, and no more may be: "
                f"max_restarts={most}, restart_window={window:g}"
            )
        self._lately.append(now)
        self.count += 1
        return None


def refused(error: ReapError, why: str) -> ReapError:
    """The error of a worker that is not started again."""
    error.args = (f"{error.args[0] if error.args else ''} ({why})", *error.args[1:])
    return error


def failure_policy(action: Any, most: Any, window: Any, tell: Any) -> FailurePolicy:
    """What is done about workers that fail, from the options `on_failure`, `max_restarts`, `restart_window` and
    `on_restart`.
    """
    one_of("on_failure", action, ACTIONS)
    most = whole("max_restarts", most, least=0, none=True)
    seconds("restart_window", window)
    if window is None:
        raise WrongArgument("restart_window must be a number of seconds, got None")
    function("on_restart", tell)
    if tell is not None and action == "raise":
        raise UsageError("on_restart is never called where on_failure='raise'; give 'restart' or 'drop'")
    return FailurePolicy(action, most, window, tell)
