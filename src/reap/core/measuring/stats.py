"""Stats: counts a worker's frames, episodes and seconds, once per rollout with whole-array arithmetic.

worker ──► Stats ──┬──► counts ──────────────────────────────────────────┐
                   └──► episodes that ended ──► EpisodeLog ──► summary ──┴──► `collector.stats()`
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reap.core.columns.skipped_rows import running
from reap.core.measuring.episode_log import (
    COLUMNS,
    DISCOUNTED,
    KEPT,
    LANE,
    LENGTH,
    RETURN,
    SECONDS,
    SUMMARY,
    TERMINATED,
    TIME,
    VERSION,
    EpisodeLog,
    Episodes,
    UnreportedEpisodes,
)
from reap.core.measuring.times import EVERY, StepTimes

Array = np.ndarray[Any, Any]
_COUNTS = ("frames", "rollouts", "episodes", "nan_rewards", "seconds")
_ROW_LENGTH = len(COLUMNS)  # numbers kept of an episode
_OPEN = ("open_return", "open_discounted", "open_length")
COUNT_NAMES = (
    "episodes",
    "nan_rewards",
    "collect_seconds",
    "frames_per_second",
    "env_seconds",
    "policy_seconds",
    "transport_seconds",
    "wait_seconds",
)  # a worker's counts, in the order in which `numbers_of` encodes them
_TIMES = ("env_seconds", "policy_seconds", "loop_seconds", "transport_seconds", "wait_seconds")


class SoFar(NamedTuple):
    """The return and length of each frame's episode up to and including that frame."""

    returns: Array  # [T, N]
    lengths: Array


