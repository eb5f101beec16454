"""Stats: what a worker has seen, counted once per rollout with whole-array arithmetic.

worker ──► Stats ──► episodes that ended, how long ago ──► EpisodeWindow ──► means over the last hundred of all workers
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap.core.columns.skipped_rows import running

RECENT = 100
_COUNTS = ("frames", "rollouts", "episodes", "nan_rewards", "seconds")
Episodes = np.ndarray[
    Any, np.dtype[np.float64]
]  # [n, 3]: when each ended (seconds, perf_counter), its return and length
TOLD = (
    "episodes",
    "mean_return",
    "mean_length",
    "nan_rewards",
    "collect_seconds",
    "frames_per_second",
)  # of a worker's summary, in this order
_NONE: Episodes = np.zeros((0, 3))


class EpisodeWindow:
    """The last hundred episodes of several workers, in the order in which they ended."""

    def __init__(self) -> None:
        self._kept = self._untold = _NONE

    def add(self, episodes: Episodes, *, shift: float = 0.0) -> None:
        """Episodes that have ended; `shift` is what their clock is behind ours."""
        if not len(episodes):
            return
        new = episodes + (shift, 0.0, 0.0) if shift else episodes
        self._kept = _latest(self._kept, new)
        self._untold = _latest(self._untold, new)

    def state(self) -> torch.Tensor:
        """Those it holds, to go on from elsewhere: how long ago each ended, return and length."""
        return torch.from_numpy(self._kept - (time.perf_counter(), 0.0, 0.0))

    def load(self, state: torch.Tensor) -> None:
        """Hold these, and no others."""
        self._kept = state.numpy() + (time.perf_counter(), 0.0, 0.0)

    def ended_since(self) -> Episodes:
        """Those that were added since this was asked before, a hundred at most."""
        found, self._untold = self._untold, _NONE
        return found

    def means(self) -> dict[str, Any]:
        """Mean return and length (None before the first one ends)."""
        _, returns, lengths = self._kept.T
        some = len(returns) > 0
        return {
            "mean_return": float(returns.mean()) if some else None,
            "mean_length": float(lengths.mean()) if some else None,
        }


def _latest(kept: Episodes, new: Episodes) -> Episodes:
    both = np.concatenate([kept, new])
    return both[np.argsort(both[:, 0], kind="stable")[-RECENT:]]


class Stats:
    """Counts of one worker: frames, episodes, recent returns and lengths, NaN rewards, seconds spent collecting."""

    def __init__(self, lanes: int) -> None:
        self.frames = 0
        self.rollouts = 0
        self.episodes = 0
        self.nan_rewards = 0
        self.seconds = 0.0
        self.returns: deque[float] = deque(maxlen=RECENT)
        self.lengths: deque[int] = deque(maxlen=RECENT)
        self.open_return = np.zeros(lanes)  # of episodes that have not ended
        self.open_length = np.zeros(lanes, np.int64)
        self._began = 0.0
        self.span = (0.0, 0.0)  # of the last rollout
        self._fresh = _NONE  # episodes that ended in the last rollout: when (as a share of it), return, length
        self._untold = _NONE  # episodes that nobody was told of: when, return, length

    def begin(self) -> None:
        """Note when a rollout starts."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """A rollout is full."""
        self.span = (self._began, time.perf_counter())
        self.seconds += self.span[1] - self._began
        if len(self._fresh):
            self._fresh[:, 0] = self._began + self._fresh[:, 0] * (self.span[1] - self._began)
            self._untold = np.concatenate([self._untold, self._fresh])[-RECENT:]
            self._fresh = _NONE

    def forget(self, lanes: Sequence[int]) -> None:
        """Episodes cut short by a reset are not counted."""
        self.open_return[lanes] = 0.0
        self.open_length[lanes] = 0

    def rollout(
        self,
        reward: np.ndarray[Any, Any],
        when: np.ndarray[Any, Any],
        where: np.ndarray[Any, Any],
        *,
        frames: int,
        mask: Any = None,
        made: Any = None,
        counted: Any = None,
    ) -> None:
        """Rewards `[T, N]` of one rollout, and where its episodes ended, in order of time.

        `mask` says what is a frame; or `made`, how many each lane made, where they are its first ones. `counted`: which
        of the ends are ends of episodes; the others were cut.
        """
        self.rollouts += 1
        self.frames += frames
        total = running(np.add, reward, np.empty(reward.shape))
        if not np.isfinite(total[-1]).all():
            self.nan_rewards += int(np.isnan(reward).sum())
            running(np.add, np.where(np.isfinite(reward), reward, 0.0), total)  # one NaN must not spoil every return
        count: np.ndarray[Any, Any] = (
            np.arange(1, len(total) + 1)[:, None] if mask is None else np.cumsum(mask, axis=0, dtype=np.int32)
        )
        count = np.broadcast_to(count, total.shape)
        in_all = count[-1] if made is None else made
        if len(when):
            order = np.argsort(where * len(total) + when, kind="stable")  # by lane, then by time
            t, lane = when[order], where[order]
            first = np.r_[True, lane[1:] != lane[:-1]]
            before = np.where(first, -self.open_return[lane], np.r_[0.0, total[t, lane][:-1]])
            began = np.where(first, -self.open_length[lane], np.r_[0, count[t, lane][:-1]])
            returns, lengths = total[t, lane] - before, count[t, lane] - began
            back = np.empty_like(order)
            back[order] = np.arange(len(order))
            recent = (back if counted is None else back[counted])[-RECENT:]  # in time, not by lane
            self.returns.extend(returns[recent].tolist())
            self.lengths.extend(lengths[recent].tolist())
            at = (t[recent] + 1) / len(total)
            self._fresh = np.stack([at, returns[recent], lengths[recent].astype(np.float64)], 1)
            self.episodes += len(when) if counted is None else int(np.count_nonzero(counted))
            last = np.r_[lane[1:] != lane[:-1], True]
            open_return, open_length = total[-1] + self.open_return, self.open_length + in_all
            open_return[lane[last]] = total[-1, lane[last]] - total[t[last], lane[last]]
            open_length[lane[last]] = in_all[lane[last]] - count[t[last], lane[last]]
            self.open_return, self.open_length = open_return, open_length
        else:
            self.open_return += total[-1]
            self.open_length += in_all

    def ended(self, returns: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], frames: int) -> None:
        """One rollout of so many frames, whose episodes somebody else has found, in the order in which they ended."""
        self.rollouts += 1
        self.frames += frames
        self.episodes += len(returns)
        self.returns.extend(returns[-RECENT:].tolist())
        self.lengths.extend(lengths[-RECENT:].tolist())
        recent = [np.asarray(values[-RECENT:], np.float64) for values in (returns, lengths)]
        self._fresh = np.stack([np.arange(1, len(recent[0]) + 1) / max(len(recent[0]), 1), *recent], 1)

    def ended_since(self) -> Episodes:
        """The last hundred episodes that ended since this was asked before: when, return and length of each."""
        found, self._untold = self._untold, _NONE
        return found

    def state(self) -> dict[str, Any]:
        """Everything that is counted, to count on from elsewhere."""
        numbers = {name: getattr(self, name) for name in _COUNTS}
        lists = {name: list(getattr(self, name)) for name in ("returns", "lengths")}
        opened = {name: torch.from_numpy(getattr(self, name).copy()) for name in ("open_return", "open_length")}
        return {**numbers, **lists, **opened}

    def load(self, state: Mapping[str, Any], *, opened: bool) -> None:
        """Count on from there; `opened`: the episodes that were open go on too."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.returns, self.lengths = (deque(state[name], maxlen=RECENT) for name in ("returns", "lengths"))
        if opened:
            self.open_return, self.open_length = (state[name].numpy().copy() for name in ("open_return", "open_length"))

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Stats:
        """Those that have counted what is in a `state`."""
        stats = cls(0)
        stats.load(state, opened=False)
        return stats

    @classmethod
    def counted(cls, lanes: int, summary: Mapping[str, Any], *, frames: int, rollouts: int) -> Stats:
        """Those of a worker of which no more is known than its `summary` and what it has made."""
        stats = cls(lanes)
        stats.frames, stats.rollouts, stats.seconds = frames, rollouts, float(summary["collect_seconds"])
        stats.episodes, stats.nan_rewards = int(summary["episodes"]), int(summary["nan_rewards"])
        return stats

    def summary(self) -> dict[str, Any]:
        """The counts, and means over the last hundred episodes (None before the first one ends)."""
        return {
            "episodes": self.episodes,
            "mean_return": float(np.mean(self.returns)) if self.returns else None,
            "mean_length": float(np.mean(self.lengths)) if self.lengths else None,
            "nan_rewards": self.nan_rewards,
            "collect_seconds": self.seconds,
            "frames_per_second": self.frames / self.seconds if self.seconds else 0.0,
        }


