"""Stream: delivers frames of ready lanes in the order in which they came, without waiting for slow lanes.

log      row t   root [2 0]  next [1 3]            a frame: the root with which its lane was sent, and its successor
stream   1 3 0 2 0 1 …  ──► the first F of them    in order of time within each lane, lanes as they became ready
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reap.core.lanes.ready import ENV_INDEX, Sorter
from reap.core.ledger import Ledger
from reap.core.measuring.episode_log import EPISODE_LENGTH, EPISODE_RETURN
from reap.core.slot import CUT, MASK, TRAJ_IDS, VERSION, Slot
from reap.spec import Key

Array = np.ndarray[Any, Any]


class Stream(Sorter):
    """Collects logs that the loop fills, and delivers batches `[F]` of the frames that came first, of any lanes."""

    def missing_frames(self, steps: int) -> int:
        """Return how many more frames are needed to have `steps` in all."""
        return max(0, steps - int(self._count.sum()))

    def _numbers(self, lanes: Array) -> Array:
        return int(self._count.sum()) + np.arange(len(lanes))

    def deliver(self, slot: Slot, ledger: Ledger) -> None:
        """Complete `slot`, which has one lane, with the frames held for it, their ids and lanes, and count them."""
        self._write_held(slot)
        # Fewer frames than fit only if an episode quota is met; the mask says so.
        frames = min(slot.layout.steps, int(self._count.sum()))
        arrays = {key: array[:frames, 0] for key, array in slot.arrays.items()}
        lanes = arrays[ENV_INDEX].copy()
        self._count -= np.bincount(lanes, minlength=self._lanes)
        if ("next", *VERSION) in arrays:
            arrays[("next", *VERSION)][...] = arrays[VERSION]
        ids = _count_frames(ledger, lanes, arrays)
        if TRAJ_IDS in arrays:
            arrays[TRAJ_IDS][...] = ids
        if CUT in arrays:
            ledger.write_cuts(arrays[CUT], lanes)
        if MASK in arrays:
            arrays[MASK][...] = True
            for key, array in slot.arrays.items():
                array[frames:] = -1 if key == TRAJ_IDS else 0


def _count_frames(ledger: Ledger, lanes: Array, arrays: Mapping[Key, Array]) -> Array:
    """Count frames of mixed lanes and the episodes they end, and return the trajectory id of each frame.

    Sorted by lane, trajectories are segments, and one pass over their borders finds them all. The frames of a
    trajectory that a failure cut are not counted towards any episode.
    """
    frames, stats, done = len(lanes), ledger.stats, arrays[("next", "done")][..., 0]
    number = arrays[ledger.reward].reshape(frames, -1).mean(-1, dtype=np.float64)
    if not np.isfinite(number).all():
        stats.nan_rewards += int(np.isnan(number).sum())
        number = np.where(np.isfinite(number), number, 0.0)
    order = np.argsort(lanes, kind="stable")
    cut = arrays[CUT] if CUT in arrays else np.zeros(frames, bool)
    lane, over, after_cut = lanes[order], done[order], cut[order]
    new_lane = np.r_[True, lane[1:] != lane[:-1]]
    starts = np.flatnonzero(new_lane | np.r_[False, over[:-1]] | after_cut)
    lengths = np.diff(np.r_[starts, frames])
    ends = starts + lengths - 1
    segment_lane, ended = lane[starts], over[ends]
    first, after_cut = new_lane[starts], after_cut[starts]  # of the segments: first of its lane; after a failure
    open_before = first & ~after_cut

    def opened(values: Array) -> Array:
        return np.where(open_before, values[segment_lane], 0)

    before = opened(stats.open_length)
    place = np.arange(frames) - np.repeat(starts - before, lengths)  # the index of each frame in its episode
    opened_with = opened(stats.open_return)
    returns = np.add.reduceat(number[order], starts) + opened_with
    counts = lengths + before
    discounted = np.full(len(starts), np.nan)
    if stats.gamma is not None:
        weighed = number[order] * float(stats.gamma) ** place
        discounted = np.add.reduceat(weighed, starts) + opened(stats.open_discounted)
    closed = ended | np.r_[after_cut[1:] & ~first[1:], False]
    in_time = np.flatnonzero(closed)[np.argsort(order[ends[closed]])]  # ended trajectories, in the order of their ends
    whole = in_time[ended[in_time]]
    at = order[ends[whole]]
    stats.mixed_rollout(
        segment_lane[whole],
        (returns[whole], counts[whole], discounted[whole]),
        at,
        frames=frames,
        terminated=arrays[("next", "terminated")][at, 0],
        versions=arrays[VERSION][at] if VERSION in arrays else None,
    )
    last = np.r_[segment_lane[1:] != segment_lane[:-1], True]  # segments that are the last of their lane
    for mine, values in zip(
        (stats.open_return, stats.open_length, stats.open_discounted), (returns, counts, discounted)
    ):
        mine[segment_lane[last]] = np.where(ended, 0, values)[last]
    if EPISODE_RETURN in arrays:
        arrays[EPISODE_LENGTH][order] = place + 1
        total = np.cumsum(number[order])
        total -= np.repeat(total[starts] - number[order][starts] - opened_with, lengths)
        arrays[EPISODE_RETURN][order] = total

    ids = np.empty(len(starts), np.int64)
    ids[open_before] = ledger.ids[segment_lane[open_before]]
    ids[first & after_cut] = ledger.counter.take(int(np.count_nonzero(first & after_cut)))
    following = np.empty(len(starts), np.int64)
    following[in_time] = ledger.counter.take(len(in_time))
    ids[1:][~first[1:]] = following[:-1][~first[1:]]
    ledger.ids[segment_lane[last]] = np.where(ended, following, ids)[last]
    column = np.empty(frames, np.int64)
    column[order] = np.repeat(ids, lengths)
    return column
