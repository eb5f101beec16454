"""Who can be watched: a file for each, which only its user can read, with the address of its page.

    collector.watch() ──► <runtime directory>/reap/<pid>-<port>.json, 0600 ──► reap watch PID

The directory is the user's own ($XDG_RUNTIME_DIR, or one in the temporary directory that is theirs alone). Nothing is
there unless somebody called `watch()`.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from reap.errors import UsageError


def directory(*, make: bool = False) -> Path:
    """Return where the files are. One that belongs to somebody else, or that others may write to, is refused."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    path = (
        Path(given) / "reap" if given and os.path.isdir(given) else Path(tempfile.gettempdir(), f"reap-{os.getuid()}")
    )
    if make:
        path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"{path} must be a directory of yours that nobody else may read (chmod 700 {path})")
    return path


def register(entry: dict[str, Any]) -> Path:
    """Write down that a collector can be watched; returns the file."""
    path = directory(make=True) / f"{entry['pid']}-{entry['port']}.json"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a process that had our number
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump(entry, file)
    return path


def registered() -> list[dict[str, Any]]:
    """All that can be watched, the latest last; files of processes that are gone are removed."""
    found = []
    for path in sorted(directory().glob("*.json"), key=lambda one: one.stat().st_mtime):
        try:
            entry = json.loads(path.read_text())
            os.kill(int(entry["pid"]), 0)
            found.append(entry)
        except (ProcessLookupError, ValueError, KeyError, TypeError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        except OSError:
            continue
    return found
