"""Rows: the memory layout of frames.

record   ┌ obs │ act │ rew │ flags │ ids ┐┌ obs │ act …       all narrow leaves of a row side by side:
wide     ┌ pixels …                      ┐┌ pixels …          a sampled row is one or two cache lines
wide     ┌ next pixels …                 ┐┌ …                 and one copy; a wide leaf has a column of its own

A learner runs other code between two samples, so every function called here has left the CPU cache by then: the number
of different functions counts, not their length.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from reap._foreign import tensordict_internals
from reap.spec import Key, Leaf, as_tensor, numpy_dtype

_ALIGN = 64
_WIDE = 256  # bytes of one value above which a second copy, out of the record, costs more than a cache miss
Array = np.ndarray[Any, Any]


class RowLayout:
    """The columns of a row, and the offsets of `capacity` rows in one block of bytes."""

    def __init__(self, columns: Mapping[Key, Leaf], capacity: int) -> None:
        self.columns, self.capacity = dict(columns), capacity
        size = {key: leaf.nbytes for key, leaf in columns.items()}
        self.wide = [key for key in columns if not 0 < size[key] < _WIDE]
        # Leaves of one dtype and shape lie together: one copy takes all of them out of the record.
        kinds: dict[tuple[np.dtype[Any], tuple[int, ...]], list[Key]] = {}
        for key, leaf in columns.items():
            if 0 < size[key] < _WIDE:
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
    """`capacity` rows on a block of memory. `write` and `read` do no locking; callers do."""

    def __init__(self, layout: RowLayout, block: Array) -> None:
        self.layout, capacity = layout, layout.capacity
        width = layout.record.itemsize
        self._record = block[: width * capacity].view(f"V{width}")  # opaque: a row is copied as one item
        self._wide = {}
        for key, start in layout.offsets.items():
            leaf = layout.columns[key]
            raw = block[start : start + leaf.nbytes * capacity]
            self._wide[key] = raw.view(numpy_dtype(leaf.dtype)).reshape(capacity, *leaf.shape)
        fields = self._record.view(layout.record)
        narrow = {key: fields[name][:, i] for name, keys in layout.narrow.items() for i, key in enumerate(keys)}
        self._columns = {**narrow, **self._wide}
        self._kinds = [_Kind(layout, name, keys) for name, keys in layout.narrow.items()]

    def write(self, first: int, values: Mapping[Key, Array]) -> None:
        """Write at most `capacity` rows from row `first` on, wrapping around the end of the ring."""
        for key, column in self._columns.items():
            new = values[key]
            head = min(len(new), self.layout.capacity - first)
            column[first : first + head] = new[:head]
            if head < len(new):
                column[: len(new) - head] = new[head:]

    def read(self, rows: Array, elsewhere: Mapping[Key, Array] | None = None) -> dict[Key, Tensor]:
        """Return copies of these rows. Columns in `elsewhere` come from the row numbers given there, in their shape."""
        found: dict[Key, Any] = dict.fromkeys(self.layout.columns)
        taken, count = self._record.take(rows), len(rows)
        for kind in self._kinds:
            kind.part(taken, count, found)
        elsewhere = elsewhere or {}
        for key, column in self._wide.items():
            found[key] = as_tensor(column.take(elsewhere.get(key, rows), axis=0), self.layout.columns[key].dtype)
        for key, others in elsewhere.items():
            if key not in self._wide:
                found[key] = as_tensor(self._columns[key][others], self.layout.columns[key].dtype)
        return found


class _Kind:
    """The leaves of one dtype and shape, which lie side by side in a record."""

    def __init__(self, layout: RowLayout, name: str, keys: list[Key]) -> None:
        leaf = layout.columns[keys[0]]
        self._keys, self._shape, self._torch = keys, leaf.shape, leaf.dtype
        self._dtype, self._size = numpy_dtype(leaf.dtype), leaf.nbytes
        self._opaque = np.dtype(f"V{self._size}")  # copied as one item, not number by number
        assert layout.record.fields is not None
        self._at, self._steps = layout.record.fields[name][1], (self._size, layout.record.itemsize)

    def part(self, taken: Array, count: int, found: dict[Key, Any]) -> None:
        """Copy each leaf out of `count` records into a tensor in `found`."""
        if not count:
            found.update({key: as_tensor(np.empty((0, *self._shape), self._dtype), self._torch) for key in self._keys})
            return
        block = np.ndarray((len(self._keys), count), self._opaque, taken, self._at, self._steps).copy()
        shape, at = (count, *self._shape), 0
        for key in self._keys:
            # Each part becomes a tensor of its own: views of one tensor would share a version counter.
            found[key] = as_tensor(np.ndarray(shape, self._dtype, block, at), self._torch)
            at += self._size * count


def as_tensordict(columns: Mapping[Key, Tensor], count: int) -> TensorDict:
    """Return columns as a nested TensorDict, in their order, without checks: the columns are our own."""
    places, names, nests = _tree(tuple(columns))
    nodes: list[dict[str, Any]] = [dict.fromkeys(inside) for inside in names]
    for (node, name), value in zip(places, columns.values()):
        nodes[node][name] = value
    size = torch.Size([count])
    for node, parent, name in nests:
        nodes[parent][name] = tensordict_internals.new_tensordict(nodes[node], batch_size=size)
    return tensordict_internals.new_tensordict(nodes[0], batch_size=size)


@lru_cache(maxsize=64)
def _tree(keys: tuple[Key, ...]) -> tuple[list[tuple[int, str]], list[list[str]], list[tuple[int, int, str]]]:
    """Return each key's node and name, the names in each node, and (node, parent, name) of nodes, innermost first."""
    nodes: dict[Key, int] = {(): 0}
    names: list[list[str]] = [[]]
    nests, places = [], []
    for key in keys:
        for depth in range(1, len(key)):
            if key[:depth] not in nodes:
                above = nodes[key[: depth - 1]]
                nodes[key[:depth]] = len(names)
                names[above].append(key[depth - 1])
                nests.append((len(names), above, key[depth - 1]))
                names.append([])
        at = nodes[key[:-1]]
        names[at].append(key[-1])
        places.append((at, key[-1]))
    return places, names, nests[::-1]


def storable(dtype: torch.dtype) -> bool:
    """Return whether rows can hold values of this dtype."""
    try:
        numpy_dtype(dtype)
    except KeyError:
        return False
    return True