class Stats:
    """Counts of one worker (frames, episodes, NaN rewards, seconds), and the episodes it has not reported yet.

    `gamma`: also compute returns discounted by this factor.
    """

    def __init__(self, lanes: int, gamma: float | None = None) -> None:
        self.frames = self.rollouts = self.episodes = self.nan_rewards = 0
        self.seconds = self.loaded_seconds = 0.0  # `loaded_seconds`: the part of `seconds` that `load` set
        self.gamma = gamma
        self.open_return = np.zeros(lanes)  # of episodes that have not ended, as are the next two
        self.open_discounted = np.zeros(lanes)
        self.open_length = np.zeros(lanes, np.int64)
        self._open_since = np.full(lanes, time.perf_counter())
        self._version, self._began = 0, 0.0
        self.span = (0.0, 0.0)  # when the last rollout began and ended
        self._unreported = UnreportedEpisodes()
        self._times = StepTimes()

    def begin(self, version: int = 0) -> StepTimes | None:
        """Note that a rollout starts with weights of this version; return the timer of its steps if they are timed."""
        self._began, self._version = time.perf_counter(), version
        return self._times if not self.rollouts or self.rollouts % EVERY == 1 else None

    def end(self, times: StepTimes | None = None) -> None:
        """Note that the rollout is complete; `times` is the timer that `begin` returned."""
        self.span = (self._began, time.perf_counter())
        seconds = self.span[1] - self._began
        self.seconds += seconds
        if times is not None:
            times.end(seconds)

    def forget(self, lanes: Sequence[int]) -> None:
        """Drop the open episodes of these lanes, which a reset has cut short: they are not counted."""
        self.open_return[lanes] = self.open_discounted[lanes] = 0.0
        self.open_length[lanes] = 0
        self._open_since[lanes] = time.perf_counter()

    def rollout(
        self,
        reward: Array,
        when: Array,
        where: Array,
        *,
        frames: int,
        mask: Any = None,
        made: Any = None,
        counted: Any = None,
        terminated: Any = False,
        versions: Any = None,
        so_far: bool = False,
    ) -> SoFar | None:
        """Count a rollout with rewards `[T, N]` whose episodes ended at `when` in lanes `where`, in order of time.

        `mask` says which rows are frames; or `made` says how many frames each lane made, if they are its first rows.
        `counted`: which of the ends are ends of episodes; the others were cut. `terminated` and `versions` belong to
        the frames at the ends. Returns the returns and lengths so far if `so_far` is set.
        """
        self.rollouts += 1
        self.frames += frames
        total = running(np.add, reward, np.empty(reward.shape))
        if not np.isfinite(total[-1]).all():
            self.nan_rewards += int(np.isnan(reward).sum())
            reward = np.where(np.isfinite(reward), reward, 0.0)
            running(np.add, reward, total)  # one NaN must not spoil all later returns
        if mask is None:
            steps = np.arange(1, len(total) + 1)
            count: Array = np.broadcast_to(steps[:, None], total.shape)
        else:
            count = np.cumsum(mask, axis=0, dtype=np.int32)
        discounted = found = None
        if so_far or self.gamma is not None:
            starts = _EpisodeStarts(total.shape, when, where)
            lengths = count - starts.before(count, -self.open_length)
            if self.gamma is not None:
                discounted = running(np.add, reward * self.gamma ** (lengths - 1.0), np.empty(total.shape))
            if so_far:
                found = SoFar(total - starts.before(total, -self.open_return), lengths)
        per_lane = count[-1] if made is None else made
        if not len(when):
            self.open_return += total[-1]
            self.open_length += per_lane
            if discounted is not None:
                self.open_discounted += discounted[-1]
            return found
        rows, ends = self._rows(when, where, len(total), terminated, versions)
        rows[ends.order, RETURN] = ends.since(total, total[-1], self.open_return)
        rows[ends.order, LENGTH] = ends.since(count, per_lane, self.open_length)
        if discounted is None:
            rows[:, DISCOUNTED] = np.nan
        else:
            rows[ends.order, DISCOUNTED] = ends.since(discounted, discounted[-1], self.open_discounted)
        self.ended(rows if counted is None else rows[counted])
        return found

    def _rows(
        self, when: Array, lanes: Array, steps: int, terminated: Any, versions: Any
    ) -> tuple[Episodes, _LaneEnds]:
        """Return a row for each episode that ended in a rollout of `steps` steps, without its return and length."""
        lasted = time.perf_counter() - self._began
        rows, ends = np.empty((len(when), _ROW_LENGTH)), _LaneEnds(when, lanes)
        rows[:, TIME] = self._began + (when + 1) * (lasted / steps)
        rows[:, LANE] = lanes
        rows[:, TERMINATED] = terminated
        rows[:, VERSION] = self._version if versions is None else versions
        at = rows[ends.order, TIME]
        rows[ends.order, SECONDS] = at - ends.previous(at, self._open_since)
        self._open_since[lanes] = rows[:, TIME]  # ends are in order of time, so the last one of a lane stays
        return rows, ends

    def ended(self, rows: Episodes) -> None:
        """Count these episodes, in the order in which they ended."""
        self.episodes += len(rows)
        self._unreported.add(rows[-KEPT:])

    def mixed_rollout(
        self,
        lanes: Array,
        totals: tuple[Array, Array, Array],
        at: Array,
        *,
        frames: int,
        terminated: Any,
        versions: Any,
    ) -> None:
        """Count a rollout of `frames` frames of mixed lanes, whose episodes the caller found, in the order they ended.

        `lanes`: the lane of each episode. `totals`: their returns, lengths and discounted returns. `at`: the index of
        the frame that ended each of them.
        """
        self.rollouts += 1
        self.frames += frames
        if not len(lanes):
            return
        rows, _ = self._rows(at, lanes, frames, terminated, versions)
        rows[:, RETURN], rows[:, LENGTH], rows[:, DISCOUNTED] = totals
        self.ended(rows)

    def take_episodes(self) -> Episodes:
        """Return the episodes that ended since the last call."""
        return self._unreported.take()

    def state(self) -> dict[str, Any]:
        """Return all counts, from which another worker can continue."""
        numbers = {name: getattr(self, name) for name in _COUNTS}
        lasted = torch.from_numpy(time.perf_counter() - self._open_since)
        return {**numbers, **{name: torch.from_numpy(getattr(self, name).copy()) for name in _OPEN}, "lasted": lasted}

    def load(self, state: Mapping[str, Any], *, opened: bool) -> None:
        """Continue from the counts of a `state`; `opened`: its open episodes continue too."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.loaded_seconds = self.seconds
        if opened:
            for name in _OPEN:
                if name in state:
                    setattr(self, name, state[name].numpy().copy())
            if "lasted" in state:
                self._open_since = time.perf_counter() - state["lasted"].numpy()

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Stats:
        """Return Stats with the counts of a `state`, without its open episodes."""
        stats = cls(0)
        stats.load(state, opened=False)
        return stats

    @classmethod
    def counted(cls, lanes: int, summary: Mapping[str, Any], *, frames: int, rollouts: int) -> Stats:
        """Return Stats of a worker of which only its `summary`, frames and rollouts are known."""
        stats = cls(lanes)
        stats.frames, stats.rollouts, stats.seconds = frames, rollouts, float(summary["collect_seconds"])
        stats.episodes, stats.nan_rewards = int(summary["episodes"]), int(summary["nan_rewards"])
        return stats

    def summary(self) -> dict[str, Any]:
        """Return the counts. Transport and waiting between rollouts are 0 here: the caller measures them."""
        return {
            "episodes": self.episodes,
            "nan_rewards": self.nan_rewards,
            "collect_seconds": self.seconds,
            "frames_per_second": self.frames / self.seconds if self.seconds else 0.0,
            **self._times.shares(self.seconds),
            "transport_seconds": 0.0,
            "wait_seconds": 0.0,
        }


class _LaneEnds:
    """Ends of episodes, given in order of time, sorted by lane."""

    def __init__(self, when: Array, where: Array) -> None:
        self.order = order = np.argsort(where, kind="stable")
        self._when, self._lane = when[order], where[order]
        self._first = np.ones(len(order), bool)  # whether each end is the first of its lane
        np.not_equal(self._lane[1:], self._lane[:-1], out=self._first[1:])

    def previous(self, values: Array, opened: Array) -> Array:
        """Return, for each end, the value at the previous end of its lane; for the first one, the lane's `opened`."""
        found = np.empty_like(values)
        found[1:] = values[:-1]
        found[self._first] = opened[self._lane[self._first]]
        return found

    def since(self, total: Array, per_lane: Array, opened: Array) -> Array:
        """Return how much of a running total `[T, N]` each episode got; `per_lane` is the total of each lane.

        `opened` holds what the open episodes had before the rollout, and is updated to what they have after it.
        """
        at = total[self._when, self._lane]
        found = at - self.previous(at, -opened)
        opened += per_lane
        last = np.ones(len(at), bool)
        last[:-1] = self._first[1:]
        lanes = self._lane[last]
        opened[lanes] = per_lane[lanes] - at[last]
        return found


