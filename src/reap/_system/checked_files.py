"""Files that are whole or told apart: written to the disk with a checksum, read back only if it is right.

A manifest is one line of JSON and, in a second line, that line's own checksum. Whatever it names is on the disk before
it is. Nothing that is read is ever executed: torch's `weights_only` loads tensors and numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from reap.errors import CorruptState

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PIECE = 1 << 20  # bytes summed up at a time


def save_tensors(value: Any, path: Path) -> dict[str, Any]:
    """Write tensors and numbers to a new file, onto the disk itself; returns its length and checksum."""
    with open(path, "xb") as file, ThreadPoolExecutor(1, "reap-checksum") as beside:
        summed = _Summed(file, beside)
        torch.save(value, cast(Any, summed))
        if summed.failure:
            raise OSError(summed.failure, os.strerror(summed.failure))
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": summed.size, "sha256": summed.digest.hexdigest()}


def load_tensors(path: Path, about: Mapping[str, Any]) -> Any:
    """Return what `save_tensors` wrote, if the file is as long and has the checksum that it said."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE):
            digest.update(piece)
        if (file.tell(), digest.hexdigest()) != (about["bytes"], about["sha256"]):
            raise CorruptState(f"{path} is not what was written: its checksum differs")
        file.seek(0)
        return torch.load(file, weights_only=True, map_location="cpu")


def write_manifest(path: Path, about: Mapping[str, Any]) -> None:
    """A new file with these numbers and their checksum, onto the disk itself."""
    text = json.dumps(about).encode()
    with open(path, "xb") as file:
        file.write(text + b"\n" + _sum(text) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the numbers that `write_manifest` wrote; `CorruptState` if their checksum differs."""
    body, _, line = path.read_bytes().partition(b"\n")
    if line != _sum(body) + b"\n":
        raise CorruptState(f"{path} is not what was written: its checksum differs; nothing was loaded")
    found: dict[str, Any] = json.loads(body)
    return found


def sync(handle: int) -> None:
    """Write what a descriptor stands for onto the disk; of a directory, the names of its files."""
    with contextlib.suppress(OSError):  # file systems that know no such thing
        os.fsync(handle)


@contextlib.contextmanager
def locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[int]:
    """The directory's descriptor, while no other process writes there (or, to write, reads)."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(handle, how)
        yield handle
    finally:
        os.close(handle)


def _sum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


class _Summed:
    """A file that adds up what is written to it. torch must not see it fail: it would not say why."""

    def __init__(self, file: Any, beside: Executor) -> None:
        self._file, self._beside, self.size, self.digest = file, beside, 0, hashlib.sha256()
        self.failure = 0  # an errno; not the error, which would hold on to whoever writes, and torch to us

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not self.failure:
            # Summing up takes about as long as writing: what is large is summed by another thread meanwhile.
            summing = self._beside.submit(self.digest.update, data) if size >= _PIECE else None
            try:
                self._file.write(data)
            except OSError as error:
                self.failure = error.errno or errno.EIO
            if summing is None:
                self.digest.update(data)
            else:
                summing.result()  # before it returns: the memory is torch's again
            self.size += size
        return size

    def flush(self) -> None:
        """Everything is written out at the end."""
