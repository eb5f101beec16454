"""Storages: how many rows there may be, and where they lie."""

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
    """Room for `max_size` frames, taken when the first of them arrives and its columns are known.

    Args:
        max_size: how many rows there may be; the oldest make room for new ones.
        device: where samples are delivered; the rows themselves are in the memory of the host.
        ndim: a row is one frame, whatever the shape of the batches.
        shared_init, compilable: accepted as TorchRL has them; whoever writes first decides the columns.
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
        self.cuts: Cuts | None = None  # what rows of another process's buffer are cut by; None: the sampler says

    def open(self) -> BufferFiles:
        """Its memory; a storage belongs to one buffer."""
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
    """Rows in memory, which any process may be let in to.

    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=256)
    """


class LazyMemmapStorage(Storage):
    """Rows in a file on disk, for more of them than memory holds.

    >>> buffer = ReplayBuffer(storage=LazyMemmapStorage(10_000_000, scratch_dir="/data/replay"), batch_size=256)

    Without `scratch_dir` the file has no name and goes with the buffer. Room on the disk for all `max_size` rows is
    taken when the first of them arrives; where there is not so much, that is a `NoSpace` and nothing is written.
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
                path = folder.path / "rows"  # the name goes, the file stays
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
