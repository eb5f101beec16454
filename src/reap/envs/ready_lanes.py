"""Ready lanes: a crew's lanes as an env that answers whoever is ready, so many groups at a time (see core/ready.py).

    row t    positions   [ lanes of group 5 | lanes of group 0 ]    what the policy decides about, and is sent
                              next            [ group 3 | group 5 ]   whoever answers first, taken into the same row
    row t+1  positions   [ group 3 | group 5 ] …

Who will be ready cannot be known when results are written, so they come through the row that crew and env share.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap.core.env import Env, Rows
from reap.core.slot import Layout, Row, Slot
from reap.envs.crew import Crew
from reap.envs.lane_host import STEP
from reap.errors import UsageError
from reap.spec import READY, Key, Leaf


class ReadyLanes(Env):
    """The lanes of a crew, those of `ready` groups at a time."""

    tidies = True

    def __init__(self, crew: Crew, ready: int) -> None:
        self.crew, self._ready = crew, ready
        sizes = {last - first for first, last in crew.bounds}
        if len(sizes) != 1:
            crew.close()
            raise UsageError(f"lanes that come as they are ready need as many in every worker, not {sorted(sizes)}")
        self._each = sizes.pop()
        self._windows = [slice(p * self._each, (p + 1) * self._each) for p in range(ready)]
        self._lanes = [slice(first, last) for first, last in crew.bounds]
        spec = crew.spec
        self._lane = len(spec.observation)
        self.spec = dataclasses.replace(
            spec,
            observation={**spec.observation, READY: Leaf((), torch.int64)},
            lanes=ready * self._each,
            ready_of=spec.lanes,
            rows="skipping",
            single_steps=False,
            single_resets=False,
            side=spec.side | {READY},
        )
        self._numbers = np.arange(spec.lanes)
        self._in_hand: list[int] = []  # groups, in the order of their positions
        self._answered: deque[int] = deque()  # not handed out yet
        self._just_reset: deque[int] = deque()  # begun anew, not handed out yet
        self._began: list[tuple[Any, Any]] = []

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self.crew.expect(action)

    def make_slot(self, layout: Layout, index: int) -> Slot:
        return Slot(layout, index)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        """All lanes begin anew; `into` gets those of the first groups, the others are the first to come back."""
        self.crew.gather()
        self._answered.clear()
        self.crew.begin(seeds)
        groups = range(len(self._lanes))
        self._in_hand, self._just_reset = list(groups[: self._ready]), deque(groups[self._ready :])
        for at, group in zip(self._windows, self._in_hand):
            self._hand_out(group, at, into, self.crew.first)

    def _hand_out(self, group: int, at: slice, into: Rows, values: Rows) -> None:
        own = self._lanes[group]
        for array, value in zip(into, values):
            array[at] = value[own]
        into[self._lane][at] = self._numbers[own]

    def send(self, lanes: Sequence[int], row: Row) -> None:
        self._row, shared, ring = row, self.crew.row(), self.crew.ring
        for at, group in zip(self._windows, self._in_hand):
            own = self._lanes[group]
            for flag in (shared.done, shared.terminated, shared.truncated):
                flag[own] = False
            for mine, given in zip(shared.action, row.action):
                mine[own] = given[at]
            ring(group, STEP)

    def recv(self) -> list[int]:
        row, shared, answered = self._row, self.crew.row(), self._answered
        assert row.mask is not None
        self._in_hand, self._began = [], []
        for at in self._windows:
            if self._just_reset:
                group = self._just_reset.popleft()
                self._hand_out(group, at, row.next, self.crew.first)
                row.mask[at] = False
            else:
                if not answered:
                    answered += self.crew.answered()
                group = answered.popleft()
                own = self._lanes[group]
                self._hand_out(group, at, row.next, shared.next)
                for mine, theirs in zip(row.rewards, shared.rewards):
                    mine[at] = theirs[own]
                done = shared.done[own]
                if done.any():
                    row.done[at], row.terminated[at] = done, shared.terminated[own]
                    row.truncated[at] = shared.truncated[own]
                    began = np.flatnonzero(done)
                    self._began.append((at.start + began, own.start + began))
            self._in_hand.append(group)
        return []  # nobody is to be reset: the crew has done it

    def tidy(self, row: Row) -> None:
        for at, lanes in self._began:
            for after, first in zip(row.after, self.crew.first):
                after[at] = first[lanes]

    def close(self) -> None:
        self.crew.close()
