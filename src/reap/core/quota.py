"""EpisodeQuota: ends a rollout when every lane has played its share of a number of episodes.

    lane 0   ───■───────■────■          3 episodes of lanes 0 and 1: the first two of lane 0, the first one of lane 1;
    lane 1   ──────■────────…           lane 1 is stepped along with lane 0, but its later episodes do not count

Each lane's share is fixed beforehand. Taking the episodes that end first would favour short ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class EpisodeQuota:
    """A number of episodes divided among lanes. If they do not divide evenly, the first lanes get one more."""

    def __init__(self, episodes: int, lanes: int) -> None:
        each, rest = divmod(episodes, lanes)
        self._shares = np.array([each + (lane < rest) for lane in range(lanes)])
        self.begin()

    def begin(self) -> None:
        """Restart the count."""
        self._left = self._shares.copy()

    @property
    def met(self) -> bool:
        """Whether every lane has played its share."""
        return not bool((self._left > 0).any())

    def count(self, lanes: Array) -> None:
        """Count one ended episode for each of these lanes."""
        self._left[lanes] -= 1

    def counted(self, lanes: Array, over: Array) -> Array:
        """Return which of these frames belong to the lanes' shares, and count the episodes that they end.

        `lanes` and `over` give the lane of each frame and whether it ends an episode. Frames must be in order of time
        within each lane; the next call continues after them.
        """
        order = np.argsort(lanes, kind="stable")
        lane, ends = lanes[order], over[order].astype(np.int64)
        before = np.cumsum(ends) - ends  # ends before each frame, in its own lane and in those sorted before it
        first = np.r_[True, lane[1:] != lane[:-1]] if len(lane) else np.zeros(0, bool)
        before -= np.maximum.accumulate(np.where(first, before, 0))
        wanted = np.zeros(len(lanes), bool)
        wanted[order] = before < self._left[lane]
        self._left -= np.bincount(lane, ends, minlength=len(self._left)).astype(np.int64)
        return wanted
