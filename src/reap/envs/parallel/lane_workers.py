"""LaneWorkers: threads or child processes that step lanes, group by group. What both have in common.

    here                                         group 0          group 1            a group is stepped and answers
    actions ──► row ──► ring([0], STEP) ─────────► its lanes                           as one; it may hold one lane
                    └─► ring([1], STEP) ───────────────────────────► its lanes
    results ◄── row ◄── answered() → [1] ◄────────────────────────── done
                    ◄── answered() → [0] ◄────── done                                in the order in which they come

There is one row, which everybody sees; a lane's part of it belongs to its group from the ring to the answer. A lane
whose episode ended is begun anew by its group at once: its first observation lies in `first` with the answer. Whoever
has read its flags clears them: nobody else touches flags that are False.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reap._system import silence
from reap._system.forks import guard, refuse_all
from reap._system.stacks import all_at_once
from reap.core.env import Rows
from reap.core.slot import Row
from reap.envs.parallel.env_child import BEGIN, DRAW, Traits
from reap.errors import ReapError, SpecMismatch, UsageError
from reap.spec import EnvSpec, Key, Leaf

_TOKENS = 200

Makers = Sequence[Sequence[tuple[Any, Mapping[str, Any]]]]  # group by group, lane by lane: a factory and its keywords


def joint_spec(specs: Sequence[EnvSpec]) -> tuple[EnvSpec, list[tuple[int, int]]]:
    """What groups of lanes look like as one env, and which of its lanes each group has."""
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
        raise UsageError("this env brings lanes of its own that skip steps; give it to a collector as it is")
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


def joint_traits(traits: Sequence[Traits]) -> Traits:
    """What groups of lanes do beside stepping, as one env."""
    return Traits(has_after_step=any(one.has_after_step for one in traits), draws=all(one.draws for one in traits))


class LaneWorkers(abc.ABC):
    """Groups of lanes elsewhere. `timeout` is how many seconds a group may take for one answer."""

    spec: EnvSpec  # of all lanes, as if they were in step
    traits: Traits
    bounds: list[tuple[int, int]]  # the lanes of each group: first, last + 1
    first: Rows  # first observations of episodes
    timeout: float | None
    expecting = False  # whether it is known how actions look

    def __init__(self) -> None:
        self._away: dict[int, float] = {}  # groups under way, and since when; the longest first
        self._token = 0  # of the last settling
        self._look_at = 0.0  # when to look next whether somebody is silent, though others are not
        self._logged: tuple[int, float] | None = None  # a group that was silent, and since when
        guard(self)

    def in_fork(self, why: str) -> None:
        """Called in a fork: whoever steps the lanes is not here, or its owner's."""
        refuse_all(self, why)

    @property
    def away(self) -> int:
        """How many groups are under way."""
        return len(self._away)

    def ring(self, groups: Sequence[int], what: int, lanes: Sequence[int] | None = None) -> None:
        """Let groups do something with these lanes, or all of theirs (see env_child.py). Nobody is waited for."""
        now = time.monotonic()
        if now > self._look_at:
            self._log_silence()
        for group in groups:
            self._away[group] = now
            self._ring_for(group, what, lanes)

    def answered(self, within: float | None = None) -> list[int]:
        """The groups that have answered, in the order in which they did; none only after `within` seconds."""
        deadline = None if within is None else time.monotonic() + within
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if self.timeout is not None:
                longest, since = next(iter(self._away.items()))
                over = since + self.timeout - time.monotonic()
                if over <= 0:
                    raise self._silence_of(longest, self.timeout)
                left = over if left is None else min(over, left)
            wait = silence.LOGGED_AFTER if left is None else left
            found = [group for group, token in self._answers(wait) if not token]
            for group in found:
                self._away.pop(group, None)
            if found or (deadline is not None and time.monotonic() >= deadline):
                return found
            if left is None:
                self._log_silence()

    def _log_silence(self) -> None:
        """Who has owed an answer for longest, and for a long time, is told of, once. Asked now and then."""
        now = time.monotonic()
        self._look_at = now + silence.LOGGED_AFTER / 4
        group, since = next(iter(self._away.items()), (0, now))
        if self.timeout is None and now - since >= silence.LOGGED_AFTER and self._logged != (group, since):
            self._logged = group, since
            first, last = self.bounds[group]
            silence.log(f"the worker of lanes {first} to {last - 1}", now - since, self._stack_of(group))

    def stacks(self) -> dict[str, str]:
        """Where each group is right now, by its lanes."""
        asked = {
            f"worker of lanes {first} to {last - 1}": functools.partial(self._stack_of, group)
            for group, (first, last) in enumerate(self.bounds)
        }
        return all_at_once(asked)

    def draw(self, groups: Sequence[int]) -> list[int]:
        """Let idle groups draw random actions into the row; returns who else has answered meanwhile."""
        self.ring(groups, DRAW)
        left, others = {*groups}, []
        while left:
            for group in self.answered():
                if group in left:
                    left.remove(group)
                else:
                    others.append(group)
        return others

    def begin(self, seeds: Sequence[int] | None) -> None:
        """New episodes in all lanes, whoever was under way; their first observations are in `first` afterwards."""
        self.settle()
        if self.expecting:
            row = self.row()
            for flag in (row.done, row.terminated, row.truncated):
                flag[:] = False  # of steps that were broken off
        everyone = range(self.spec.lanes)
        self.seed(everyone, seeds)
        self.ring(range(len(self.bounds)), BEGIN, everyone)
        while self._away:
            self.answered()

    def settle(self) -> None:
        """Nobody is under way after this, whoever was, and whatever was broken off by Ctrl-C between two lines.

        Orders are followed one after another: who has answered a question that was never asked before has answered
        all that came before it.
        """
        self._token = self._token % _TOKENS + 1
        left, since = set(range(len(self.bounds))), time.monotonic()
        for group in left:
            self._ping(group, self._token)
        while left:
            over = None if self.timeout is None else since + self.timeout - time.monotonic()
            if over is not None and over <= 0:
                raise self._silence_of(min(left), self.timeout or 0.0)
            left -= {group for group, token in self._answers(over) if token == self._token}
        self._away.clear()

    @abc.abstractmethod
    def expect(self, action: Mapping[Key, Leaf]) -> None:
        """Learn how actions will look. No group may be under way."""

    @abc.abstractmethod
    def row(self) -> Row:
        """The row everybody sees; another one after `expect`."""

    @abc.abstractmethod
    def seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """With which seeds `lanes` begin when they are next told to; None: with none. None of them is under way."""

    @abc.abstractmethod
    def close(self) -> None:
        """End everybody. May be called twice."""

    @abc.abstractmethod
    def _ring_for(self, group: int, what: int, lanes: Sequence[int] | None) -> None: ...

    @abc.abstractmethod
    def _ping(self, group: int, token: int) -> None:
        """Let a group answer with this token when it has done all it was told."""

    @abc.abstractmethod
    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        """Groups that have answered, after so many seconds at most, and their tokens; errors of theirs are raised."""

    @abc.abstractmethod
    def _stack_of(self, group: int) -> str: ...

    @abc.abstractmethod
    def _silence_of(self, group: int, timeout: float) -> ReapError: ...
