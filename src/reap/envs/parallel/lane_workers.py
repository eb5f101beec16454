"""LaneWorkers: what threads and child processes that step groups of lanes have in common.

    here                                         group 0          group 1            a group is stepped and answers
    actions ──► row ──► order([0], STEP) ────────► its lanes                           as one; it may hold one lane
                    └─► order([1], STEP) ──────────────────────────► its lanes
    results ◄── row ◄── answered() → [1] ◄────────────────────────── done
                    ◄── answered() → [0] ◄────── done                                in the order of the answers

A group fails if it dies, raises or takes too long, and the groups that share its process fail with it. Where an env
that raises can be rebuilt in its place, only its lanes are in `cut`. Otherwise the `FailurePolicy` decides: raise the
error; drop the lanes; or start a replacement, without waiting for it. Once the replacement has begun new episodes it
answers like the others, and its lanes are in `cut` until the caller removes them.

All groups share one row; a lane's part of it belongs to its group from the order to the answer. A group resets a lane
whose episode ended at once: its first observation is in `first` when the answer comes. Groups write only the flags of
lanes that ended; the reader of a flag clears it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reap._system import silence
from reap._system.forks import guard, refuse_use
from reap._system.interrupts import Interrupts
from reap._system.processes import BOOT
from reap._system.stacks import call_all
from reap.core.env import Rows
from reap.core.slot import Row
from reap.envs.parallel.env_child import DRAW, RESET, UNSEEDED, Traits
from reap.envs.parallel.pings import Pings
from reap.errors import ReapError, SpecMismatch, UsageError, WorkerError
from reap.failures import FailurePolicy, RestartBudget, WorkerFailure, refused
from reap.seeding import restart_seed
from reap.spec import EnvSpec, Key, Leaf, show

Makers = Sequence[Sequence[tuple[Any, Mapping[str, Any]]]]  # for each group, for each lane: a factory and its keywords


def joint_spec(specs: Sequence[EnvSpec]) -> tuple[EnvSpec, list[tuple[int, int]]]:
    """Return the spec of groups of lanes as one env, and each group's first lane and last lane + 1."""
    first, lanes, bounds = specs[0], 0, []
    for n, spec in enumerate(specs):
        for mine, other in (
            (first.observation, spec.observation),
            (first.action, spec.action),
            (first.reward, spec.reward),
        ):
            if [(k, v.shape, v.dtype) for k, v in mine.items()] != [(k, v.shape, v.dtype) for k, v in other.items()]:
                raise SpecMismatch(f"workers 0 and {n} have different envs: {first} and {spec}")
        bounds.append((lanes, lanes + spec.lanes))
        lanes += spec.lanes
    if first.rows != "whole" or first.ready_of is not None:
        raise UsageError(
            "this env has lanes that skip steps and cannot be one of several; pass it to a collector unchanged"
        )
    stacked = [key for key, leaf in first.observation.items() if leaf.once]
    if stacked:
        raise UsageError(
            f"FrameStack stores each frame of {show(stacked[0])} once, which is not possible for envs in "
            f"workers: put it around the lanes, TransformedEnv(ParallelEnv(…), FrameStack(…)); for "
            f"asynchronous lanes, stack by gymnasium.wrappers.FrameStackObservation in each env"
        )
    joint = EnvSpec(
        observation=first.observation,
        action=first.action,
        lanes=lanes,
        batched=True,
        reward=first.reward,
        single_steps=all(spec.single_steps for spec in specs),
        single_resets=all(spec.single_resets for spec in specs),
        side=first.side,
        look=dataclasses.replace(first.look, dims=None),
        primed=first.primed,
    )
    return joint, bounds


def lanes_named(first: int, last: int) -> str:
    """Name the lanes of a worker for errors, `last` excluded; `last` is 0 where it is not known yet."""
    if not last:
        return "lanes"
    return f"lane {first}" if last - first == 1 else f"lanes {first} to {last - 1}"


def joint_traits(traits: Sequence[Traits]) -> Traits:
    """Return the traits of groups of lanes as one env."""
    return Traits(has_after_step=any(one.has_after_step for one in traits), draws=all(one.draws for one in traits))


