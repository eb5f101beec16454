"""Snapshots: the whole state of a buffer as a dictionary, and as a directory on disk.

    path/
        rows-2f….pt      rows, marks, the sampler's state          a new name each time
        buffer.json      numbers; name, size and SHA-256 of that file; its own SHA-256 in the last line

`buffer.json` defines the dump. It is replaced atomically, after the file it names is on the disk: if the process is
killed at any moment, or the disk is full, the previous dump stays intact. Every byte and number that is read is checked
before the buffer changes. Nothing that is read is executed: torch's `weights_only` loads only tensors and numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap._system.checked_files import FULL, load_tensors, locked, read_manifest, save_tensors, sync, write_manifest
from reap.buffers.arguments import directory
from reap.buffers.samplers import Sampler
from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.ring import BASE, COUNT, FRONTIER, HEAD, HOLE, HOLES, SAMPLED
from reap.errors import CorruptState, NoSpace, UsageError, WrongArgument
from reap.spec import as_array, numpy_dtype, show

_MANIFEST = "buffer.json"
_FORMAT = 2
_OURS = re.compile(r"rows-[0-9a-f]{16}\.pt|buffer\.json\.[0-9a-f]{16}")
_NUMBERS, _PARTS = ("capacity", "words", "count", "sampled"), ("rows", "marks", "sampler")
_WORDS = ("head", "holes", "base")


# ---- as a dictionary ------------------------------------------------------------------------------------------------


def snapshot(memory: BufferFiles, sampler: Sampler) -> dict[str, Any]:
    """Return rows, marks and the sampler's state, rows in the order of the ring. Writers wait meanwhile."""
    ring = memory.ring
    with ring.lock.locked():
        low, high = ring.window()
        rows = memory.rows
        return {
            "capacity": ring.capacity,
            "words": {"head": high, "holes": int(ring.words[HOLES]), "base": int(ring.words[BASE])},
            "count": int(ring.words[COUNT]),
            "sampled": int(ring.words[SAMPLED]),
            "marks": torch.from_numpy(ring.marks_of(low, high).copy()),
            "rows": {} if rows is None else rows.read(np.arange(low, high) % ring.capacity),
            "sampler": sampler.state_dict(),
        }


