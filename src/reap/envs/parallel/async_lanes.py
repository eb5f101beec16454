"""Asynchronous lanes: lanes in threads or processes as an env that answers whoever is ready (see core/lanes/ready.py).

    row t     positions  [ group 5 | group 0 | group 7 ]     what the policy decides about, and is sent
              next       [ group 3 | group 5 |    ·    ]     whoever has answered by now; nobody waits for the third
    row t+1   positions  [ group 3 | group 5 |    ·    ]

A group that has failed and was replaced comes without a frame, at the beginning of an episode, as all do after a reset.
Rows are as wide as the most groups taken at a time. A position nobody stands at holds a copy of the first, lane -1, and
is no frame: a policy of one shape may compute it, others leave out most of them (core/policies/buckets.py). Who will be
ready cannot be known when results are written, so they come through the row that the workers and the env share.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap.core.columns.batch_columns import check_names
from reap.core.env import Env, Rows
from reap.core.lanes.stream import ENV_INDEX
from reap.core.policies.recurrent_state import carry_of
from reap.core.slot import Row
from reap.envs.parallel.env_child import STEP
from reap.envs.parallel.lane_workers import LaneWorkers
from reap.errors import SpecMismatch, UsageError
from reap.spec import LANE_AT, Key, Leaf


class ReadyLanes(Env):
    """The lanes of workers, those of `least` to `most` groups at a time."""

    has_after_step = True
    elsewhere = True

    def __init__(self, lane_workers: LaneWorkers, least: int, most: int) -> None:
        self.lane_workers, self._least, self._most = lane_workers, least, most
        sizes = {last - first for first, last in lane_workers.bounds}
        if len(sizes) != 1:
            lane_workers.close()
            raise UsageError(f"lanes that come as they are ready need as many in every worker, not {sorted(sizes)}")
        self._each = each = sizes.pop()
        self._lanes = [np.arange(first, last) for first, last in lane_workers.bounds]
        spec = lane_workers.spec
        try:
            check_names(spec, {LANE_AT, ENV_INDEX})
        except SpecMismatch:
            lane_workers.close()
            raise
        self._show(spec.observation)
        self.spec = dataclasses.replace(
            spec,
            observation=self._observation,
            lanes=most * each,
            ready_of=spec.lanes,
            rows="skipping",
            single_steps=False,
            single_resets=False,
            side=spec.side | {LANE_AT},
        )
        self.draws = lane_workers.traits.draws
        self.tells_cuts = lane_workers.on_failure.action != "raise"
        self._in_hand: list[int] = []  # groups, in the order of their positions
        self._lanes_in_hand = np.zeros(0, np.int64)
        self._answered: deque[int] = deque()  # not handed out yet
        self._just_reset: deque[int] = deque()  # begun anew, not handed out yet
        self._began: tuple[Any, Any] | None = None

    def _show(self, keys: Iterable[Key]) -> None:
        """Choose which of the workers' observations are shown; the lane numbers come behind them."""
        whole = self.lane_workers.spec.observation
        self._observation = {**{key: whole[key] for key in keys}, LANE_AT: Leaf((), torch.int64)}
        self._shown = [n for n, key in enumerate(whole) if key in self._observation]
        self._lane = len(self._shown)  # our leaf's place in a row

    def stacks(self) -> dict[str, str]:
        return self.lane_workers.stacks()

    def bind_policy(self, model: Any) -> None:
        """Keep recurrent state that both the policy and a TorchRL primer of the env declare here, lane by lane.

        It is hidden from the env's observations.
        """
        whole = self.lane_workers.spec
        kept = [key for key in carry_of(model) if key in whole.primed]
        self._show([key for key in whole.observation if key not in kept])
        self.spec = dataclasses.replace(
            self.spec, observation=self._observation, primed=frozenset(whole.primed.difference(kept))
        )

    def filled(self) -> int:
        return len(self._lanes_in_hand)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self.lane_workers.expect(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        """All lanes begin anew; `into` gets those of the first groups, the others are the first to come back."""
        self.lane_workers.begin(seeds)
        self._answered.clear()
        gone = self.lane_workers.dropped
        groups = [n for n, (first, _) in enumerate(self.lane_workers.bounds) if first not in gone]
        self._take_in_hand(groups[: self._most])
        self._just_reset = deque(groups[self._most :])
        self._fill(into, self.lane_workers.first)

    def _take_in_hand(self, groups: list[int]) -> None:
        self._in_hand = groups
        if self._each == 1:  # the group is its lane
            self._lanes_in_hand = np.array(groups)
        else:
            self._lanes_in_hand = np.concatenate([self._lanes[group] for group in groups])

    def draw(self, row: Row) -> None:
        others = self.lane_workers.draw(self._in_hand)
        if self.lane_workers.lost:
            self._forget_lost()
        self._answered += others
        own = self._lanes_in_hand
        for given, drawn in zip(row.action, self.lane_workers.row().action):
            given[: len(own)] = drawn[own]
            given[len(own) :] = given[0]  # nobody stands there

    def send(self, lanes: Sequence[int], row: Row) -> None:
        self._row, shared, own = row, self.lane_workers.row(), self._lanes_in_hand
        for mine, given in zip(shared.action, row.action):
            mine[own] = given[: len(own)]
        self.lane_workers.order(self._in_hand, STEP)

    def recv(self) -> list[int]:
        row, began, workers = self._row, self._just_reset, self.lane_workers
        assert row.mask is not None
        if workers.lost:
            self._forget_lost()
        if began:  # their first observations are all there is of them yet
            self._take_in_hand([began.popleft() for _ in range(min(len(began), self._most))])
            self._fill(row.next, workers.first)
            row.mask[:] = False
            self._began = None
            return []
        answered = self._answered
        if self._least <= len(answered) < self._most and workers.pending:
            came = workers.answered(within=0)
            if workers.lost:
                self._forget_lost()
            answered += came
        while len(answered) < self._least and workers.pending:
            came = workers.answered()
            if workers.lost:
                self._forget_lost()
            answered += came
        self._take_in_hand([answered.popleft() for _ in range(min(len(answered), self._most))])
        shared, own = workers.row(), self._lanes_in_hand
        count = len(own)
        self._fill(row.next, shared.next)
        if count < self.spec.lanes:
            row.mask[count:] = False
        for mine, theirs in zip(row.rewards, shared.rewards):
            mine[:count] = theirs[own]
        done = shared.done[own]
        self._began = None
        if done.any():
            for mine, theirs in zip(row.flags, shared.flags):
                mine[:count] = theirs[own]
                theirs[own] = False
            at = np.flatnonzero(done)
            self._began = at, own[at]
        if workers.traits.has_after_step:  # agents may have begun anew without their lane
            self._began = np.arange(count), own
        if workers.cut:
            self._begin_anew(row)
        return []  # nobody is to be reset: the workers have done it

    def _forget_lost(self) -> None:
        """Of groups that have failed, what they had answered before and nobody has taken is not taken any more."""
        lost = {*self.lane_workers.lost}
        self.lane_workers.lost.clear()
        for waiting in (self._answered, self._just_reset):
            kept = [group for group in waiting if group not in lost]
            waiting.clear()
            waiting.extend(kept)

    def _begin_anew(self, row: Row) -> None:
        """Lanes in hand whose step was lost in a failure have made no frame, and are at their beginning."""
        assert row.mask is not None
        cut, own = self.lane_workers.cut, self._lanes_in_hand
        at = [n for n, lane in enumerate(own.tolist()) if lane in cut]
        for array, n in zip(row.next, self._shown):
            array[at] = self.lane_workers.first[n][own[at]]
        for array in row.rewards:
            array[at] = 0
        row.mask[at] = False
        cut.difference_update(own.tolist())

    def restarts(self) -> int:
        return self.lane_workers.budget.count

    def dropped(self) -> Collection[int]:
        return self.lane_workers.dropped

    def _fill(self, into: Rows, values: Rows) -> None:
        """Observations of the lanes in hand; positions nobody stands at see what the first one sees."""
        own = self._lanes_in_hand
        count = len(own)
        observations, numbers = into[: self._lane], into[self._lane]  # others may wrap us and add theirs
        for array, n in zip(observations, self._shown):
            array[:count] = values[n][own]
        numbers[:count] = own
        if count < self.spec.lanes:
            for array in observations:
                array[count:] = array[:1]  # one cell, whatever lies in it
            numbers[count:] = -1

    def after_step(self, row: Row) -> None:
        if self._began is not None:
            at, lanes = self._began
            for after, n in zip(row.after, self._shown):
                after[at] = self.lane_workers.first[n][lanes]

    def close(self) -> None:
        self.lane_workers.close()
