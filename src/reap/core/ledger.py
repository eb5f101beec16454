"""Ledger: fills mask, trajectory ids, versions and statistics once per rollout, with whole-array arithmetic.

The hot loop only records where episodes ended. The ledger computes the rest from that after the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reap.core.columns.skipped_rows import clear_rest, close_gaps, running
from reap.core.measuring.episode_log import EPISODE_LENGTH, EPISODE_RETURN
from reap.core.measuring.stats import Stats
from reap.core.slot import CUT, FLAGS, MASK, TRAJ_IDS, VERSION, Slot
from reap.spec import EnvSpec

Array = np.ndarray[Any, Any]

_FLAGS = [("next", flag) for flag in FLAGS]
_TERMINATED = ("next", "terminated")
_OURS = {MASK, CUT, TRAJ_IDS, EPISODE_RETURN, EPISODE_LENGTH}
# Columns that are the same in every row, or written after gaps are closed.
_NOT_MOVED = {*_OURS, VERSION, ("next", *VERSION), *((flag,) for flag in FLAGS), *_FLAGS}


class TrajectoryIds:
    """A counter that numbers the trajectories of a run. Worker `worker` of `of` uses the ids `worker + k * of`."""

    def __init__(self, worker: int = 0, of: int = 1) -> None:
        self.next, self._stride = worker, of

    def take(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the next `count` ids."""
        ids = self.next + np.arange(count, dtype=np.int64) * self._stride
        self.next += count * self._stride
        return ids

    def resume_at(self, first: int) -> None:
        """Continue from `first`, where the counter of a saved worker stood.

        If `first` belongs to another worker's ids, continue at or above the larger of the two positions.
        """
        if (first - self.next) % self._stride == 0:
            self.next = first
        else:
            self.skip_to(first)

    def skip_to(self, first: int) -> None:
        """Continue at or above `first`, without going back."""
        self.next += max(0, -(-(first - self.next) // self._stride)) * self._stride


class Ledger:
    """Keeps trajectory ids and counts of one env's lanes from rollout to rollout."""

    def __init__(
        self,
        spec: EnvSpec,
        counter: TrajectoryIds,
        stats: Stats,
        *,
        reset_when_done: bool = True,
        skips: bool | None = None,
    ) -> None:
        self.counter, self.stats = counter, stats
        self._resets, self._skips = reset_when_done, spec.rows == "skipping" if skips is None else skips
        self.reward = ("next", *next(iter(spec.reward)))
        self.ids = counter.take(spec.all_lanes)
        self._cut: Sequence[int] = ()  # lanes whose next row is the first after a failure cut their trajectory

    def reset(self, lanes: Sequence[int], *, fresh_ids: bool = True) -> None:
        """Note that these lanes were reset between two rollouts."""
        if fresh_ids:
            self.ids[lanes] = self.counter.take(len(lanes))
        self.stats.forget(lanes)

    def mark_cut(self, lanes: Sequence[int]) -> None:
        """Note that a failure cut the trajectories of these lanes; their next rows will be marked as cut."""
        self._cut = lanes

    def write_cuts(self, column: Array, lanes: Array | None = None) -> None:
        """Mark the first row of each lane that failed. `lanes`: the lane of each row, if `column` mixes lanes."""
        if not len(self._cut):
            return
        if lanes is None:
            column[0, self._cut] = True
            self._cut = ()
        else:
            whose, first = np.unique(lanes, return_index=True)
            column[first[np.isin(whose, self._cut)]] = True
            self._cut = [lane for lane in self._cut if lane not in whose]

    def close(
        self,
        slot: Slot,
        steps: int,
        when: Array,
        where: Array,
        *,
        due: Sequence[int],
        version: int | None,
        cut: tuple[Array, ...] | None = None,
    ) -> None:
        """Finish a rollout of `steps` steps whose episodes ended at steps `when` in lanes `where`, in order of time.

        `due`: the lanes that ended and are not reset yet. `version` None: the root version column is already written.
        `cut`: steps and lanes of the frames already marked as the first after a failure.
        """
        arrays = slot.arrays
        frames = steps * slot.layout.lanes
        mask = arrays.get(MASK)
        made = None  # frames of each lane, if gaps were closed and frames are its first rows
        over = arrays[("next", "done")][when, where, 0] if CUT in arrays and mask is not None else None
        if mask is not None:
            when, made = self._finish_mask(mask, slot, steps, when, where, version is None)
            frames = int(np.count_nonzero(mask))
        counted, began = None, None
        if over is not None and not over.all():
            when, where, counted = self._shift_cut_ends(when, where, over)
            began = when[~counted] + 1, where[~counted]
        if cut is not None:
            when, where, counted = self._add_cut_ends(when, where, *cut)
        reward = arrays[self.reward][:steps]
        one = reward.ndim == 3 and reward.shape[2] == 1
        number = reward[..., 0] if one else reward.reshape(steps, len(self.ids), -1).mean(-1)
        no_frame = None if mask is None or frames == mask.size else ~mask
        frame = None if no_frame is None or made is not None else ~no_frame[:steps]
        so_far = self.stats.rollout(
            number,
            when,
            where,
            frames=frames,
            mask=frame,
            made=made,
            counted=counted,
            terminated=arrays[_TERMINATED][when, where, 0],
            versions=arrays[VERSION][when, where] if version is None and VERSION in arrays else None,
            so_far=EPISODE_RETURN in arrays,
        )
        if so_far is not None:
            for key, values in ((EPISODE_RETURN, so_far.returns), (EPISODE_LENGTH, so_far.lengths)):
                arrays[key][:steps] = values
                arrays[key][steps:] = 0
                if no_frame is not None:
                    np.putmask(arrays[key], no_frame, 0)
        if CUT in arrays:
            if cut is None:
                arrays[CUT][...] = False
            self.write_cuts(arrays[CUT])
            if began is not None and mask is not None:
                self._mark_after_cuts(arrays[CUT], mask, *began)
        if TRAJ_IDS in arrays:
            self._write_ids(arrays[TRAJ_IDS], when, where, steps, due)
            if no_frame is not None:
                np.putmask(arrays[TRAJ_IDS], no_frame, -1)
        if version is None and ("next", *VERSION) in arrays:
            arrays[("next", *VERSION)][...] = arrays[VERSION]
        for key in (VERSION, ("next", *VERSION)):
            if key in arrays and version is not None:
                arrays[key][...] = version
                if no_frame is not None:
                    np.putmask(arrays[key], no_frame, 0)

    def _shift_cut_ends(self, when: Array, where: Array, over: Array) -> tuple[Array, Array, Array]:
        """Return steps and lanes where trajectories ended, and which of these ends are ends of episodes.

        The others were cut by a failure: such a trajectory ends at the frame before the one that was lost.
        """
        when = np.where(over, when, when - 1)
        first = when < 0  # these were cut before the first frame of this rollout
        lanes = where[first].tolist()
        self.reset(lanes)
        self._cut = sorted({*self._cut, *lanes})
        return when[~first], where[~first], over[~first]

    def _add_cut_ends(self, when: Array, where: Array, first: Array, lanes: Array) -> tuple[Array, Array, Array]:
        """Return steps and lanes where trajectories ended, and which of these ends are ends of episodes.

        The others were cut by a failure, just before the frames at steps `first` of `lanes`.
        """
        self.reset(lanes[first == 0].tolist())  # these were cut before the first frame of this rollout
        over = {*zip(when.tolist(), where.tolist())}
        cut = [(t - 1, lane) for t, lane in zip(first.tolist(), lanes.tolist()) if t and (t - 1, lane) not in over]
        steps, of = np.array(cut, np.int64).reshape(-1, 2).T
        order = np.argsort(np.r_[when, steps], kind="stable")
        counted = order < len(when)
        return np.r_[when, steps][order], np.r_[where, of][order], counted

    def _mark_after_cuts(self, column: Array, mask: Array, first: Array, lanes: Array) -> None:
        """Mark the rows after a cut. If a lane has no such row yet, its first row of the next rollout is marked."""
        there = first < len(column)
        there[there] = mask[first[there], lanes[there]]
        column[first[there], lanes[there]] = True
        self._cut = sorted({*self._cut, *lanes[~there].tolist()})

    def _write_ids(self, column: Array, when: Array, where: Array, steps: int, due: Sequence[int]) -> None:
        """Write the id column: ids only grow along a lane, so mark the starts and take a running maximum."""
        column[...] = 0
        column[0] = self.ids
        if due:  # lanes that are not reset yet get their new ids when they are reset
            began = when < (steps - 1 if self._resets else 0)
            when, where = when[began], where[began]
        if len(when):
            new = self.counter.take(len(when))
            inside = when + 1 < len(column)
            column[when[inside] + 1, where[inside]] = new[inside]
            self.ids[where] = new  # ends are in order of time, so the last id of a lane stays
            running(np.maximum, column, column)
        else:
            column[1:] = self.ids

    def _finish_mask(
        self, mask: Array, slot: Slot, steps: int, when: Array, where: Array, versions: bool
    ) -> tuple[Array, Array | None]:
        """Finish the mask, close the gaps of skipped steps, and clear rows without a frame.

        `versions`: whether versions differ between rows and must move with their frames. Returns the steps at which
        episodes now end and, if gaps were closed, how many frames each lane made (else None).
        """
        mask[steps:] = False
        if not self._resets:
            for t, lane in zip(when, where):
                mask[t + 1 :, lane] = False
        if mask.all():
            return when, None
        made = None
        stay = _NOT_MOVED - {VERSION} if versions else _NOT_MOVED
        columns = [column for key, column in slot.arrays.items() if key not in stay and column.strides[0]]
        if self._skips:
            moved, made = close_gaps(mask, columns, when, where)
            for flag in _FLAGS:  # these flags are set only where episodes end
                column, ends = slot.arrays[flag], slot.arrays[flag][when, where]
                column[...] = False
                column[moved, where] = ends
            when = moved
        clear_rest(mask, columns)
        return when, made