def restore(memory: BufferFiles, sampler: Sampler, state: Mapping[str, Any]) -> None:
    """Replace the contents of a buffer by a snapshot. An error leaves the buffer unchanged."""
    ring = memory.ring
    _check(state, ring.capacity)
    with ring.exclusive():  # active writers would write over the restored rows
        if lacking := sampler.state_dict().keys() - state["sampler"].keys():
            raise UsageError(f"this state belongs to another sampler: it has no {', '.join(sorted(lacking))}")
        # Positions only grow: the restored ones move on by whole laps, by as few as possible.
        if state["capacity"] == ring.capacity:
            lowest = max(state["words"]["base"], state["words"]["head"] - ring.capacity)
            shift = max(ring.next_lap() - lowest // ring.capacity * ring.capacity, 0)
        else:
            state, oldest = _resized(state, sampler, ring.capacity)
            shift = ring.next_lap() - oldest
        sampler.check_state(state["sampler"], state["words"]["head"])
        columns, marks = state["rows"], as_array(state["marks"])
        shapes = {k: (tuple(v.shape[1:]), v.dtype) for k, v in columns.items()}
        before = sampler.state_dict()
        try:  # first the steps that can fail: a user's sampler, other columns
            sampler.load_state_dict(state["sampler"], shift)
            rows = memory.rows_for(shapes) if columns else None
        except BaseException:
            sampler.load_state_dict(before)
            raise
        ring.empty()
        head, base = (state["words"][name] + shift for name in ("head", "base"))
        first, lowest = head - len(marks), max(base, head - ring.capacity)
        if rows is not None:
            rows.write(first % ring.capacity, {key: as_array(value) for key, value in columns.items()})
        # Rows that were being written when the snapshot was made are not in it: they become holes.
        ring.mark(lowest, np.concatenate([np.full(first - lowest, HOLE, np.uint8), marks]))
        ring.words[HOLES] = max(state["words"]["holes"] + shift, first if first > lowest else 0)
        ring.words[BASE] = base
        ring.words[COUNT], ring.words[SAMPLED] = state["count"], state["sampled"]
        ring.words[HEAD] = head
        ring.words[FRONTIER] = head  # last: makes the rows readable


def _resized(state: Mapping[str, Any], sampler: Sampler, capacity: int) -> tuple[dict[str, Any], int]:
    """Convert the state of a smaller buffer to one of `capacity` rows, in which its oldest row is row 0.

    Return the new state, and the position of that row.
    """
    words = state["words"]
    first = words["head"] - len(state["marks"])
    sampler_state = sampler.grown(state["sampler"], state["capacity"], capacity, first)
    return {**state, "sampler": sampler_state, "words": {**words, "base": first}}, first


def _check(state: Any, capacity: int) -> None:
    """Raise if this is not a valid state for a buffer of that size, as far as can be checked without the buffer."""
    if not isinstance(state, Mapping):
        raise WrongArgument(f"state must be what state_dict() returned, a mapping, got {type(state).__name__}")
    for name in (*_NUMBERS, *_PARTS):
        if name not in state:
            raise CorruptState(f"this state has no {name!r}; nothing was loaded")
    words, marks, columns = state["words"], state["marks"], state["rows"]
    for name in ("words", "rows", "sampler"):
        if not isinstance(state[name], Mapping):
            raise CorruptState(f"{name!r} must be a mapping, got {type(state[name]).__name__}; nothing was loaded")
    for name, number in [
        *((n, words.get(n)) for n in _WORDS),
        *((n, state[n]) for n in ("capacity", "count", "sampled")),
    ]:
        if type(number) is not int or not 0 <= number < 2**62:
            raise CorruptState(f"{name!r} must be a position or count, got {number!r:.80}; nothing was loaded")
    if state["capacity"] > capacity:
        raise UsageError(f"this state has {state['capacity']} rows, but the storage holds {capacity}")
    if not isinstance(marks, Tensor) or marks.dtype is not torch.uint8 or marks.ndim != 1 or bool((marks > HOLE).any()):
        raise CorruptState(f"'marks' is not a uint8 vector of 0, 1 and 2: {_described(marks)}; nothing was loaded")
    if not len(marks) <= min(state["capacity"], words["head"] - words["base"]) or (len(marks) and not columns):
        raise CorruptState(f"'marks' and 'words' belong to different states: {len(marks)} rows; nothing was loaded")
    for key, value in columns.items():
        if not isinstance(key, tuple) or not key or not all(isinstance(part, str) for part in key):
            raise CorruptState(f"{key!r:.80} is not the key of a column; nothing was loaded")
        if not _dense(value) or not value.ndim or len(value) != len(marks):
            raise CorruptState(f"column {show(key)} must have {len(marks)} rows, got {_described(value)}")


def _dense(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    with contextlib.suppress(Exception):
        return numpy_dtype(value.dtype) is not None
    return False


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


# ---- as a directory -------------------------------------------------------------------------------------------------


def dump(path: Any, state: Mapping[str, Any]) -> None:
    """Write a snapshot to a directory. A dump already there stays intact until the new one is complete."""
    path = directory(path, "path")
    token = secrets.token_hex(8)
    name, aside = f"rows-{token}.pt", f"{_MANIFEST}.{token}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with locked(path) as handle:
            old = _manifest(path) if (path / _MANIFEST).exists() else b""
            try:
                about = {"format": _FORMAT, "file": name}
                about |= save_tensors({part: state[part] for part in _PARTS}, path / name)
                write_manifest(path / aside, {**about, **{number: state[number] for number in _NUMBERS}})
                sync(handle)  # before the manifest: the file it names must be on the disk
                os.replace(path / aside, path / _MANIFEST)
            except BaseException:
                for half in (path / name, path / aside):
                    with contextlib.suppress(OSError):
                        half.unlink()
                raise
            sync(handle)
            stale = [found for found in os.listdir(path) if _OURS.fullmatch(found) and found != name]
            for found in [*stale, *(["rows.pt"] if _is_old(old) else [])]:  # files of earlier dumps, complete or not
                with contextlib.suppress(OSError):
                    (path / found).unlink()
    except OSError as error:
        if error.errno not in FULL:
            raise UsageError(f"path={str(path)!r}: a dump cannot be written there: {error}") from error
        raise NoSpace(f"path={str(path)!r}: the dump does not fit on the disk ({error}); {_before(path)}") from None


def _before(path: Path) -> str:
    return "the previous dump is complete" if (path / _MANIFEST).exists() else "nothing was written"


def load_dump(path: Any) -> dict[str, Any]:
    """Read a snapshot back. Raise `CorruptState` for anything that differs from what was written."""
    path = directory(path, "path")
    try:
        with locked(path, fcntl.LOCK_SH):
            try:
                text = _manifest(path)
            except FileNotFoundError:
                raise UsageError(f"path={str(path)!r} holds no dumped buffer: there is no {_MANIFEST}") from None
            return _load_old(path, text) if _is_old(text) else _load(path)
    except UsageError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_dir():
            raise CorruptState(f"path={str(path)!r}: a file of this dump is missing: {error}") from None
        raise UsageError(f"path={str(path)!r} holds no dumped buffer: it is not a directory") from None
    except Exception as error:  # JSON, zip files, tensors and disks raise many kinds of errors when damaged
        raise CorruptState(f"path={str(path)!r}: this dump is damaged: {error!r:.300}; nothing was loaded") from error


def _load(path: Path) -> dict[str, Any]:
    about = read_manifest(path / _MANIFEST)
    if about["format"] != _FORMAT:
        raise CorruptState(
            f"{path / _MANIFEST} has format {about['format']!r}, but this reap reads {_FORMAT} and older"
        )
    if not _OURS.fullmatch(about["file"]):
        raise CorruptState(f"{path / _MANIFEST} names a file that is not part of a dump: {about['file']!r:.80}")
    parts = load_tensors(path / about["file"], about)
    return {**{name: about[name] for name in _NUMBERS}, **{name: parts[name] for name in _PARTS}}


def _load_old(path: Path, text: bytes) -> dict[str, Any]:
    """Read a dump in the older format without checksums: damage to it may go unnoticed."""
    about, parts = json.loads(text), torch.load(path / "rows.pt", weights_only=True)
    return {**{name: about[name] for name in _NUMBERS}, **{name: parts[name] for name in _PARTS}}


def _is_old(text: bytes) -> bool:
    return text.startswith(b'{"capacity":')


def _manifest(path: Path) -> bytes:
    return (path / _MANIFEST).read_bytes()
