"""The third assembler: makes batches of envs whose steps are TensorDicts that cannot be stored in columns.

A row holds one reference: the whole step, as the env's library made it. Flags, ids and counts are columns as always,
but only ids, masks and versions are delivered. All else is in the frames, which are stacked: densely if possible,
lazily if lanes or steps differ in shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from reap.core.slot import FRAME, Layout
from reap.errors import WorkerRaised, WrongState
from reap.spec import Key, as_key, private

Arrays = Mapping[Key, "np.ndarray[Any, Any]"]


def _frames_made(arrays: Arrays) -> list[list[Any]]:
    """Return the frames of each worker, in order of time."""
    column = arrays[FRAME]
    owners = [lane for lane in range(column.shape[1]) if isinstance(column[0, lane], TensorDictBase)]
    if not owners:
        raise WorkerRaised("the rollout contains no frames")
    return [[frame for frame in column[:, lane] if isinstance(frame, TensorDictBase)] for lane in owners]


def _padded_frames(arrays: Arrays) -> list[list[Any]]:
    """Return the frames of each worker, padded with zeros like its last frame if it made fewer than the slot holds."""
    steps, found = len(arrays[FRAME]), []
    for frames in _frames_made(arrays):
        blank = torch.zeros_like(frames[-1]) if len(frames) < steps else None
        found.append([*frames, *[blank] * (steps - len(frames))])
    return found


def assemble_frames(arrays: Arrays, layout: Layout) -> TensorDictBase:
    """Return the batch `[…, T]` of one worker, or the stacked batches of several."""
    workers = [stacked_in_time(frames) for frames in _padded_frames(arrays)]
    own = {key: array for key, array in arrays.items() if key not in layout.look.hidden}
    share = layout.lanes // len(workers)
    for w, batch in enumerate(workers):
        for key, array in own.items():
            column = torch.from_numpy(array[:, w * share : (w + 1) * share].copy())
            batch.set(key, column.transpose(0, 1).contiguous().reshape(*batch.batch_size, *column.shape[2:]))
    return workers[0] if len(workers) == 1 else LazyStackedTensorDict.maybe_dense_stack(workers, 0)


def stacked_in_time(frames: Sequence[TensorDictBase]) -> TensorDictBase:
    """Stack frames into one batch whose last dimension is time, without private entries."""
    hidden = {key for frame in frames[:1] for key in frame.keys(True) if private(as_key(key))}
    frames = [frame.exclude(*hidden) if hidden else frame for frame in frames]
    batch: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(list(frames), frames[0].ndim)
    batch.names = [*[None] * (batch.ndim - 1), "time"]
    return batch


def mark_frames(arrays: Arrays) -> None:
    """Mark the last frame of every worker as truncated."""
    for frames in _frames_made(arrays):
        reached = frames[-1].get("next")
        flags = [as_key(key) for key in reached.keys(True, True) if as_key(key)[-1] == "truncated"]
        if not flags:
            raise WrongState("set_truncated marks the last step as truncated; this env has no truncated flag")
        for key in flags:
            reached.set(key, torch.ones_like(reached.get(key)))
            reached.set((*key[:-1], "done"), torch.ones_like(reached.get(key)))
