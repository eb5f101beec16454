"""Stats: what a worker has seen, counted once per rollout with whole-array arithmetic."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from reap.core.gaps import running

RECENT = 100


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

    def begin(self) -> None:
        """A rollout starts."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """A rollout is full."""
        self.span = (self._began, time.perf_counter())
        self.seconds += self.span[1] - self._began

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
    ) -> None:
        """Rewards `[T, N]` of one rollout, and where its episodes ended, in order of time.

        `mask` says what is a frame; or `made`, how many each lane made, where they are its first ones.
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
            order = np.argsort(where * len(total) + when)  # by lane, then by time
            t, lane = when[order], where[order]
            first = np.r_[True, lane[1:] != lane[:-1]]
            before = np.where(first, -self.open_return[lane], np.r_[0.0, total[t, lane][:-1]])
            began = np.where(first, -self.open_length[lane], np.r_[0, count[t, lane][:-1]])
            returns, lengths = total[t, lane] - before, count[t, lane] - began
            back = np.empty_like(order)
            back[order] = np.arange(len(order))
            recent = back[-RECENT:]  # in time, not by lane
            self.returns.extend(returns[recent].tolist())
            self.lengths.extend(lengths[recent].tolist())
            self.episodes += len(when)
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
