"""Ready lanes: sorts the frames of envs whose lanes become ready at different times into one sequence per lane.

The loop steps such an env like any other, but a *position* in its rows holds another lane at every step. Row t holds
observation and action of the lanes *in hand*, which the policy decides about, and the successors of whichever lanes
became ready meanwhile. The leaf `LANE_AT` says which lane is at which position.

    log       row t   root  [2 0]   next  [1 3]        a lane's first root belongs to its first next,
              row t+1 root  [1 3]   next  [0 2]        its second to its second, and so on
                                  │
    slot      lane 0: root₀ next₀ · lane 1: …          T frames of every lane make a batch; further frames of
                                                       lanes that are ahead are held for the next one

`LANE_AT` is -1 at an empty position. A lane that comes back without a frame was reset: the first time by the reset of
all lanes, later because the worker that stepped it failed. After a failure its next frame begins another trajectory.

Guarantees: no frame is duplicated or reordered within its lane, and none is lost unless a rollout is interrupted
(Ctrl-C). Each frame carries the version of the weights that acted.
The price is one copy of each frame, made for a whole log at once: from the log to its place in the batch. Frames that
a batch has no room for are held, which is a second copy. So is what the later logs of a batch add: few frames, of lanes
that were behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from reap.core.ledger import Ledger
from reap.core.measuring.episode_log import EPISODE_LENGTH, EPISODE_RETURN
from reap.core.slot import CUT, MASK, TRAJ_IDS, VERSION, Slot
from reap.spec import LANE_AT, Key

Array = np.ndarray[Any, Any]
NEXT_LANE_AT: Key = ("next", *LANE_AT)
ENV_INDEX: Key = ("env_index",)  # a column for the lane of each frame, in slots that mix lanes
_VERSION_NEXT: Key = ("next", *VERSION)


def delivered(columns: Iterable[Key]) -> list[Key]:
    """Return the columns of a log that are delivered, without those that only serve sorting."""
    return [key for key in columns if key not in (LANE_AT, NEXT_LANE_AT, MASK)]


class Sorter:
    """Collects logs that the loop fills, and delivers batches with the same number of frames of every lane."""

    def __init__(self, columns: Collection[Key], lanes: int) -> None:
        self._lanes = lanes
        self._reports_cuts = CUT in columns
        self.dropped: Collection[int] = ()  # lanes that make no more frames
        ours = (TRAJ_IDS, CUT, EPISODE_RETURN, EPISODE_LENGTH, _VERSION_NEXT)  # written after sorting
        keys = [key for key in delivered(columns) if key not in ours]
        self._roots = [key for key in keys if key[0] != "next"]
        self._nexts = [key for key in keys if key[0] == "next"]
        self.clear()

    def clear(self) -> None:
        """Drop all frames held or in flight, because all lanes are reset."""
        self._open: dict[Key, Array] = {}  # roots whose successors have not come back yet
        self._open_lanes: Array | None = None
        self._held: list[tuple[Array, Array, dict[Key, Array]]] = []  # (number and lane of each frame, columns)
        self._count = np.zeros(self._lanes, np.int64)  # frames for the next batch and later ones
        self._slot_is_empty = True  # no frame has been written to the slot of the next batch
        self._reset_done = np.zeros(self._lanes, bool)  # lanes that have come back from the reset of all lanes
        self._cut = np.zeros(self._lanes, bool)  # lanes that have made no frame since a failure

    def missing_frames(self, steps: int) -> int:
        """Return how many more frames are needed, at least, until every lane has `steps` of them."""
        missing = np.maximum(steps - self._count, 0)
        missing[list(self.dropped)] = 0
        return int(missing.sum())

    def feed(self, log: Slot, version: int | None, steps: int, slot: Slot) -> None:
        """Write the frames of the first `steps` rows of a log to `slot`, and hold those it has no room for.

        `version`: that of the weights; None if the policy wrote it.
        """
        arrays = {key: array[:steps] for key, array in log.arrays.items()}
        if VERSION in arrays and version is not None:
            arrays[VERSION][...] = version
        flat = {key: arrays[key].reshape(-1, *arrays[key].shape[2:]) for key in (*self._roots, *self._nexts)}
        # After a reset, lanes that are not in hand have yet to come back from it, without a frame.
        if self._open_lanes is None:
            self._open_lanes = np.setdiff1d(np.arange(self._lanes), arrays[LANE_AT][0])
            self._reset_done[:] = True
            self._reset_done[self._open_lanes] = False
            self._open = {
                key: np.zeros_like(flat[key], shape=(len(self._open_lanes), *flat[key].shape[1:]))
                for key in self._roots
            }
        sent = np.concatenate([self._open_lanes, arrays[LANE_AT].reshape(-1)])
        returned = arrays[NEXT_LANE_AT].reshape(-1)
        roots, nexts = np.argsort(sent, kind="stable"), np.argsort(returned, kind="stable")
        roots, nexts = roots[sent[roots] >= 0], nexts[returned[nexts] >= 0]  # -1: the position was empty
        answered = _index_in_lane(sent[roots]) < np.bincount(returned[nexts], minlength=self._lanes)[sent[roots]]
        waiting, roots = roots[~answered], roots[answered]
        if MASK in arrays:
            frame = arrays[MASK].reshape(-1)[nexts]
            cut = self._after_failures(returned[nexts], frame)
            roots, nexts = roots[frame], nexts[frame]
        else:
            cut = np.zeros(len(nexts), bool)
        by_arrival = np.argsort(nexts)  # the order in which the successors returned
        roots, nexts = roots[by_arrival], nexts[by_arrival]
        lanes = returned[nexts]
        columns = {key: _Column(self._open[key], flat[key], roots) for key in self._roots}
        columns |= {key: _Column(flat[key][:0], flat[key], nexts) for key in self._nexts}
        if self._reports_cuts:
            columns[CUT] = _Column(cut[:0], cut, by_arrival)
        if ENV_INDEX in slot.arrays:
            columns[ENV_INDEX] = _Column(returned[:0], returned, nexts)
        self._store(slot, self._numbers(lanes), lanes, columns)
        self._open = {key: _Column(self._open[key], flat[key], waiting).take(...) for key in self._roots}
        self._open_lanes = sent[waiting]
        self._count += np.bincount(lanes, minlength=self._lanes)

    def _numbers(self, lanes: Array) -> Array:
        """Return the number of each new frame, in order of arrival: its step in the next batch, or beyond that."""
        order = np.argsort(lanes, kind="stable")
        numbers = np.empty(len(lanes), np.int64)
        numbers[order] = _index_in_lane(lanes[order])
        return numbers + self._count[lanes]

    def _store(self, slot: Slot, numbers: Array, lanes: Array, columns: Mapping[Key, _Column]) -> None:
        """Write new frames to their places in `slot`, and hold those it has no room for."""
        steps, width = slot.layout.steps, slot.layout.lanes
        fits = numbers < steps
        here, later = np.flatnonzero(fits), np.flatnonzero(~fits)
        place = numbers[here], lanes[here] if width > 1 else 0
        # NumPy copies selected frames directly to their places only if it writes the whole column. Places whose frame
        # is held, or comes in a later log, get any frame first: what belongs there is written afterwards.
        if self._slot_is_empty and 2 * len(here) > steps * width:
            source = np.zeros((steps, width), np.int64)
            source[place] = here
            for key, column in columns.items():
                column.take(source, out=slot.arrays[key])
        else:
            for key, column in columns.items():
                slot.arrays[key][place] = column.take(here)
        self._slot_is_empty = False
        if len(later):
            self._held.append((numbers[later], lanes[later], {key: c.take(later) for key, c in columns.items()}))

    def _after_failures(self, lanes: Array, frame: Array) -> Array:
        """Return which frames, of entries sorted by lane, are the first after a failure of their lane."""
        cut = np.zeros(len(lanes), bool)
        if self._reports_cuts and not (frame.all() and not self._cut.any()):
            for n, lane in enumerate(lanes.tolist()):
                if frame[n]:
                    cut[n], self._cut[lane] = self._cut[lane], False
                else:
                    self._cut[lane], self._reset_done[lane] = self._reset_done[lane], True
        return cut[frame]

    def deliver(self, slot: Slot, ledger: Ledger) -> None:
        """Write the frames that were held for this batch into `slot`, and have the ledger complete it."""
        steps = slot.layout.steps
        self._write_held(slot)
        made = np.minimum(self._count, steps)  # only dropped lanes have fewer
        self._count -= made
        if MASK in slot.arrays:
            np.less(np.arange(steps)[:, None], made, out=slot.arrays[MASK])
            if made.min() < steps:
                missing = ~slot.arrays[MASK]
                for key in slot.layout.offsets:
                    slot.arrays[key][missing] = 0
        cuts = slot.arrays.get(CUT)
        when, where = np.nonzero(slot.arrays[("next", "done")][..., 0])
        cut = None if cuts is None or not cuts.any() else np.nonzero(cuts)
        ledger.close(slot, steps, when, where, due=(), version=None, cut=cut)

    def _write_held(self, slot: Slot) -> None:
        """Write the held frames that `slot` has room for to their places, and number the others for the next batch."""
        steps, held, self._held = slot.layout.steps, self._held, []
        for numbers, lanes, columns in held:
            now = numbers < steps
            place = numbers[now], lanes[now] if slot.layout.lanes > 1 else 0
            for key, column in columns.items():
                slot.arrays[key][place] = column[now]
            if not now.all():
                left = {key: column[~now] for key, column in columns.items()}
                self._held.append((numbers[~now] - steps, lanes[~now], left))
        self._slot_is_empty = True


class _Column(NamedTuple):
    """What new frames have in one column: rows of two arrays, numbered as if `then` followed `first`."""

    first: Array
    then: Array
    rows: Array  # of each frame

    def take(self, frames: Any, out: Array | None = None) -> Array:
        """Return the values of some frames, or write them to `out`: one copy if its memory is contiguous."""
        rows = self.rows[frames]
        values: Array = np.take(self.then, rows - len(self.first), axis=0, out=out, mode="clip")
        early = rows < len(self.first)
        if early.any():
            values[early] = self.first[rows[early]]
        return values


def _index_in_lane(lanes: Array) -> Array:
    """Number the entries of each lane from 0, for `lanes` in sorted order."""
    fresh = np.r_[True, lanes[1:] != lanes[:-1]] if len(lanes) else np.zeros(0, bool)
    count = np.arange(len(lanes))
    return count - np.maximum.accumulate(np.where(fresh, count, 0))
