"""TensorDict's memory-mapped directory: all frames, episode after episode, readable without loading them.

TensorDict.load_memmap(path)          reads it in your own training code
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase

from reap.core.assemble import tree_of
from reap.data.columns import Arrays, Column
from reap.data.formats.base import Spaces, bounds, columns_in, lengths_of
from reap.errors import CorruptState
from reap.spec import as_array

_ABOUT = "reap.json"


class MemmapWriter:
    """Appends the bytes of each column to its file. `close` adds what TensorDict needs to load the directory."""

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None:
        self._path, self._columns = path, columns
        self._files = {}
        for column in columns:
            place = _place(path, column)
            place.parent.mkdir(parents=True, exist_ok=True)
            self._files[column.name] = place.open("xb", buffering=1 << 16)
        self._frames = 0

    def add(self, episode: Arrays) -> None:
        for name, values in episode.items():
            self._files[name].write(np.ascontiguousarray(values).data)
        self._frames += len(next(iter(episode.values())))

    def close(self, metadata: Mapping[str, Any]) -> None:
        for file in self._files.values():
            file.close()
        if self._frames:  # an empty file cannot be mapped
            leaves = {}
            for one in self._columns:
                shape = torch.Size([self._frames, *one.shape])
                leaves[one.key] = MemoryMappedTensor.from_filename(_place(self._path, one), one.dtype, shape)
            TensorDict(tree_of(leaves), batch_size=[self._frames]).memmap_(self._path)
        (self._path / _ABOUT).write_text(json.dumps(metadata))


class MemmapReader:
    """Reads what `MemmapWriter` wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.metadata: dict[str, Any] = json.loads((path / _ABOUT).read_text())
        frames = sum(lengths_of(self.metadata))
        for column in columns_in(self.metadata):  # mapping a file that is too short would pad it with zeros
            size = frames * int(np.prod(column.shape)) * column.numpy.itemsize
            if _place(path, column).stat().st_size < size:
                raise CorruptState(f"{_place(path, column)} is truncated: {frames:,} frames take {size:,} bytes")

    @property
    def frames(self) -> TensorDictBase:
        """All frames, as views of the files."""
        return TensorDict.load_memmap(self._path)

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        where, frames = bounds(lengths_of(self.metadata)), self.frames
        for number in which:
            begin, end = where[number]
            yield {one.name: _numpy(frames.get(one.key)[begin:end]) for one in columns_in(self.metadata)}


def _numpy(values: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = torch.Tensor(values) if values.dtype is torch.float32 else values.as_subclass(torch.Tensor)
    return as_array(plain)


def _place(path: Path, column: Column) -> Path:
    return path.joinpath(*column.key[:-1], f"{column.key[-1]}.memmap")
