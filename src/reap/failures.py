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
from typing import Any, Literal, TypeVar

from reap._system.worker_log import record
from reap.arguments import function, one_of, seconds, whole
from reap.errors import ReapError, UsageError, WorkerDied, WrongArgument

T = TypeVar("T")
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
        """Return what to do about this one; `building`: it is one of the first workers, and was not there yet."""
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
        self.policy, self._lately = policy, deque[float]()
        self.count = 0

    def spend(self, in_a_row: int) -> str | None:
        """Count one more restart and return None; or return why there may be none.

        `in_a_row`: so many in the same place were never there.
        """
        if in_a_row >= IN_A_ROW:
            return f"{in_a_row} in a row were started again in this place and were never there, and no more may be"
        now, most, window = time.monotonic(), self.policy.max_restarts, self.policy.window
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

    def build(self, number: int, make: Callable[[], T]) -> T:
        """Return what `make` makes, the first in its place; where it fails, another is made, if that may be."""
        try:
            return make()
        except ReapError as error:
            if self.policy.chosen_for(error, building=True) != "restart":
                raise
            return self.replace(number, error, make)

    def replace(self, number: int, error: ReapError, make: Callable[[], T]) -> T:
        """Return what `make` makes in the place of one that failed; that it fails itself counts too."""
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
        """Count an env that raised and was made anew elsewhere; raises its error if it was one too many."""
        if (why := self.spend(0)) is not None:
            raise refused(error, why)
        self.policy.report(WorkerFailure(number, error, "restart", self.count, seconds))


def refused(error: ReapError, why: str) -> ReapError:
    """Return the error of a worker that is not started again."""
    error.args = (f"{error.args[0] if error.args else ''} ({why})", *error.args[1:])
    return error


class RemoteRebuilds:
    """Envs that are made anew where nobody counts them.

    `tell` is called with what each has raised, and how long it took; whoever is told counts, and ends it all if there
    were too many.
    """

    def __init__(self, tell: Callable[[ReapError, float], object]) -> None:
        self._tell = tell

    def replace(self, number: int, error: ReapError, make: Callable[[], T]) -> T:
        """Return what `make` makes in the place of an env that raised; if it fails, so has whoever steps the lanes."""
        began = time.monotonic()
        made = make()
        self._tell(error, time.monotonic() - began)
        return made


class Rebuilds:
    """Envs of single lanes that raised, made anew in their place by the worker that steps them.

        env.step raises in lane 2 ──► another env from its factory ──► lanes 3, 4, … are stepped
                                                                   └─► lane 2 made no frame, and begins anew

    As far as `budget` allows; `why_not` says why this worker never does it.
    """

    def __init__(self, budget: RestartBudget | RemoteRebuilds | None, env: Any, plan: Any) -> None:
        self._budget, self._env = budget, env
        self.driver: object = None  # who moves the lanes, once it is known: for others nobody would be told of it
        self.why_not = None if budget is None else self._begin(env, plan)

    def _begin(self, env: Any, plan: Any) -> str | None:
        if plan.compact:
            return "compact_obs needs whole rows, and the step in which an env raises is no frame"
        if not plan.reset_when_done:
            return "reset_when_done=False lets lanes rest, and one that was made anew would not be told apart"
        if plan.deterministic:
            return "deterministic=True has a lane go on exactly where it was, which an env that was made anew is not"
        if env.tells_cuts or env.rebuild_lanes(self._replace):
            return None
        return env.not_rebuilt()  # type: ignore[no-any-return]

    def _replace(self, lane: int, error: ReapError, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, in place of an env that has raised."""
        if self._budget is None or self._env.driver is not self.driver:
            raise error from error.__cause__
        return self._budget.replace(0, error, make)


def failure_policy(action: Any, most: Any, window: Any, tell: Any) -> FailurePolicy:
    """Return what is done about workers that fail, from the options `on_failure`, `max_restarts`, `restart_window` and
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
