"""Rows: where a frame lies in memory.

record   ┌ obs │ act │ rew │ flags │ ids ┐┌ obs │ act …       all narrow leaves of a row side by side:
wide     ┌ pixels …                      ┐┌ pixels …          a sampled row is one or two cache lines
wide     ┌ next pixels …                 ┐┌ …                 and one copy; a wide leaf has a column of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap.spec import Key, Leaf, numpy_dtype

_ALIGN = 64
_WIDE = 256  # bytes of one value from which on a second copy, out of the record, costs more than a cache miss
Array = np.ndarray[Any, Any]


class RowLayout:
    """Which columns a row has, and where `capacity` of them lie in one block of bytes."""

    def __init__(self, columns: Mapping[Key, Leaf], capacity: int) -> None:
        self.columns, self.capacity = dict(columns), capacity
        size = {key: _nbytes(leaf) for key, leaf in columns.items()}
        self.wide = [key for key in columns if size[key] >= _WIDE]
        # Leaves of one kind lie together: they leave the record in one copy, however many they are.
        kinds: dict[tuple[np.dtype[Any], tuple[int, ...]], list[Key]] = {}
        for key, leaf in columns.items():
            if size[key] < _WIDE:
                kinds.setdefault((numpy_dtype(leaf.dtype), leaf.shape), []).append(key)
        # Widest items first: then every field is aligned without gaps between them.
        groups = sorted(kinds.items(), key=lambda kind: -kind[0][0].itemsize)
        self.narrow = {str(i): keys for i, (_, keys) in enumerate(groups)}  # by field of the record
        formats = [(dtype, (len(keys), *shape)) for (dtype, shape), keys in groups]
        offsets = np.cumsum([0, *(len(keys) * size[keys[0]] for _, keys in groups)]).tolist()
        itemsize = max(-(-offsets[-1] // 8) * 8, 8)
        names = list(self.narrow)
        self.record = np.dtype({"names": names, "formats": formats, "offsets": offsets[:-1], "itemsize": itemsize})
        self.offsets, end = {}, itemsize * capacity
        for key in self.wide:
            end = -(-end // _ALIGN) * _ALIGN
            self.offsets[key] = end
            end += size[key] * capacity
        self.nbytes = end


class Rows:
    """`capacity` rows on a block of memory. `write` and `read` know nothing of who may."""

    def __init__(self, layout: RowLayout, block: Array) -> None:
        self.layout, capacity = layout, layout.capacity
        width = layout.record.itemsize
        self._record = block[: width * capacity].view(f"V{width}")  # opaque: a row is copied in one go
        self._wide = {}
        for key, start in layout.offsets.items():
            leaf = layout.columns[key]
            raw = block[start : start + _nbytes(leaf) * capacity]
            self._wide[key] = raw.view(numpy_dtype(leaf.dtype)).reshape(capacity, *leaf.shape)
        fields = self._record.view(layout.record)
        narrow = {key: fields[name][:, i] for name, keys in layout.narrow.items() for i, key in enumerate(keys)}
        self._columns = {**narrow, **self._wide}

    def write(self, first: int, values: Mapping[Key, Array]) -> None:
        """Rows from `first` on, around the end of the ring if need be. At most `capacity` of them."""
        for key, column in self._columns.items():
            new = values[key]
            head = min(len(new), self.layout.capacity - first)
            column[first : first + head] = new[:head]
            if head < len(new):
                column[: len(new) - head] = new[head:]

    def read(self, rows: Array) -> dict[Key, Tensor]:
        """Copies of these rows."""
        layout = self.layout
        found: dict[Key, Array] = {}
        taken = self._record.take(rows).view(layout.record)
        for name, keys in layout.narrow.items():
            # A tensor is made of each part by itself: views of one tensor would count each other's changes as theirs.
            found.update(zip(keys, np.ascontiguousarray(taken[name].swapaxes(0, 1))))
        for key, column in self._wide.items():
            found[key] = column.take(rows, axis=0)
        return {key: _tensor(found[key], leaf) for key, leaf in layout.columns.items()}


def as_array(value: Tensor) -> Array:
    """A tensor's bytes as NumPy sees them."""
    value = value.detach().cpu()
    return value.view(torch.int16).numpy() if value.dtype is torch.bfloat16 else value.numpy()


def _tensor(array: Array, leaf: Leaf) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if leaf.dtype is torch.bfloat16 else tensor


def _nbytes(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * numpy_dtype(leaf.dtype).itemsize
