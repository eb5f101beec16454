"""EpisodeQuota: a rollout ends with the last episode that is wanted.

    lane 0   ───■───────■────■          3 wanted of lanes 0 and 1: two of lane 0, one of lane 1, each its first ones;
    lane 1   ──────■────────…           lane 1 goes on beside lane 0, and nobody counts what it does then

Every lane has its share beforehand: were the first to end taken, short episodes would be more frequent than they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class EpisodeQuota:
    """So many episodes, shared out among lanes; the first lanes have one more where that does not come out even."""

    def __init__(self, episodes: int, lanes: int) -> None:
        each, rest = divmod(episodes, lanes)
        self._shares = np.array([each + (lane < rest) for lane in range(lanes)])
        self.begin()

    def begin(self) -> None:
        """Count from nothing again."""
        self._left = self._shares.copy()

    @property
    def met(self) -> bool:
        """Whether every lane has played its share."""
        return not bool((self._left > 0).any())

    def count(self, lanes: Array) -> None:
        """Episodes have ended in these lanes, once each."""
        self._left[lanes] -= 1

    def counted(self, lanes: Array, over: Array) -> Array:
        """Which of these frames belong to the lanes' shares: frame by frame the lane, and whether an episode ended.

        Frames are in order of time within each lane; those that follow go on from here.
        """
        order = np.argsort(lanes, kind="stable")
        lane, ends = lanes[order], over[order].astype(np.int64)
        before = np.cumsum(ends) - ends  # ends before each frame, in all lanes up to this one
        first = np.r_[True, lane[1:] != lane[:-1]] if len(lane) else np.zeros(0, bool)
        before -= np.maximum.accumulate(np.where(first, before, 0))
        wanted = np.zeros(len(lanes), bool)
        wanted[order] = before < self._left[lane]
        self._left -= np.bincount(lane, ends, minlength=len(self._left)).astype(np.int64)
        return wanted
