"""Temporary folders, removed when closed, or, if their process was killed, when the next is made; and unnamed files.

The process that makes a folder holds a file lock in it, which the system releases however that process ends. A folder
whose lock is free has no owner. Pids would not do: another container may use the same folder, and has pids of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from typing_extensions import Self

_LOCK = "lock"


class TemporaryFolder:
    """A folder of this process, of a given kind; abandoned folders of that kind are removed first."""

    def __init__(self, kind: str) -> None:
        _sweep(kind)
        new = Path(tempfile.mkdtemp(prefix=".reap-"))  # under this name nobody looks for it until it is locked
        self._lock: int | None = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then no other process gets it, either
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(f"reap-{kind}-{new.name.removeprefix('.reap-')}"))

    def close(self) -> None:
        """Remove the folder with everything in it. May be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sweep(kind: str) -> None:
    """Remove the folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"reap-{kind}-*"):
        with contextlib.suppress(OSError):  # it is in use, or another process is removing it
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def anonymous_file(name: str) -> int:
    """Return a descriptor of memory without a name in any file system: nothing can be left behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