@dataclass
class Restarting:
    """A thread or process that failed and is being replaced."""

    cause: ReapError  # the last error
    since: float  # when the first failure was noticed
    tries: int  # how many replacements in a row failed before they were ready
    left: set[int]  # its groups that have not begun yet


class LaneWorkers(abc.ABC):
    """Groups of lanes in threads or processes. `timeout` is how many seconds a group may take for one answer."""

    spec: EnvSpec  # of all lanes, as if they were stepped together
    traits: Traits
    bounds: list[tuple[int, int]]  # the lanes of each group: first, last + 1
    first: Rows  # first observations of episodes
    timeout: float | None
    expecting = False  # whether the shapes and dtypes of actions are known

    def __init__(self, on_failure: FailurePolicy | None = None) -> None:
        self.on_failure = on_failure or FailurePolicy()
        self.budget = RestartBudget(self.on_failure)
        self.cut: set[int] = set()  # lanes reset because of a failure, until the caller removes them
        self.lost: list[int] = []  # groups that failed, until the caller removes them
        self.dropped: set[int] = set()  # lanes that are no longer stepped
        self._restarting: dict[int, Restarting] = {}  # by unit: the number of a thread or process
        self._replacements: dict[int, int] = {}  # by unit: how many were in its place before
        self._last_seeds: dict[int, int] = {}  # the last seed of each lane that was seeded
        self._pending: dict[int, float] = {}  # groups under way, and since when; the longest first
        self._pings = Pings()
        self._next_check = 0.0  # when to look next for a silent group, even if others answer
        self._logged: tuple[int, float] | None = None  # the silent group that was logged last, and since when
        guard(self)

    def in_fork(self, why: str) -> None:
        """Refuse use in a forked copy: it has no threads, and the processes belong to the one that started them."""
        refuse_use(self, why)

    @property
    def pending(self) -> int:
        """The number of groups that owe an answer."""
        return len(self._pending)

    def order(self, groups: Sequence[int], what: int, lanes: Sequence[int] | None = None) -> None:
        """Send groups an order (see env_child.py) for these lanes, or all of theirs, without waiting for answers."""
        now = time.monotonic()
        if now > self._next_check:
            self._log_silence()
        if self.cut or self.dropped or self._restarting:
            groups = self._can_take_orders(groups)
        for group in groups:
            self._pending[group] = now
            try:
                self._order_group(group, what, lanes)
            except ReapError as error:
                self._handle_failure(self._unit_of(group), error)

    def _can_take_orders(self, groups: Iterable[int]) -> list[int]:
        """Return the groups that can take orders: not restarting, and without dropped lanes or lanes in `cut`."""
        coming, gone = self._not_begun, self.cut | self.dropped
        return [group for group in groups if group not in coming and gone.isdisjoint(range(*self.bounds[group]))]

    @property
    def _not_begun(self) -> set[int]:
        """The groups whose replacement has not begun yet."""
        return {group for restarting in self._restarting.values() for group in restarting.left}

    def answered(self, within: float | None = None) -> list[int]:
        """Wait for answers; returns the groups in the order of their answers, none only after `within` seconds."""
        deadline = None if within is None else time.monotonic() + within
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            now = time.monotonic() if self.timeout is not None else 0.0
            if self.timeout is not None and (over := self._patience(now)) is not None:
                left = over if left is None else min(over, left)
            wait = silence.LOGGED_AFTER if left is None else left
            found = [group for group, token in self._answers(wait) if not token]
            for group in found:
                self._pending.pop(group, None)
            if self._restarting:
                self._note_restarted(found)
            if self.timeout is not None:
                self._check_silence(now)
                if found and self.lost:  # groups in a silent one's process are lost with their answers
                    coming = self._not_begun
                    found = [n for n in found if n not in coming and self.bounds[n][0] not in self.dropped]
            if found or not self._pending or (deadline is not None and time.monotonic() >= deadline):
                return found
            if left is None:
                self._log_silence()

    def _longest_pending(self) -> int:
        """Return the group that has owed an answer for longest."""
        return min(self._pending, key=self._pending.__getitem__) if self._restarting else next(iter(self._pending))

    def _patience(self, now: float) -> float | None:
        """Return how many seconds the group that has owed an answer for longest may still take; None: no limit."""
        if self.timeout is None or not self._pending:
            return None
        return max(0.0, self._pending[self._longest_pending()] + self.timeout - now)

    def _check_silence(self, then: float) -> None:
        """Treat groups as failed that had exceeded `timeout` at the time `then` and have not answered since.

        Called after all answers were read: an answer may have lain there unread for long.
        """
        while self.timeout is not None and self._pending:
            group = self._longest_pending()
            if self._pending[group] + self.timeout > then:
                return
            self._handle_failure(self._unit_of(group), self._silence_of(group, self.timeout))

    def _log_silence(self) -> None:
        """Log, once, the group that has owed an answer for longest if it is silent for long. Called now and then."""
        now = time.monotonic()
        self._next_check = now + silence.LOGGED_AFTER / 4
        group = self._longest_pending() if self._pending else 0
        since = self._pending.get(group, now)
        if self.timeout is None and now - since >= silence.LOGGED_AFTER and self._logged != (group, since):
            self._logged = group, since
            first, last = self.bounds[group]
            silence.log(f"the worker of {lanes_named(first, last)}", now - since, self._stack_of(group))

    def stacks(self) -> dict[str, str]:
        """Return the stack of each group's thread or process, by the names of its lanes."""
        asked = {
            f"worker of {lanes_named(first, last)}": functools.partial(self._stack_of, group)
            for group, (first, last) in enumerate(self.bounds)
        }
        return call_all(asked)

    def draw(self, groups: Sequence[int]) -> list[int]:
        """Have idle groups draw random actions into the row; returns the other groups that answered meanwhile."""
        self.order(groups, DRAW)
        left, others = {*groups}, []
        while left:
            for group in self.answered():
                if group in left and self.bounds[group][0] not in self.cut:
                    left.remove(group)
                else:
                    others.append(group)
            if self.lost:
                left.intersection_update(self._can_take_orders(left))  # failed groups draw nothing, and come back later
        return others

    def begin(self, seeds: Sequence[int] | None) -> None:
        """Start new episodes in all lanes, whatever was under way; their first observations are in `first` then."""
        self.settle()
        everyone = range(self.spec.lanes)
        self.seed(everyone, seeds)
        self.order(range(len(self.bounds)), RESET, everyone)
        while self._pending:
            self.answered()
        self.cut.clear()  # all lanes were reset,
        self.lost.clear()  # also those of groups that were lost and replaced meanwhile

    def seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Set the seeds for the next reset of `lanes`, none of which is under way; None: no seeds."""
        if seeds is not None:
            self._last_seeds.update({lane: seed for lane, seed in zip(lanes, seeds) if seed != UNSEEDED})
        self._seed(lanes, seeds)

    def settle(self) -> None:
        """Wait until no group is under way, even if Ctrl-C interrupted a method here between any two lines.

        A group carries out its orders one after another: once it has answered a PING with a new token, it has answered
        all earlier orders.
        """
        with self._pings.next() as token:
            self._settle(token)

    def _settle(self, token: int) -> None:
        self.cut.clear()  # so that these lanes, too, are settled: they will be reset, or their answers are in
        left, since = set(self._can_take_orders(range(len(self.bounds)))), time.monotonic()
        for group in left:
            if self._restarting and not self._can_take_orders([group]):
                continue  # lost just now, with another group of its process
            self._pending[group] = since
            try:
                self._ping(group, token)
            except ReapError as error:
                self._handle_failure(self._unit_of(group), error)
        while left or self._restarting:
            now = time.monotonic()
            found = self._answers(self._patience(now))
            self._note_restarted([group for group, answer in found if not answer])
            for group in [group for group, answer in found if answer == token]:
                left.discard(group)
                self._pending.pop(group, None)
            self._check_silence(now)
            left.intersection_update(self._can_take_orders(left))
        self._pending.clear()
        self.cut.clear()
        self.lost.clear()
        if self.expecting:
            for flag in self.row().flags:
                flag[:] = False  # set by steps whose results nobody reads

    # ---- failures -------------------------------------------------------------------------------------------------

    def _handle_failure(self, unit: int, error: ReapError) -> None:
        """Handle the failure of a thread or process: raise its error, drop its lanes, or start a replacement."""
        if self.on_failure.action == "raise":
            raise error
        with Interrupts().held():  # Ctrl-C must not leave it half replaced
            lost = self._groups_of(unit)
            lanes = [lane for group in lost for lane in range(*self.bounds[group])]
            for group in lost:
                self._pending.pop(group, None)
            self.lost += lost
            self.cut.difference_update(lanes)
            self._retire(unit)
            if self.expecting:
                for flag in self.row().flags:
                    flag[lanes] = False  # set by an interrupted step
            if self.on_failure.action == "drop":
                self.dropped.update(lanes)
                self.on_failure.report(WorkerFailure(unit, error, "drop", self.budget.count, 0.0))
                if len(self.dropped) == self.spec.lanes:
                    raise error
                return
            now, before = time.monotonic(), self._restarting.get(unit)
            tries, since = (0, now) if before is None else (before.tries + 1, before.since)
            if (why := self.budget.spend(tries)) is not None:
                raise refused(error, why)
            self._restarting[unit] = Restarting(error, since, tries, {*lost})
            nth = self._replacements[unit] = self._replacements.get(unit, 0) + 1
            known = {lane: self._last_seeds[lane] for lane in lanes if lane in self._last_seeds}
            self._seed(lanes, [restart_seed(known[n], nth) if n in known else UNSEEDED for n in lanes])
            self._pending.update(dict.fromkeys(lost, now + BOOT))
            try:
                self._start_again(unit)
            except WorkerError as again:  # the system has no room for another
                self._handle_failure(unit, again)

    def _note_restarted(self, answered: Sequence[int]) -> None:
        """Note that replaced groups among those that answered have begun new episodes."""
        for group in answered:
            unit = self._unit_of(group)
            restarting = self._restarting.get(unit)
            if restarting is None or group not in restarting.left:
                continue
            self.cut.update(range(*self.bounds[group]))
            restarting.left.remove(group)
            if not restarting.left:
                del self._restarting[unit]
                seconds = time.monotonic() - restarting.since
                self.on_failure.report(WorkerFailure(unit, restarting.cause, "restart", self.budget.count, seconds))

    def _unit_of(self, group: int) -> int:
        """Return the number of the thread or process that steps a group."""
        return group

    def _groups_of(self, unit: int) -> Sequence[int]:
        return [unit]

    @abc.abstractmethod
    def _retire(self, unit: int) -> None:
        """Give up a thread or process: whatever it still does is ignored."""

    @abc.abstractmethod
    def _start_again(self, unit: int) -> None:
        """Begin to start a replacement; each of its groups answers once its lanes have begun new episodes."""

    # ---- for subclasses -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def expect(self, action: Mapping[Key, Leaf]) -> None:
        """Learn the shapes and dtypes of actions. No group may be under way."""

    @abc.abstractmethod
    def row(self) -> Row:
        """Return the row that all groups share; `expect` makes another one."""

    @abc.abstractmethod
    def _seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None: ...
    @abc.abstractmethod
    def close(self) -> None:
        """End all threads or processes. May be called twice."""

    @abc.abstractmethod
    def _order_group(self, group: int, what: int, lanes: Sequence[int] | None) -> None: ...

    @abc.abstractmethod
    def _ping(self, group: int, token: int) -> None:
        """Have a group answer with this token once it has carried out all earlier orders."""

    @abc.abstractmethod
    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        """Wait at most `wait` seconds; return the groups that answered, and their tokens. Handles failed groups."""

    @abc.abstractmethod
    def _stack_of(self, group: int) -> str: ...

    @abc.abstractmethod
    def _silence_of(self, group: int, timeout: float) -> ReapError: ...
