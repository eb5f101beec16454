"""BatchWriter: writes batches into the rows of a ring.   extend ──► columns as arrays ──► reserve → write → commit"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.episode_index import Cuts, Marker
from reap.buffers.storage.rows import Array, storable
from reap.core.slot import MASK
from reap.errors import SpecMismatch, UsageError, WrongArgument
from reap.spec import Key, Leaf, as_array, as_key, show

PLAIN: Key = ("_plain",)  # the column of a buffer that holds bare tensors


def as_batch(data: Any, inverse: Callable[[TensorDictBase], TensorDictBase]) -> TensorDictBase:
    """Return the data to be written as one TensorDict `[…, T]`. `inverse` applies the inverses of the transforms."""
    if isinstance(data, (list, tuple)) and data and all(isinstance(x, (Tensor, TensorDictBase)) for x in data):
        try:
            data = torch.stack(list(data))
        except (RuntimeError, TypeError, KeyError) as error:
            raise SpecMismatch(f"data is a list of frames that cannot be stacked: {error}") from None
    plain = isinstance(data, Tensor)
    if not plain:
        if not is_tensor_collection(data):
            raise WrongArgument(f"a buffer takes TensorDicts, tensors or lists of them, got {type(data).__name__}")
        if data.get(PLAIN, None) is not None:
            raise SpecMismatch(
                f"the column {PLAIN[0]!r} has the name under which a buffer keeps bare tensors; rename it"
            )
        data = inverse(data)
    if data.ndim == 0:
        raise UsageError("extend needs a batch dimension; add takes a single frame")
    return TensorDict({PLAIN[0]: data}, batch_size=data.shape[:1]) if plain else data


class BatchWriter:
    """One of any number of writers of a buffer. Rows that it could not finish are never read."""

    def __init__(self, memory: BufferFiles, cuts: Cuts, check_names: Callable[[Mapping[Key, Leaf]], None]) -> None:
        self._memory, self._check_names = memory, check_names
        self._marker = Marker(cuts)

    def write(self, batch: TensorDictBase) -> Array:
        """Write one row for each frame that is not masked out, and return the row numbers."""
        ring, capacity = self._memory.ring, self._memory.capacity
        if not batch.batch_size.numel():
            return np.zeros(0, np.int64)
        mask = batch.get(MASK, None)
        keep = None if mask is None or bool(mask.all()) else as_array(mask).reshape(-1)
        values, columns = _arrays(batch, keep)
        if self._memory.rows is None:
            self._check_names({key: Leaf(*kind) for key, kind in columns.items()})
        rows = self._memory.rows_for(columns)  # before rows are reserved: a wrong batch leaves no hole
        marks, identity, ended = self._marker.marks(batch, keep)
        count = len(marks)
        if not count:
            return np.zeros(0, np.int64)
        with ring.lock.interrupts.held():  # Ctrl-C must not come between a reservation and its end
            first, entry = ring.reserve(count)
            try:
                self._marker.join(marks, identity, ended, first, first + count, (threading.get_ident(), os.getpid()))
                skip = max(count - capacity, 0)  # of a batch longer than the ring, only the last rows are kept
                ring.mark(first + skip, marks[skip:])
                rows.write((first + skip) % capacity, {key: value[skip:] for key, value in values.items()})
            except BaseException:
                self._marker.forget()  # the next batch must not continue from rows that were not written
                ring.abandon(entry)
                raise
            ring.commit(entry)
        index: Array = np.arange(first, first + count) % capacity
        return index


def _arrays(
    batch: TensorDictBase, keep: Array | None
) -> tuple[dict[Key, Array], dict[Key, tuple[tuple[int, ...], torch.dtype]]]:
    """Return the frames of a batch to `keep`, by column, and the shape and dtype of each column."""
    lead, frames = batch.ndim, batch.batch_size.numel()
    values, columns = {}, {}
    for name, value in batch.items(True, True):
        key = as_key(name)
        if not isinstance(value, Tensor):
            raise UsageError(f"{show(key)} holds {type(value).__name__}; a buffer's columns are tensors")
        if value.layout is not torch.strided or value.is_quantized or not storable(value.dtype):
            raise UsageError(f"{show(key)} is {value.dtype} ({value.layout}); a buffer's columns are dense tensors")
        columns[key] = tuple(value.shape[lead:]), value.dtype
        array = as_array(value)
        array = array.reshape(frames, *array.shape[lead:])
        values[key] = array if keep is None else array[keep]
    if not columns:
        raise UsageError("this batch has no tensors to write")
    return values, columns
