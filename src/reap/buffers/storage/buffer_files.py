"""BufferFiles: the three files of a buffer: unnamed ones in memory, or with the rows in a file on disk.

    book    header words │ marks │ which columns there are      mapped by all processes
    data    the rows                                            mapped as soon as the columns are known
    lock    empty                                               only locked, never mapped: see file_lock.py

The first writer writes the description of the columns to `book`; all other processes read it there.
Another process needs only the descriptors: it inherits `fds` and calls `BufferFiles(capacity, fds, place=place)`.
`place` describes in words where the rows lie on disk, for errors; disk space for all rows is then allocated before the
first row is written. `place=None` means that the rows lie in memory.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from reap.buffers.storage.episode_index import EpisodeIndex
from reap.buffers.storage.file_lock import lock_of
from reap.buffers.storage.ring import HEADER, LAYOUT, Ring
from reap.buffers.storage.rows import RowLayout, Rows
from reap.core.shared_slots import SharedFile, in_bytes
from reap.errors import NoSpace, SpecMismatch, UsageError
from reap.spec import Key, Leaf, show

Columns = Mapping[Key, tuple[tuple[int, ...], torch.dtype]]
_COLUMNS = 1 << 18  # bytes for the description of the columns; pages that are never touched cost nothing


class BufferFiles:
    """The ring and rows of one buffer, mapped into this process."""

    def __init__(
        self,
        capacity: int,
        fds: Sequence[int] | None = None,
        *,
        path: Path | None = None,
        place: str | None = None,
    ) -> None:
        self.capacity, self.place = capacity, place
        if fds is None:
            data = _data(path)  # first, since the name may already be taken
            fds = (SharedFile("reap-book").fd, data, SharedFile("reap-lock").fd)
        book, data, lock = fds
        self._book, self._data = SharedFile(fd=book), SharedFile(fd=data)
        self._lock = lock_of(lock)
        self.fds = (book, data, lock)
        weakref.finalize(self, _close, self._book, self._data)
        mapped = self._book.map(HEADER + capacity + _COLUMNS, f"max_size={capacity} rows")
        self._columns = mapped[HEADER + capacity :]
        self.ring = Ring(mapped, self._lock, capacity)
        self.runs = EpisodeIndex(self.ring)
        self._rows: Rows | None = None

    @property
    def rows(self) -> Rows | None:
        """The rows; None before the first one is written."""
        if self._rows is None and (length := int(self.ring.words[LAYOUT])):
            self._rows = self._map(pickle.loads(self._columns[:length].tobytes()))
        return self._rows

    def _map(self, columns: Columns) -> Rows:
        layout = RowLayout({key: Leaf(shape, dtype) for key, (shape, dtype) in columns.items()}, self.capacity)
        each, where = layout.nbytes // self.capacity, "" if self.place is None else f" in {self.place}"
        what = f"max_size={self.capacity} rows of {in_bytes(each)}{where}"
        try:
            return Rows(layout, self._data.map(layout.nbytes, what, on_disk=self.place is not None))
        except NoSpace as error:
            raise NoSpace(f"{error}; give fewer rows, or a scratch_dir with more room") from None

    def rows_for(self, columns: Columns) -> Rows:
        """Return the rows for data with these columns. The first call decides the columns; later ones must match."""
        if self.rows is None:
            with self._lock.locked():
                if not self.ring.words[LAYOUT]:
                    text = pickle.dumps(dict(columns))
                    if len(text) > _COLUMNS:
                        raise UsageError(f"{len(columns)} columns are more than a buffer can describe")
                    self._rows = self._map(columns)  # first: if the rows do not fit, nothing is recorded
                    self._columns[: len(text)] = memoryview(text)
                    self.ring.words[LAYOUT] = len(text)
        assert self.rows is not None
        known = self.rows.layout.columns
        if columns.keys() != known.keys():
            lost, new = [k for k in known if k not in columns], [k for k in columns if k not in known]
            what = f"lacks {show(lost[0])}" if lost else f"has the new column {show(new[0])}"
            raise SpecMismatch(f"this batch {what}; the buffer's rows are {', '.join(map(show, known))}")
        for key, (shape, dtype) in columns.items():
            if (shape, dtype) != (known[key].shape, known[key].dtype):
                raise SpecMismatch(f"{show(key)} is {Leaf(shape, dtype)}, the buffer's rows have {known[key]}")
        return self.rows


def _data(path: Path | None) -> int:
    if path is None:
        return SharedFile("reap-rows").fd
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise UsageError(f"{path} already exists; give another scratch_dir, or existsok=True to overwrite it") from None


def _close(*files: SharedFile) -> None:
    for file in files:
        file.close()
