"""The registry of watchable runs: for each a file, readable only by its user, with the address of its page.

    collector.watch() ──► <runtime directory>/reap/<pid>-<port>.json, 0600 ──► reap watch PID

The directory belongs to the user alone ($XDG_RUNTIME_DIR, or a private one in the temporary directory). It has no files
unless `watch()` was called.
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
    """Return the directory of the files. Raise if it belongs to another user, or others have access to it."""
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
    """Write the file of a collector that can be watched, and return its path."""
    path = directory(make=True) / f"{entry['pid']}-{entry['port']}.json"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # left by an earlier process with our pid
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump(entry, file)
    return path


def registered() -> list[dict[str, Any]]:
    """Return all runs that can be watched, the latest last, and remove the files of processes that have ended."""
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
