"""Records the actions of open episodes, and writes them to a file when an env raises, so the failure can be replayed.

    reset ──► the lane's state, if the env can save it     step ──► a copy of the row's actions
    raises ─► reap-failure-….pt: env factory, lane, seed, the saved state, the actions              (testing/replay.py)

Without `failure_dir` an env is not wrapped in this. If a lane's state could not be saved, the replay resets it with the
seed it was last given, which repeats the failed episode only if it was the first one after that seed.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reap.core.env import Env, Rows
from reap.core.resume import CannotResume, Packed, packed
from reap.core.slot import Row
from reap.core.wrapped import Wrapped
from reap.errors import ReapError, UsageError, as_raised
from reap.spec import Key, Leaf

FORMAT = 1
_TRIM = 4096  # recorded steps that belong to no open episode are deleted once there are more than this
_log = logging.getLogger(__name__)


class ActionRecorder(Wrapped):
    """An env that records the actions of its open episodes. `make` is the pickled factory that builds it again."""

    def __init__(self, env: Env, directory: str, make: Packed | None, worker: int | None) -> None:
        if env.spec.ready_of is not None:
            env.close()
            raise UsageError(
                "failure_dir does not support asynchronous lanes: it must record the actions of every lane at "
                "every step"
            )
        super().__init__(env, env.spec)
        self._directory, self._worker = directory, worker
        self._make = make
        lanes = env.spec.lanes
        self._steps: list[tuple[Any, ...]] = []  # actions of all lanes, step by step
        self._deleted = 0  # steps deleted so far
        self._began = np.zeros(lanes, np.int64)  # the step at which each lane's episode began
        self._start_state: list[Any] = [None] * lanes  # the state of each lane at that step; None: not saved
        self._seed: list[int | None] = [None] * lanes
        self._episodes = [0] * lanes  # resets of each lane since the one with that seed
        self._action: Mapping[Key, Leaf] = env.spec.action

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._action = dict(action)
        super().expect(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        try:
            super().reset(lanes, into, seeds)
        except Exception as cause:
            error = as_raised("env.reset raised", cause)
            self._write(error, "reset")
            raise error from error.__cause__
        chosen = list(lanes)
        self._began[chosen] = self._deleted + len(self._steps)
        for i, lane in enumerate(chosen):
            self._seed[lane] = self._seed[lane] if seeds is None else int(seeds[i])
            self._episodes[lane] = 0 if seeds is not None else self._episodes[lane] + 1
            self._start_state[lane] = self._state_of(lane)
        if (old := int(self._began.min()) - self._deleted) > _TRIM:
            del self._steps[:old]
            self._deleted += old

    def load_open_state(self, state: Any) -> None:
        super().load_open_state(state)
        self._begin_here(range(self.spec.lanes))

    def load_lane_state(self, lane: int, state: Any) -> None:
        super().load_lane_state(lane, state)
        self._begin_here([lane])

    def _begin_here(self, lanes: Sequence[int]) -> None:
        """Let the records of these lanes begin in the middle of the episodes that were just loaded."""
        for lane in lanes:
            self._began[lane], self._seed[lane] = self._deleted + len(self._steps), None
            self._start_state[lane] = self._state_of(lane)

    def rebuild_lanes(self, replace: Callable[..., Any]) -> bool:
        return False  # an env that rebuilt its lanes would hide the errors that this class writes to a file

    def _state_of(self, lane: int) -> Any:
        try:
            return self._env.lane_state(lane)
        except CannotResume:
            return None

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        self._steps.append(tuple(array.copy() for array in row.action))
        try:
            return super().step(lanes, row)
        except Exception as cause:
            error = as_raised("the env raised", cause)
            self._write(error, "step")
            raise error from error.__cause__

    def _write(self, error: ReapError, during: str) -> None:
        """Write the file and set `error.failure_file` to its path. Log a failure to write, so `error` stays visible."""
        lane = error.lane or 0
        path = Path(self._directory) / f"reap-failure-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.pt"
        steps = self._steps[int(self._began[lane]) - self._deleted :]
        columns = [torch.from_numpy(np.stack([step[n][lane] for step in steps])) for n in range(len(self._action))]
        exact = self._start_state[lane] is not None or (self._seed[lane] is not None and not self._episodes[lane])
        action_leaves = [(list(key), list(leaf.shape), leaf.dtype) for key, leaf in self._action.items()]
        state: dict[str, Any] = {
            "format": FORMAT,
            "worker": self._worker,
            "lane": lane,
            "seed": self._seed[lane],
            "episodes": self._episodes[lane],
            "during": during,
            "exact": exact,
            "steps": len(steps),
            "error": str(error),
            "actions": columns if steps else [],
            "action": action_leaves,
            "start": self._start_state[lane],
            "env": self._make,
        }
        try:
            os.makedirs(self._directory, exist_ok=True)
            torch.save(state, path)
        except OSError as reason:
            _log.warning("failure_dir=%r: the failure could not be written there: %s", self._directory, str(reason))
            return
        error.failure_file = str(path)


def pickled_factory(make: Callable[[], Env]) -> Packed | None:
    """Return an env factory pickled for the file; None, with a warning in the log, if it cannot be pickled."""
    try:
        return packed(make)
    except Exception as reason:
        _log.warning("failure_dir: the env cannot be pickled, so a replay needs env=: %s", repr(reason))
        return None
