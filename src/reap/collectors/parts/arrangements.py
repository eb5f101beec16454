"""Arrangements: decide which rollouts are delivered, and in which shape.

    Arrangement      one worker: its rollouts, unchanged
    JoinedWorkers    workers in step: one batch with the rollouts of all
    FirstCome        workers as they are ready: one rollout at a time, with its `origin`, unless it is too old

                 worker 0 [B, T]  worker 1 [B, T]  …
cat_results      "stack" [W, B, T]     0, along lanes [W·B, T]     -1, in time [B, W·T]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import TensorDictBase

from reap.backends.base import Rollout
from reap.backends.worker_backend import WorkerBackend
from reap.core.slot import FRAME, TRAJ_IDS, Layout
from reap.errors import SpecMismatch, UsageError
from reap.trajectories import FINAL, split_trajectories

Join = Callable[[TensorDictBase], TensorDictBase]
_FIRST_NEW_ID = 2**62  # for the rest of trajectories whose middle was dropped; the ids that workers give are lower


class Part(NamedTuple):
    """A batch, or one worker's part of it."""

    batch: TensorDictBase
    worker: int = 0
    finished: bool = False  # whether it was split and post-processed


class Origin(NamedTuple):
    """Where a batch comes from."""

    worker: int
    version: int
    lag: int  # weight updates since this version


