"""Parquet: a row per frame, readable by Hugging Face `datasets`, pandas, polars and DuckDB.

    datasets.load_dataset(path)          pandas.read_parquet(path)

Each column is named after its key, joined by dots. Its value for a frame is a number, a list, or, for large ones like
images, bytes: `numpy.frombuffer` and the shape in the metadata make an array of them. `episode_index` and `frame_index`
identify the frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reap.data.columns import Array, Arrays, Column, joined
from reap.data.formats.base import KEY, Spaces, bounds, columns_in, flat_rows, lengths_of, shaped
from reap.errors import missing

_FILE = "data/train-00000-of-00001.parquet"
MANY = 256  # values per frame above which they are stored as bytes: lists cost a few nanoseconds per value
# Uncompressed, without statistics: most columns hardly compress, and frames are not searched by value ranges.
PLAIN: dict[str, Any] = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
_TOGETHER = 1 << 22  # bytes per row group, which consists of whole episodes


def pyarrow() -> Any:
    """Import and return pyarrow, or raise the error that it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing("pyarrow", "parquet") from None
    return pyarrow


class ParquetWriter:
    """Writes row groups of whole episodes to one file."""

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None:
        self._arrow = pyarrow()
        self._columns = columns
        (path / "data").mkdir(parents=True)
        empty: Arrays = {one.name: np.zeros((0, *one.shape), one.numpy) for one in columns}
        schema = table_of(columns, empty, _numbers([])).schema
        self._file = self._arrow.parquet.ParquetWriter(path / _FILE, schema, **PLAIN)
        self._waiting: list[Arrays] = []
        self._bytes = self._count = 0
        self._groups: list[int] = []  # how many episodes each row group holds

    def add(self, episode: Arrays) -> None:
        self._waiting.append(episode)
        self._bytes += sum(values.nbytes for values in episode.values())
        if self._bytes > _TOGETHER:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            lengths = [len(next(iter(one.values()))) for one in self._waiting]
            table = table_of(self._columns, joined(self._waiting), _numbers(lengths, self._count))
            self._file.write_table(table, row_group_size=len(table))
            self._groups.append(len(self._waiting))
            self._count += len(self._waiting)
        self._waiting, self._bytes = [], 0

    def close(self, metadata: Mapping[str, Any]) -> None:
        self._flush()
        self._file.add_key_value_metadata({KEY: json.dumps({**metadata, "row_groups": self._groups})})
        self._file.close()


class ParquetReader:
    """Reads what `ParquetWriter` wrote, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path / _FILE
        self.metadata: dict[str, Any] = json.loads(pyarrow().parquet.read_metadata(self._path).metadata[KEY.encode()])

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        columns, lengths = columns_in(self.metadata), lengths_of(self.metadata)
        groups = bounds(self.metadata["row_groups"])
        last, arrays = -1, Arrays()
        with pyarrow().parquet.ParquetFile(self._path) as file:
            for number in which:
                group = next(n for n, (begin, end) in enumerate(groups) if begin <= number < end)
                if group != last:
                    last, arrays = group, arrays_of(columns, file.read_row_group(group))
                first, after = groups[group]
                begin, end = bounds(lengths[first:after])[number - first]
                yield {name: values[begin:end] for name, values in arrays.items()}


def _numbers(lengths: Sequence[int], first: int = 0) -> Arrays:
    episodes = [np.full(length, first + n) for n, length in enumerate(lengths)]
    frames = [np.arange(length) for length in lengths]
    none = [np.zeros(0, np.int64)]
    return {"episode_index": np.concatenate(episodes or none), "frame_index": np.concatenate(frames or none)}


def table_of(columns: Sequence[Column], arrays: Mapping[str, Array], more: Mapping[str, Array]) -> Any:
    """Return frames as an Arrow table of numbers, lists of fixed length, and bytes for large values."""
    arrow = pyarrow()
    found = {name: arrow.array(values) for name, values in more.items()}
    for column in columns:
        rows = flat_rows(arrays[column.name])
        if rows.shape[1] > MANY:
            offsets = np.arange(len(rows) + 1, dtype=np.int64) * (rows.itemsize * rows.shape[1])
            parts = [None, arrow.py_buffer(offsets), arrow.py_buffer(rows)]
            found[column.name] = arrow.Array.from_buffers(arrow.large_binary(), len(rows), parts)
        else:
            values = arrow.array(rows.reshape(-1))
            single = rows.shape[1] == 1 and not column.shape
            found[column.name] = values if single else arrow.FixedSizeListArray.from_arrays(values, rows.shape[1])
    return arrow.table(found)


def arrays_of(columns: Sequence[Column], table: Any) -> Arrays:
    """Return the arrays from which `table_of` made this table."""
    types = pyarrow().types
    found = {}
    for column in columns:
        values = table.column(column.name).combine_chunks()
        if types.is_large_binary(values.type) or types.is_binary(values.type):
            joint = b"".join(values.to_pylist())
            found[column.name] = shaped(np.frombuffer(joint, _part(column)), column)
            continue
        flat = values.flatten() if types.is_fixed_size_list(values.type) else values
        found[column.name] = shaped(flat.to_numpy(zero_copy_only=False).astype(_part(column), copy=False), column)
    return found


def _part(column: Column) -> np.dtype[Any]:
    """Return the dtype of the stored numbers: for complex columns, that of their real and imaginary parts."""
    kind = column.numpy
    return np.zeros(0, kind).real.dtype if kind.kind == "c" else kind
