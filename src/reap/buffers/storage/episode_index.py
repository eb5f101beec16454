"""EpisodeIndex: runs of rows that follow each other in one episode. Writers mark them, readers index the marks.

marks    1 0 0 1 0 2 2 1 0 0 │          1 begins, 0 goes on, 2 hole
runs     └───┘ └─┘     └────┘
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from reap.buffers.storage.ring import BEGINS, HOLE, Ring
from reap.errors import UsageError
from reap.spec import Key, own_entry

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Cuts:
    """The leaves that cut a batch into runs: ids, where they change, and flags, where they are True."""

    ids: tuple[Key, ...] = (("collector", "traj_ids"), ("traj_ids",))
    ends: tuple[Key, ...] = (("next", "done"),)

    def check(self, columns: Collection[Key]) -> None:
        """Raise if none of these leaves is among the columns."""
        if not any(key in columns for key in (*self.ids, *self.ends)):
            raise UsageError(f"cannot tell where episodes end: the buffer stores none of {[*self.ids, *self.ends]}")


class Marker:
    """Makes the marks of one writer's rows. Remembers how its last batch ended, so that a run can go on."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._last: tuple[Any, ...] | None = None

    def marks(self, batch: TensorDictBase, keep: Array | None) -> tuple[Array, Any, bool]:
        """Return the marks of a batch `[…, T]`, its first and last id (None: unknown), whether its last row ends."""
        count, steps = batch.batch_size.numel(), batch.batch_size[-1]
        begins = np.zeros(count, bool)
        begins[::steps] = True
        ids = next((found for key in self._cuts.ids if (found := own_entry(batch, key)) is not None), None)
        flat: Array | None = None
        if ids is not None:
            flat = ids.detach().cpu().numpy().reshape(count, -1)[:, 0]
            begins[1:] |= flat[1:] != flat[:-1]
        ended = np.zeros(count, bool)
        for key in self._cuts.ends:
            if (flag := batch.get(key, None)) is not None:
                ended |= flag.detach().cpu().numpy().reshape(count, -1).any(-1)
        begins[1:] |= ended[:-1]
        if keep is not None:  # masked rows are left out: the row after one continues the row before it
            run = np.cumsum(begins)[keep]
            begins = np.ones(len(run), bool)
            begins[1:] = run[1:] != run[:-1]
            ended, flat = ended[keep], None if flat is None else flat[keep]
        one_lane = count == steps
        identity = (flat[0], flat[-1]) if flat is not None and len(flat) else (("lane",) * 2 if one_lane else None)
        return begins.astype(np.uint8), identity, bool(len(ended) and ended[-1])

    def join(self, marks: Array, identity: Any, ended: bool, first: int, end: int, who: Any) -> None:
        """Mark the first row as continuing this writer's last batch, if it directly follows it in the same episode."""
        last, self._last = self._last, None
        if identity is None:
            return
        if last == (first, identity[0], who):
            marks[0] = 0
        if not ended:
            self._last = (end, identity[1], who)

    def forget(self) -> None:
        """Let the next rows begin a new run."""
        self._last = None


class EpisodeIndex:
    """The runs of a ring as seen by one reader; `table` brings them up to date."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._cuts, self._kinds = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        self._seen = 0
        self._table: tuple[tuple[int, int], Array, Array] | None = None

    def table(self) -> tuple[Array, Array]:
        """Return the first positions and the lengths of all runs, in order, without holes."""
        ring = self._ring
        low, high = ring.window()
        if self._table is not None and self._table[0] == (low, high):
            return self._table[1:]
        begin = max(self._seen, low)
        new = ring.marks_of(begin, high).copy()  # writers change it meanwhile, and `flatnonzero` reads it twice
        at = np.flatnonzero(new)
        cuts, kinds = np.concatenate([self._cuts, at + begin]), np.concatenate([self._kinds, new[at]])
        low = max(low, ring.window()[0])  # marks below it may have been overwritten while we read them
        if begin > self._seen:
            fresh = cuts >= begin  # marks between `_seen` and `begin` were overwritten unread
            cuts, kinds = cuts[fresh], kinds[fresh]
        self._seen = high = max(high, low)
        past = int(np.searchsorted(cuts, low, "right")) - 1
        if past >= 0:  # the run at `low`: its earlier rows were overwritten
            cuts, kinds = cuts[past:].copy(), kinds[past:].copy()
            cuts[0] = low
        elif high > low and (not len(cuts) or cuts[0] > low):
            cuts, kinds = np.concatenate([[low], cuts]), np.concatenate([np.array([BEGINS], np.uint8), kinds])
        self._cuts, self._kinds = cuts, kinds
        lengths = np.diff(cuts, append=high)
        good = (kinds != HOLE) & (lengths > 0)
        if not good.all():
            cuts, lengths = cuts[good], lengths[good]
        self._table = (low, high), cuts, lengths
        return cuts, lengths

    def ends(self, positions: Array) -> Array:
        """Return the position after the run of each of these positions. Overwritten positions give arbitrary values."""
        starts, lengths = self.table()
        if not len(starts):
            return positions
        run = np.maximum(np.searchsorted(starts, positions, "right") - 1, 0)
        ends: Array = starts[run] + lengths[run]
        return ends