class _EpisodeStarts:
    """Knows for each row of a rollout where its episode began."""

    def __init__(self, shape: tuple[int, ...], when: Array, where: Array) -> None:
        row = np.zeros(shape, np.int64)  # the last row before the episode, counted from 1; 0: none in this rollout
        inside = when + 1 < shape[0]
        row[when[inside] + 1, where[inside]] = when[inside] + 1
        self._row = running(np.maximum, row, row)

    def before(self, total: Array, opened: Array) -> Array:
        """Return a running total at the row before each row's episode began; `opened` for those already open."""
        there = np.take_along_axis(total, np.maximum(self._row - 1, 0), 0)
        return np.where(self._row > 0, there, opened)


def numbers_of(stats: Mapping[str, Any]) -> list[float]:
    """Return a worker's counts as a list of numbers, in the order of `COUNT_NAMES`."""
    return [np.nan if stats[name] is None else stats[name] for name in COUNT_NAMES]


def stats_of(numbers: Array) -> dict[str, Any]:
    """Return the counts that `numbers_of` encoded."""
    told = {name: None if np.isnan(value) else value for name, value in zip(COUNT_NAMES, numbers.tolist())}
    return told | {name: int(told[name] or 0) for name in ("episodes", "nan_rewards")}


def plus_earlier(before: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a worker plus those of the workers it replaced, `before`."""
    return {**stats, **{name: _sum([before[name], stats[name]]) for name in COUNT_NAMES if name != "frames_per_second"}}


def added(state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's `Stats.state()` plus the counts of the workers it replaced, `before`."""
    names = {"episodes": "episodes", "nan_rewards": "nan_rewards", "seconds": "collect_seconds"}
    return {**state, **{name: state[name] + before[told] for name, told in names.items()}}


def joined_counts(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of several workers' counts; of `collect_seconds`, the maximum."""
    found = {name: _sum([one[name] for one in stats]) for name in COUNT_NAMES}
    return found | {"collect_seconds": max((one["collect_seconds"] for one in stats), default=0.0)}


def public_counts(stats: Sequence[Mapping[str, Any]], log: EpisodeLog, worker: int | None = None) -> dict[str, Any]:
    """Return what `stats()` reports of one or more workers: counts, the last hundred episodes, and times."""
    counts = joined_counts(stats)
    in_rollouts = sum(one["collect_seconds"] for one in stats)
    split = {**counts, "loop_seconds": None}
    if counts["env_seconds"] is not None:
        split["loop_seconds"] = max(in_rollouts - counts["env_seconds"] - counts["policy_seconds"], 0.0)
    known = {name: stats[0][name] for name in SUMMARY if len(stats) == 1 and name in stats[0]}
    return {
        "episodes": counts["episodes"],
        **log.summary(worker),
        **known,  # from a worker that cannot report its episodes one by one
        "nan_rewards": counts["nan_rewards"],
        "collect_seconds": counts["collect_seconds"],
        "frames_per_second": counts["frames_per_second"],
        **{name: split[name] for name in _TIMES},
    }


def _sum(values: Sequence[float | None]) -> Any:
    """Return the sum of the values that are not None; None if all are None."""
    known = [value for value in values if value is not None]
    return sum(known) if known or not values else None
