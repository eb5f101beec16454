"""Storages: choose how many rows a buffer has, and whether they lie in memory or on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from reap._system.temporary import TemporaryFolder
from reap.buffers import arguments
from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.episode_index import Cuts
from reap.errors import NoSpace, UsageError


class Storage:
    """Room for `max_size` frames, allocated when the first frame arrives, which determines the columns.

    Args:
        max_size: the largest number of rows; new rows overwrite the oldest.
        device: where samples are delivered; the rows themselves stay in host memory.
        ndim: accepted for compatibility with TorchRL: a row is always one frame, whatever the shape of batches.
        shared_init, compilable: accepted for compatibility with TorchRL: the first writer determines the columns.
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        shared_init: bool = False,
        compilable: bool = False,
    ) -> None:
        self.max_size, self.ndim = arguments.whole(max_size, "max_size", 1), arguments.whole(ndim, "ndim", 1)
        self.device = arguments.device(device, "device")
        for name, value in (("shared_init", shared_init), ("compilable", compilable)):
            arguments.flag(value, name, optional=True)
        self.memory: BufferFiles | None = None
        self.cuts: Cuts | None = None  # the cuts of a buffer opened from another process; None: those of the sampler

    def open(self) -> BufferFiles:
        """Return the memory, which is made on the first call. A storage belongs to one buffer."""
        if self.memory is None:
            self.memory = self._make()
        return self.memory

    def _make(self) -> BufferFiles:
        return BufferFiles(self.max_size)

    def __len__(self) -> int:
        return 0 if self.memory is None else len(self.memory.ring)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_size}, rows={len(self)})"


class LazyTensorStorage(Storage):
    """Rows in memory that can be shared with other processes.

    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=256)
    """


class LazyMemmapStorage(Storage):
    """Rows in a file on disk, for more rows than fit into memory.

    >>> buffer = ReplayBuffer(storage=LazyMemmapStorage(10_000_000, scratch_dir="/data/replay"), batch_size=256)

    Without `scratch_dir` the file has no name and disappears with the buffer. Disk space for all `max_size` rows is
    allocated when the first row arrives; if there is too little, that raises `NoSpace` and nothing is written.
    """

    def __init__(
        self,
        max_size: int,
        scratch_dir: str | Path | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        shared_init: bool = False,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, device=device, ndim=ndim, shared_init=shared_init, compilable=compilable)
        self.scratch_dir = None if scratch_dir is None else arguments.directory(scratch_dir, "scratch_dir")
        self._existsok = arguments.flag(existsok, "existsok")

    def _make(self) -> BufferFiles:
        if self.scratch_dir is None:
            with TemporaryFolder("rows") as folder:
                place = f"{tempfile.gettempdir()} (no scratch_dir is given)"
                path = folder.path / "rows"  # the name is removed, the open file stays
                return BufferFiles(self.max_size, path=path, place=place)
        place, path = f"scratch_dir={str(self.scratch_dir)!r}", self.scratch_dir / "rows"
        try:
            self.scratch_dir.mkdir(parents=True, exist_ok=True)
            if self._existsok:
                path.unlink(missing_ok=True)
            return BufferFiles(self.max_size, path=path, place=place)
        except OSError as error:
            if isinstance(error, NoSpace):
                raise
            raise UsageError(f"{place}: rows cannot be written there: {error}") from error
