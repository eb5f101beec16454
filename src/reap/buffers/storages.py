"""Storages: how many rows there may be, and where they lie."""

from __future__ import annotations

from pathlib import Path

import torch

from reap.buffers.memory import Memory
from reap.errors import UsageError
from reap.temporary import TemporaryFolder


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
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
            raise UsageError(f"a storage holds a positive number of rows, got {max_size!r}")
        self.max_size, self.ndim = max_size, ndim
        self.device = torch.device("cpu" if device == "auto" else device)
        self.memory: Memory | None = None

    def open(self) -> Memory:
        """Its memory; a storage belongs to one buffer."""
        if self.memory is None:
            self.memory = self._make()
        return self.memory

    def _make(self) -> Memory:
        return Memory(self.max_size)

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

    Without `scratch_dir` the file has no name and goes with the buffer.
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
        super().__init__(max_size, device=device, ndim=ndim)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._existsok = existsok

    def _make(self) -> Memory:
        if self.scratch_dir is None:
            with TemporaryFolder("rows") as folder:
                return Memory(self.max_size, path=folder.path / "rows")  # the name goes, the file stays
        self.scratch_dir.mkdir(parents=True, exist_ok=True)
        path = self.scratch_dir / "rows"
        if self._existsok:
            path.unlink(missing_ok=True)
        return Memory(self.max_size, path=path)