def numbers_of(stats: dict[str, Any]) -> list[float]:
    """What a worker has to say about its episodes, as numbers."""
    return [np.nan if stats[name] is None else stats[name] for name in TOLD]


def stats_of(numbers: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The statistics encoded by `numbers_of`."""
    told = {name: None if np.isnan(value) else value for name, value in zip(TOLD, numbers.tolist())}
    return told | {name: int(told[name] or 0) for name in ("episodes", "nan_rewards")}


def counted_on(before: Mapping[str, Any], stats: dict[str, Any]) -> dict[str, Any]:
    """The statistics of a worker that has taken the place of another, which had counted so much."""
    if not before["episodes"] and not before["collect_seconds"]:
        return stats
    sums = {name: before[name] + stats[name] for name in ("episodes", "nan_rewards", "collect_seconds")}
    latest = stats if stats["episodes"] else before
    return {**stats, **sums, **{name: latest[name] for name in ("mean_return", "mean_length")}}


def added(state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's `Stats.state()`, to which the counts of those are added whose place it has taken."""
    names = {"episodes": "episodes", "nan_rewards": "nan_rewards", "seconds": "collect_seconds"}
    return {**state, **{name: state[name] + before[told] for name, told in names.items()}}


def together(stats: Sequence[Mapping[str, Any]], window: EpisodeWindow) -> dict[str, Any]:
    """The workers' counts as one: sums of counts, means over the last episodes of all of them."""
    return {
        "episodes": sum(s["episodes"] for s in stats),
        **window.means(),
        "nan_rewards": sum(s["nan_rewards"] for s in stats),
        "collect_seconds": max((s["collect_seconds"] for s in stats), default=0.0),
        "frames_per_second": sum(s["frames_per_second"] for s in stats),
    }
