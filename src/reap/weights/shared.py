"""Weights in shared memory: two copies of a flat block with a sequence number. One writer, many readers, no torn reads.

    begun  done  version₀ version₁ │ given₀ given₁ │ copy 0 ………………… │ copy 1 …………………

    writer   begun = n+1 → write copy (n+1) % 2 → done = n+1        never touches the copy that is current for readers
    reader   n = done → read copy n % 2 → begun ≤ n+1 ? finished : it was overwritten meanwhile, read again

`given` holds, for each tensor, the number of the last publication that included it. A reader copies only tensors that
were published since its last read, so tensors that an update leaves out keep the values they have in the reader.

A reader that was overtaken several times in a row takes a file lock that holds the writer off for one read: so neither
side can starve the other, and a process that dies with the lock releases it. On machines where other processors may
see stores in another order (ARM), every read takes the lock.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap._foreign import torch_internals
from reap.core.shared_slots import SharedFile

_ALIGN = 64
_HEADER = 64
_BEGUN, _DONE, _VERSION = 0, 1, 2
_ORDERED = platform.machine() in ("x86_64", "AMD64")  # whether all processors see stores in the order they were made
_PATIENCE = 4 if _ORDERED else 0  # reads without the lock that may be overtaken before one takes it


@dataclass(frozen=True)
class Packing:
    """Describes which tensors a block holds, and where."""

    entries: tuple[tuple[str, tuple[int, ...], torch.dtype, int], ...]  # name, shape, dtype, offset
    nbytes: int

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Packing:
        """Return a packing with room for these tensors."""
        entries, end = [], 0
        for name, tensor in named.items():
            entries.append((name, tuple(tensor.shape), tensor.dtype, end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        return cls(tuple(entries), end)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return {name: shape for name, shape, _, _ in self.entries}

    def views(self, block: np.ndarray[Any, Any]) -> list[Tensor]:
        """Return the tensors as views of `block`."""
        flat = torch.from_numpy(block)
        found = []
        for _, shape, dtype, start in self.entries:
            count = int(np.prod(shape, dtype=np.int64))
            size = count * torch.empty(0, dtype=dtype).element_size()
            found.append(flat[start : start + size].view(dtype).view(shape))
        return found


class SharedWeights:
    """Both sides of the shared block: one process calls `publish`, the others call `refresh`."""

    def __init__(self, file: SharedFile, packing: Packing) -> None:
        size, count = packing.nbytes, len(packing.entries)
        start = -(-(_HEADER + 16 * count) // _ALIGN) * _ALIGN
        block = file.map(start + 2 * max(size, 1))
        self._file, self.packing = file, packing
        self._header = block[:_HEADER].view(np.int64)
        self._given = block[_HEADER : _HEADER + 16 * count].view(np.int64).reshape(2, count)
        self._copies = [packing.views(block[start + i * size : start + (i + 1) * size]) for i in (0, 1)]
        self._seen = 0

    def publish(self, named: Mapping[str, Tensor], version: int) -> None:
        """Make these weights the current ones; tensors not among them keep their last published values."""
        header = self._header
        count = int(header[_DONE]) + 1
        old, new = self._copies[(count - 1) % 2], self._copies[count % 2]
        values = [named.get(entry[0], last) for entry, last in zip(self.packing.entries, old)]
        with self._file.locked():
            header[_BEGUN] = count  # before the first byte, so that readers of this copy notice that it changes
            with torch.no_grad():
                torch_internals.copy_all(new, values)
            there = np.array([entry[0] in named for entry in self.packing.entries], np.bool_)
            self._given[count % 2] = np.where(there, count, self._given[(count - 1) % 2])
            header[_VERSION + count % 2] = version
            header[_DONE] = count  # after the last byte

    def refresh(self, tensors: Sequence[Tensor]) -> int | None:
        """Copy newly published weights into `tensors`. Return their version, or None if there are no new ones."""
        if int(self._header[_DONE]) == self._seen:
            return None
        for _ in range(_PATIENCE):
            if (version := self._read(tensors)) is not None:
                return version
        with self._file.locked():
            return self._read(tensors)

    def _read(self, tensors: Sequence[Tensor]) -> int | None:
        count = int(self._header[_DONE])
        version = int(self._header[_VERSION + count % 2])
        new = np.flatnonzero(self._given[count % 2] > self._seen).tolist()
        if new:
            values = self._copies[count % 2]
            with torch.no_grad():
                torch_internals.copy_all([tensors[i] for i in new], [values[i] for i in new])
        if int(self._header[_BEGUN]) > count + 1:
            return None
        self._seen = count
        return version
