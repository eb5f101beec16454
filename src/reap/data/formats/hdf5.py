"""HDF5 in the layout of D4RL: `observations`, `actions`, `rewards`, `terminals`, `timeouts`, all episodes in one array.

Columns that D4RL has no name for lie under `infos/`, by their own names, so that a dataset is read back unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reap.data.columns import Array, Arrays, Column, joined, observation_columns
from reap.data.formats.base import KEY, Spaces, bounds, columns_in, lengths_of
from reap.errors import missing

_NAMES = {
    ("action",): "actions",
    ("next", "reward"): "rewards",
    ("next", "terminated"): "terminals",
    ("next", "truncated"): "timeouts",
}
_CHUNK = 1 << 18  # bytes per HDF5 chunk, which is read and written as a whole
_TOGETHER = 1 << 20  # bytes of episodes per write: HDF5 takes as long for one row as for many


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise missing("h5py", "hdf5") from None
    return h5py


class D4RLWriter:
    """Appends rows to growing arrays of one HDF5 file."""

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None:
        self._file = _h5py().File(path, "x")
        self._columns, self._places = columns, places(columns)
        for column in columns:
            dtype = np.dtype(np.int64) if column.one_hot else column.numpy
            self._create(self._places[column.name], _stored_shape(column), dtype)
        # `actions` holds what the env received; the scores that chose it are under `infos/`
        self._chosen = {_NAMES[one.key]: one for one in columns if one.scores and one.key in _NAMES}
        for place, one in self._chosen.items():
            assert one.space is not None
            self._create(place, one.space.shape or (), np.dtype(np.int64))
        self._waiting: list[Arrays] = []
        self._bytes = 0

    def _create(self, place: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        rows = max(1, _CHUNK // max(dtype.itemsize * int(np.prod(shape)), 1))
        self._file.create_dataset(place, (0, *shape), dtype, maxshape=(None, *shape), chunks=(rows, *shape))

    def add(self, episode: Arrays) -> None:
        self._waiting.append(episode)
        self._bytes += sum(values.nbytes for values in episode.values())
        if self._bytes > _TOGETHER:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            rows = joined(self._waiting)
            for column in self._columns:
                values = rows[column.name] if column.scores else column.as_index(rows[column.name])
                self._append(self._places[column.name], values.reshape(len(values), *_stored_shape(column)))
            for place, column in self._chosen.items():
                self._append(place, column.as_index(rows[column.name]))
        self._waiting, self._bytes = [], 0

    def _append(self, place: str, values: Array) -> None:
        kept = self._file[place]
        kept.resize(len(kept) + len(values), 0)
        kept[-len(values) :] = values

    def close(self, metadata: Mapping[str, Any]) -> None:
        self._flush()
        # An HDF5 attribute holds at most 64 kB, a dataset any length.
        self._file.create_dataset(f"metadata/{KEY}", data=json.dumps(metadata))
        self._file.close()


class D4RLReader:
    """Reads what `D4RLWriter` wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _h5py().File(path, "r") as file:
            self.metadata: dict[str, Any] = json.loads(file[f"metadata/{KEY}"][()])

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        columns = columns_in(self.metadata)
        found, where = places(columns), bounds(lengths_of(self.metadata))
        with _h5py().File(self._path, "r") as file:
            for number in which:
                begin, end = where[number]
                yield {one.name: one.from_index(file[found[one.name]][begin:end]) for one in columns}


def places(columns: Sequence[Column]) -> dict[str, str]:
    """Return the place of each column in the file."""
    seen = [column.key for column in observation_columns(columns)]
    found = {}
    for column in columns:
        key = column.key
        if key in seen:
            found[column.name] = _under("observations", key, seen)
        elif key[0] == "next" and key[1:] in seen:
            found[column.name] = _under("next_observations", key[1:], seen)
        else:
            own = f"infos/{column.name}"
            found[column.name] = own if column.scores else _NAMES.get(key, own)
    return found


def _under(group: str, key: tuple[str, ...], all_keys: Sequence[tuple[str, ...]]) -> str:
    """Return the place of an observation: `group` itself for a single one, else an array in the group."""
    return group if len(all_keys) == 1 else f"{group}/{'.'.join(key)}"


def _stored_shape(column: Column) -> tuple[int, ...]:
    """Return the shape of a stored row: D4RL's rewards and flags are `[steps]`, ours `[steps, 1]`."""
    if column.one_hot:
        return ()
    return () if column.key in _NAMES and column.key[0] == "next" and column.shape == (1,) else column.shape
