"""Ready lanes: envs that answer whoever is ready, sorted into one true stream per lane.

The loop steps such an env like any other. Only, a *position* of its rows holds another lane at every step: what goes
out at row t are observation and action of the lanes in hand, what comes back are the successors of whichever lanes
are ready. The leaf `LANE_AT` says which lane is where.

    log       row t   root  [2 0]   next  [1 3]        a lane's first root belongs to its first next,
              row t+1 root  [1 3]   next  [0 2]        its second to its second, and so on
                                  │
    sorted    lane 0: root₀ next₀ · lane 1: …          T frames of every lane make a batch; lanes that are ahead
                                                       keep theirs for the next one

A position nobody stands at says -1. A lane that comes without a frame has begun anew: once after a reset of all; later
because what stepped it has failed. The frame after such a one is the first of another trajectory.

Guarantees: no frame is doubled or reordered within a lane, and none is lost unless a rollout is broken off (Ctrl-C); a
frame carries the version that acted.
The price is two copies of each frame, made for whole rollouts at once: out of the log, and into its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from reap.core.ledger import Ledger
from reap.core.measuring.episode_log import EPISODE_LENGTH, EPISODE_RETURN
from reap.core.slot import CUT, MASK, TRAJ_IDS, VERSION, Slot
from reap.spec import LANE_AT, Key

Array = np.ndarray[Any, Any]
NEXT_LANE_AT: Key = ("next", *LANE_AT)
_VERSION_NEXT: Key = ("next", *VERSION)


def delivered(columns: Iterable[Key]) -> list[Key]:
    """The columns of a log that are data."""
    return [key for key in columns if key not in (LANE_AT, NEXT_LANE_AT, MASK)]


class Sorter:
    """Takes logs as the loop fills them, gives batches in which every lane is whole."""

    def __init__(self, columns: Collection[Key], lanes: int) -> None:
        self._lanes = lanes
        self._tells_cuts = CUT in columns
        self.dropped: Collection[int] = ()  # lanes of which nothing more will come
        ours = (TRAJ_IDS, CUT, EPISODE_RETURN, EPISODE_LENGTH, _VERSION_NEXT)  # written after sorting
        keys = [key for key in delivered(columns) if key not in ours]
        self._roots = [key for key in keys if key[0] != "next"]
        self._nexts = [key for key in keys if key[0] == "next"]
        self.clear()

    def clear(self) -> None:
        """All lanes begin anew: what is held or on its way belongs to the time before."""
        self._open: dict[Key, Array] = {}  # roots whose successors have not come yet
        self._open_lanes: Array | None = None
        self._held: list[tuple[Array, dict[Key, Array]]] = []  # (lane of each frame, columns)
        self._count = np.zeros(self._lanes, np.int64)
        self._begun = np.zeros(self._lanes, bool)  # lanes whose answer to the reset has come
        self._cut = np.zeros(self._lanes, bool)  # lanes that have made no frame since a failure

    def lacks(self, steps: int) -> int:
        """How many frames are missing at least, until every lane has so many."""
        missing = np.maximum(steps - self._count, 0)
        missing[list(self.dropped)] = 0
        return int(missing.sum())

    def feed(self, log: Slot, version: int | None, steps: int) -> None:
        """The first `steps` rows of a log, as they were filled; `version` None: the policy has written it."""
        arrays = {key: array[:steps] for key, array in log.arrays.items()}
        if VERSION in arrays and version is not None:
            arrays[VERSION][...] = version
        flat = {key: arrays[key].reshape(-1, *arrays[key].shape[2:]) for key in (*self._roots, *self._nexts)}
        # Lanes not in hand after a reset are on their way with it: no frame, but an answer.
        if self._open_lanes is None:
            self._open_lanes = np.setdiff1d(np.arange(self._lanes), arrays[LANE_AT][0])
            self._begun[:] = True
            self._begun[self._open_lanes] = False
            self._open = {
                key: np.zeros_like(flat[key], shape=(len(self._open_lanes), *flat[key].shape[1:]))
                for key in self._roots
            }
        sent = np.concatenate([self._open_lanes, arrays[LANE_AT].reshape(-1)])
        came = arrays[NEXT_LANE_AT].reshape(-1)
        roots, nexts = np.argsort(sent, kind="stable"), np.argsort(came, kind="stable")
        roots, nexts = roots[sent[roots] >= 0], nexts[came[nexts] >= 0]  # -1: nobody stood there
        answered = _turn(sent[roots]) < np.bincount(came[nexts], minlength=self._lanes)[sent[roots]]
        waiting, roots = roots[~answered], roots[answered]
        if MASK in arrays:
            frame = arrays[MASK].reshape(-1)[nexts]
            cut = self._after_failures(came[nexts], frame)
            roots, nexts = roots[frame], nexts[frame]
        else:
            cut = np.zeros(len(nexts), bool)
        came_first = np.argsort(nexts)
        roots, nexts = roots[came_first], nexts[came_first]  # in the order in which they came
        lanes = came[nexts]
        chunk = {key: _rows(self._open[key], flat[key], roots) for key in self._roots}
        chunk.update({key: flat[key][nexts] for key in self._nexts})
        if self._tells_cuts:
            chunk[CUT] = cut[came_first]
        self._open = {key: _rows(self._open[key], flat[key], waiting) for key in self._roots}
        self._open_lanes = sent[waiting]
        self._held.append((lanes, chunk))
        self._count += np.bincount(lanes, minlength=self._lanes)

    def _after_failures(self, lanes: Array, frame: Array) -> Array:
        """Of what came, lane after lane, which of the frames are the first after a failure."""
        cut = np.zeros(len(lanes), bool)
        if self._tells_cuts and not (frame.all() and not self._cut.any()):
            for n, lane in enumerate(lanes.tolist()):
                if frame[n]:
                    cut[n], self._cut[lane] = self._cut[lane], False
                else:
                    self._cut[lane], self._begun[lane] = self._begun[lane], True
        return cut[frame]

    def deliver(self, slot: Slot, ledger: Ledger) -> None:
        """The next frames of every lane into `slot`, and what follows from them into the ledger."""
        made = np.minimum(self._count, slot.layout.steps)  # fewer only of lanes that were dropped
        cuts = slot.arrays.get(CUT)
        if cuts is not None:
            cuts[...] = False
        if MASK in slot.arrays:
            np.less(np.arange(slot.layout.steps)[:, None], made, out=slot.arrays[MASK])
        steps, before = slot.layout.steps, np.zeros(self._lanes, np.int64)  # frames of each lane in earlier chunks
        held, self._held = self._held, []
        for lanes, chunk in held:
            order = np.argsort(lanes, kind="stable")
            turn = np.empty(len(lanes), np.int64)
            turn[order] = _turn(lanes[order])
            turn += before[lanes]
            before += np.bincount(lanes, minlength=self._lanes)
            now = turn < steps
            if now.all():  # written where it stays, without another copy of what is chosen
                for key, column in chunk.items():
                    slot.arrays[key][turn, lanes] = column
                continue
            for key, column in chunk.items():
                slot.arrays[key][turn[now], lanes[now]] = column[now]
            self._held.append((lanes[~now], {key: column[~now] for key, column in chunk.items()}))
        self._count -= made
        when, where = np.nonzero(slot.arrays[("next", "done")][..., 0])
        cut = None if cuts is None or not cuts.any() else np.nonzero(cuts)
        ledger.close(slot, steps, when, where, due=(), version=None, cut=cut)


def _rows(first: Array, then: Array, index: Array) -> Array:
    """Rows of two arrays, numbered as if one followed the other."""
    rows: Array = then[np.maximum(index - len(first), 0)]
    early = index < len(first)
    rows[early] = first[index[early]]
    return rows


def _turn(lanes: Array) -> Array:
    """For lanes in sorted order: which of its lane's entries each one is, counted from 0."""
    fresh = np.r_[True, lanes[1:] != lanes[:-1]] if len(lanes) else np.zeros(0, bool)
    count = np.arange(len(lanes))
    return count - np.maximum.accumulate(np.where(fresh, count, 0))