class Arrangement:
    """Delivers the rollouts of one worker, unchanged."""

    cuts: ClassVar[bool] = False  # whether a batch may be cut at `total_frames`

    @property
    def dropped_frames(self) -> int:
        """The number of frames in rollouts that were dropped."""
        return 0

    def rename(self, batch: TensorDictBase, worker: int = 0) -> None:
        """Rename the keys and trajectory ids of a worker's batch that are others in delivered batches."""

    def admits(self, batch: TensorDictBase, rollout: Rollout) -> bool:
        """Return whether this rollout is delivered."""
        return True

    def arrange(self, batch: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        """Return the batch `[lanes, T]` in the shape in which it is delivered."""
        return batch

    def by_worker(self, batch: TensorDictBase, rollout: Rollout) -> list[Part]:
        """Return the batch `[lanes, T]` split into the parts of the workers, for a buffer."""
        return [Part(self.arrange(batch, rollout), rollout.worker)]

    def split(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch as `[trajectories, time]`."""
        return split_trajectories(batch, prefix="collector")


class JoinedWorkers(Arrangement):
    """Joins the rollouts of all workers, whose lanes lie in one slot, in one batch; raises if shapes do not fit."""

    def __init__(self, cat_results: Any, layouts: Sequence[Layout], *, compact: bool) -> None:
        self._cat, self._layouts = cat_results, layouts
        self._join = join_for(cat_results, layouts, compact=compact)

    def arrange(self, batch: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        if rollout.parts:
            return batch
        out = self._join(batch)
        if out.names[-1] != "time":
            out.names = [*[None] * (out.ndim - 1), "time"]
        if rollout.finals is not None:
            out.set_non_tensor(FINAL, rollout.finals._replace(size=tuple(out.batch_size)))
        return out

    def by_worker(self, batch: TensorDictBase, rollout: Rollout) -> list[Part]:
        layouts = self._layouts
        if rollout.parts:
            each = batch.split([layout.steps for layout in layouts], -1)
            return [Part(piece, part.worker) for piece, part in zip(each, rollout.parts)]
        lanes = batch.split([layout.lanes for layout in layouts])
        return [Part(piece if layouts[w].batched else piece[0], w) for w, piece in enumerate(lanes)]

    def split(self, batch: TensorDictBase) -> TensorDictBase:
        out = super().split(batch)
        if self._cat != 0:
            # If no trajectory was cut, workers and lanes are still separate dimensions.
            out.names = [*[None] * (out.ndim - 1), "time"]
        return out


class FirstCome(Arrangement):
    """Delivers one worker's rollout at a time, with its `origin`; drops rollouts that are too old for `limit`."""

    def __init__(self, backend: WorkerBackend, limit: LagLimit | None) -> None:
        self._backend, self._limit = backend, limit

    @property
    def dropped_frames(self) -> int:
        return 0 if self._limit is None else self._limit.dropped_frames

    def rename(self, batch: TensorDictBase, worker: int = 0) -> None:
        if self._limit is not None:
            self._limit.rename(batch, worker)

    def admits(self, batch: TensorDictBase, rollout: Rollout) -> bool:
        return self._limit is None or self._limit.admits(batch, rollout, self._backend.version)

    def arrange(self, batch: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        lag = self._backend.version - rollout.version
        batch.origin = Origin(rollout.worker, rollout.version, lag)
        return batch


def join_for(cat: Any, layouts: Sequence[Layout], *, compact: bool) -> Join:
    """Return a function that turns the lanes of all workers `[W·B, T]` into the batch that `cat_results` asks for.

    Raises if the workers' rollouts do not fit together in that way.
    """
    own, dimensions = layouts[0], len(layouts[0].batch_size)
    if isinstance(cat, int) and 0 < cat % dimensions < dimensions - 1:
        raise SpecMismatch(f"cat_results={cat}: workers are joined along 0 (lanes) or -1 (time)")
    if isinstance(cat, int) and not -dimensions <= cat < dimensions:
        raise SpecMismatch(f"cat_results={cat}: workers' rollouts {list(own.batch_size)} have no such dimension")
    along: Literal["stack", "time", "lanes"]
    along = "stack" if not isinstance(cat, int) else "time" if cat % dimensions == dimensions - 1 else "lanes"
    lengths, widths = ({getattr(layout, what) for layout in layouts} for what in ("steps", "lanes"))
    if (len(lengths) > 1 and along != "time") or (len(widths) > 1 and along != "lanes"):
        shapes = [list(layout.batch_size) for layout in layouts]
        how = "be stacked; give cat_results=-1" if along == "stack" else f"be joined along {along}"
        raise SpecMismatch(f"workers' rollouts {shapes} cannot {how}")
    if compact and along == "time" and (own.batched or len(lengths) > 1):
        raise UsageError(f"compact_obs needs separate lanes, but cat_results={cat} joins them in time; leave one out")
    if FRAME in own.columns:  # batches of whole frames arrive stacked by worker
        return _unchanged if along == "stack" else _concatenated(0 if along == "lanes" else -1)
    if along == "lanes":
        return _unchanged if len(own.dims) <= 1 else _reshaped(-1, *own.dims[1:])
    if not own.batched:
        return _unchanged if along == "stack" else lambda batch: batch.reshape(-1)
    stacked = _reshaped(len(layouts), *own.dims)
    if along == "stack":
        return stacked
    in_time = _concatenated(-1)
    return lambda batch: in_time(stacked(batch))


def _unchanged(batch: TensorDictBase) -> TensorDictBase:
    return batch


def _reshaped(*lanes: int) -> Join:
    return lambda batch: batch.reshape(*lanes, batch.batch_size[-1])


def _concatenated(dim: int) -> Join:
    return lambda batch: torch.cat(list(batch.unbind(0)), dim)


class LagLimit:
    """Drops rollouts that were collected with weights more than `most` updates old, and counts their frames."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._renamed: dict[int, dict[int, int]] = {}  # by worker: the worker's id of a trajectory, and its new one
        self._new_ids = itertools.count(_FIRST_NEW_ID)
        self.dropped_frames = 0

    def admits(self, batch: TensorDictBase, rollout: Rollout, version: int) -> bool:
        """Return whether this rollout is recent enough to be delivered; if not, count its frames as dropped."""
        if version - rollout.version <= self._most:
            return True
        self.dropped_frames += rollout.frames
        self._give_new_ids(batch, rollout.worker)
        return False

    def _give_new_ids(self, batch: TensorDictBase, worker: int) -> None:
        """Give the trajectories open at the end of a dropped rollout new ids, since their middle is missing."""
        ids = batch.get(TRAJ_IDS, None)
        if ids is not None:
            renamed = self._renamed.setdefault(worker, {})
            known = {now: own for own, now in renamed.items()}
            for now in ids.reshape(-1, ids.shape[-1])[:, -1].tolist():
                if now >= 0:  # else the row is no frame
                    renamed[known.get(now, now)] = next(self._new_ids)

    def rename(self, batch: TensorDictBase, worker: int) -> None:
        """Give trajectories that continue after dropped rollouts their new ids."""
        renamed, ids = self._renamed.get(worker), batch.get(TRAJ_IDS, None)
        if renamed and ids is not None:
            still = set(ids.reshape(-1, ids.shape[-1])[:, -1].tolist())
            for own, now in list(renamed.items()):
                ids[ids == own] = now
                if own not in still:
                    del renamed[own]  # this trajectory has ended
