"""Asynchronous lanes: an env whose steps report whichever lanes are ready (see core/lanes/ready.py).

    row t     positions  [ group 5 | group 0 | group 7 ]     the policy acts on these, and they are sent its actions
              next       [ group 3 | group 5 |    ·    ]     groups that have answered by now; the third is not awaited
    row t+1   positions  [ group 3 | group 5 |    ·    ]

The lanes live in threads or processes. A group that was replaced after a failure comes without a frame, at the
beginning of an episode, as all groups do after a reset. Rows have room for the most groups taken at a time. An empty
position holds a copy of the first one and lane -1, and is no frame: a policy of fixed shape may compute it, others skip
most of them (core/policies/buckets.py). Which groups will be ready together is not known when results are written, so
results come through the row that the workers and the env share.
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
from reap.core.lanes.ready import ENV_INDEX
from reap.core.policies.recurrent_state import carry_of
from reap.core.slot import Row
from reap.envs.parallel.env_child import STEP
from reap.envs.parallel.lane_workers import LaneWorkers
from reap.errors import SpecMismatch, UsageError
from reap.spec import LANE_AT, Key, Leaf


class ReadyLanes(Env):
    """The lanes of workers as an env, `least` to `most` groups of them at a time."""

    has_after_step = True
    runs_elsewhere = True

    def __init__(self, lane_workers: LaneWorkers, least: int, most: int) -> None:
        self.lane_workers, self._least, self._most = lane_workers, least, most
        sizes = {last - first for first, last in lane_workers.bounds}
        if len(sizes) != 1:
            lane_workers.close()
            raise UsageError(f"asynchronous lanes need the same number of lanes in every worker, not {sorted(sizes)}")
        self._group_size = each = sizes.pop()
        self._lanes = [np.arange(first, last) for first, last in lane_workers.bounds]
        spec = lane_workers.spec
        try:
            check_names(spec, {LANE_AT, ENV_INDEX})
        except SpecMismatch:
            lane_workers.close()
            raise
        self._choose_shown(spec.observation)
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
        self.reports_cuts = lane_workers.on_failure.action != "raise"
        self._in_hand: list[int] = []  # groups the policy acts on next, in the order of their positions
        self._lanes_in_hand = np.zeros(0, np.int64)
        self._answered: deque[int] = deque()  # groups that answered, not in hand yet
        self._just_reset: deque[int] = deque()  # groups that were reset, not in hand yet
        self._began: tuple[Any, Any] | None = None

    def _choose_shown(self, keys: Iterable[Key]) -> None:
        """Choose which of the workers' observations are in rows, followed by the lane numbers."""
        whole = self.lane_workers.spec.observation
        self._observation = {**{key: whole[key] for key in keys}, LANE_AT: Leaf((), torch.int64)}
        self._shown = [n for n, key in enumerate(whole) if key in self._observation]
        self._lane = len(self._shown)  # the index of `LANE_AT` among a row's leaves

    def stacks(self) -> dict[str, str]:
        return self.lane_workers.stacks()

    def bind_policy(self, model: Any) -> None:
        """Hide from the observations the recurrent state that both the policy and a TorchRL primer of the env declare.

        It is kept on this side instead, lane by lane.
        """
        whole = self.lane_workers.spec
        kept = [key for key in carry_of(model) if key in whole.primed]
        self._choose_shown([key for key in whole.observation if key not in kept])
        self.spec = dataclasses.replace(
            self.spec, observation=self._observation, primed=frozenset(whole.primed.difference(kept))
        )

    def filled(self) -> int:
        return len(self._lanes_in_hand)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self.lane_workers.expect(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        """Reset all lanes; `into` gets the observations of the first groups, the next steps report the other groups."""
        self.lane_workers.begin(seeds)
        self._answered.clear()
        gone = self.lane_workers.dropped
        groups = [n for n, (first, _) in enumerate(self.lane_workers.bounds) if first not in gone]
        self._take_in_hand(groups[: self._most])
        self._just_reset = deque(groups[self._most :])
        self._fill(into, self.lane_workers.first)

    def _take_in_hand(self, groups: list[int]) -> None:
        self._in_hand = groups
        if self._group_size == 1:  # each group is one lane
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
            given[len(own) :] = given[0]  # empty positions

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
        if began:  # these groups have first observations, but no frames yet
            self._take_in_hand([began.popleft() for _ in range(min(len(began), self._most))])
            self._fill(row.next, workers.first)
            row.mask[:] = False
            self._began = None
            return []
        answered = self._answered
        while workers.pending and (count := len(answered)) < self._most:
            came = workers.answered(within=0 if count >= self._least else None)
            if workers.lost:
                self._forget_lost()
            answered += came
            if len(answered) >= self._least:
                break
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
        if workers.traits.has_after_step:  # an agent may have been reset without its lane
            self._began = np.arange(count), own
        if workers.cut:
            self._mark_cut(row)
        return []  # the loop resets nothing: the workers have done it

    def _forget_lost(self) -> None:
        """Forget earlier answers of groups that have failed since."""
        lost = {*self.lane_workers.lost}
        self.lane_workers.lost.clear()
        for waiting in (self._answered, self._just_reset):
            kept = [group for group in waiting if group not in lost]
            waiting.clear()
            waiting.extend(kept)

    def _mark_cut(self, row: Row) -> None:
        """Mark lanes in hand whose step was lost in a failure: they made no frame, and their episode begins."""
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
        """Write the observations of the lanes in hand; empty positions get a copy of the first one."""
        own = self._lanes_in_hand
        count = len(own)
        observations, numbers = into[: self._lane], into[self._lane]  # envs around this one may add leaves
        for array, n in zip(observations, self._shown):
            array[:count] = values[n][own]
        numbers[:count] = own
        if count < self.spec.lanes:
            for array in observations:
                array[count:] = array[:1]  # a slice, since a cell may hold any object
            numbers[count:] = -1

    def after_step(self, row: Row) -> None:
        if self._began is not None:
            at, lanes = self._began
            for after, n in zip(row.after, self._shown):
                after[at] = self.lane_workers.first[n][lanes]

    def close(self) -> None:
        self.lane_workers.close()
