"""Files written to disk with a checksum, so that reading them either returns what was written or raises.

A manifest is one line of JSON, and in a second line the checksum of the first. All files it names are on disk before it
is. Reading never executes anything: torch's `weights_only` loads tensors and numbers.
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
_PIECE = 1 << 20  # bytes hashed at a time


def save_tensors(value: Any, path: Path) -> dict[str, Any]:
    """Write tensors and numbers to a new file, synced to disk; return its length and checksum."""
    with open(path, "xb") as file, ThreadPoolExecutor(1, "reap-checksum") as beside:
        summed = _Summed(file, beside)
        torch.save(value, cast(Any, summed))
        if summed.failure:
            raise OSError(summed.failure, os.strerror(summed.failure))
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": summed.size, "sha256": summed.digest.hexdigest()}


def load_tensors(path: Path, about: Mapping[str, Any]) -> Any:
    """Return what `save_tensors` wrote; raise `CorruptState` if the file's length or checksum is not as in `about`."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE):
            digest.update(piece)
        if (file.tell(), digest.hexdigest()) != (about["bytes"], about["sha256"]):
            raise CorruptState(f"{path} is not what was written: its checksum differs")
        file.seek(0)
        return torch.load(file, weights_only=True, map_location="cpu")


def write_manifest(path: Path, about: Mapping[str, Any]) -> None:
    """Write these numbers and their checksum to a new file, synced to disk."""
    text = json.dumps(about).encode()
    with open(path, "xb") as file:
        file.write(text + b"\n" + _sum(text) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the numbers that `write_manifest` wrote, or raise `CorruptState` if their checksum differs."""
    body, _, line = path.read_bytes().partition(b"\n")
    if line != _sum(body) + b"\n":
        raise CorruptState(f"{path} is not what was written: its checksum differs; nothing was loaded")
    found: dict[str, Any] = json.loads(body)
    return found


def sync(handle: int) -> None:
    """Sync what a descriptor refers to to disk; for a directory, the names of its files."""
    with contextlib.suppress(OSError):  # some file systems cannot
        os.fsync(handle)


@contextlib.contextmanager
def locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Lock a directory and yield its descriptor: no other process writes there (or reads, with an exclusive lock)."""
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
    """A file that hashes what is written to it. It hides errors from torch, which would not pass on their reason."""

    def __init__(self, file: Any, beside: Executor) -> None:
        self._file, self._beside, self.size, self.digest = file, beside, 0, hashlib.sha256()
        self.failure = 0  # an errno: torch keeps this object, and an exception would keep the caller's frames

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not self.failure:
            # Hashing takes about as long as writing: another thread hashes large pieces while this one writes them.
            summing = self._beside.submit(self.digest.update, data) if size >= _PIECE else None
            try:
                self._file.write(data)
            except OSError as error:
                self.failure = error.errno or errno.EIO
            if summing is None:
                self.digest.update(data)
            else:
                summing.result()  # before returning: torch may then reuse the memory
            self.size += size
        return size

    def flush(self) -> None:
        """Do nothing: everything is written out at the end."""
