"""Checkpoints: everything a training run needs to continue, saved together and loaded together.

    path/
        checkpoint-00000011/     an older one, complete
        checkpoint-00000012/     collector.pt  policy.pt  optimizer.pt  …  and last of all checkpoint.json

A checkpoint consists of the files its `checkpoint.json` names, which is written once those are on disk. So if a run is
killed at any moment, or the disk is full, the previous checkpoint is complete, and that one is loaded. Everything is
read and checked to the last byte before anything is loaded; if a part rejects its state, all are put back as before.

Reading executes nothing, with one exception: an env in the middle of its episode is kept as a pickle. Give
`trusted=True` for files that are your own, and such episodes continue; without it, new ones begin.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reap import __version__
from reap._system.checked_files import FULL, load_tensors, locked, read_manifest, save_tensors, sync, write_manifest
from reap.collectors.base import BaseCollector
from reap.core.resume import without_pickles
from reap.errors import CorruptState, NoSpace, ReapError, UsageError, WrongArgument

_log = logging.getLogger(__name__)
_MARKER, _FORMAT = "checkpoint.json", 1
_NAME = re.compile(r"checkpoint-(\d{8,})")


class Loaded(NamedTuple):
    """What `load` returns: which checkpoint, the values saved beside the objects, and the objects not given."""

    path: Path
    number: int
    values: dict[str, Any]
    left_out: tuple[str, ...] = ()


def save(path: Any, *, keep: int = 2, **parts: Any) -> Path:
    """Write a new checkpoint of these parts below `path`, and remove all but the `keep` newest earlier ones.

    >>> save("run", collector=collector, policy=policy, optimizer=optimizer, step=step)

    A part is any object with a `state_dict`, or a value made of numbers, texts and tensors. All are of one moment: a
    collector that runs in the background pauses while the states are taken, and resumes before they are written.
    Returns the checkpoint's directory.
    """
    root = _directory(path)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise WrongArgument(f"keep must be a whole number >= 0, got {keep!r}")
    if not parts:
        raise UsageError("nothing to save: give the parts by name, as in save(path, collector=collector)")
    objects = [name for name, part in parts.items() if callable(getattr(part, "state_dict", None))]
    values = {name: _value(name, part) for name, part in parts.items() if name not in objects}
    collectors = [part for part in parts.values() if isinstance(part, BaseCollector) and part.is_running()]
    taken = _states({name: parts[name] for name in objects}, collectors)
    states = {name: taken[name] if name in objects else values[name] for name in parts}
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root) as handle:
            number = max(_numbers(root), default=0) + 1
            place = root / f"checkpoint-{number:08}"
            try:
                place.mkdir()
                _write(place, number, states, objects)
                sync(handle)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            _remove(root, number, keep)
    except OSError as error:
        if isinstance(error, ReapError):
            raise
        if error.errno not in FULL:
            raise UsageError(f"path={str(root)!r}: a checkpoint cannot be written there: {error}") from error
        raise NoSpace(
            f"path={str(root)!r}: the checkpoint does not fit on the disk; earlier ones are undamaged"
        ) from None
    return place


def load(path: Any, *, trusted: bool = False, **parts: Any) -> Loaded:
    """Load the newest complete checkpoint below `path`, or the checkpoint at `path` itself, into these parts.

    >>> done = load("run", collector=collector, policy=policy, optimizer=optimizer, trusted=True)
    >>> step = done.values["step"]

    Objects that were saved and are not given are named in `left_out` of the result. An error says what is wrong, and
    nothing is loaded then.
    """
    place, about, states = _newest(_directory(path))
    objects = about["objects"]
    for name, part in parts.items():
        if name not in states:
            raise UsageError(f"{place} has no {name!r}, only {sorted(states)}; nothing was loaded")
        if name not in objects:
            raise UsageError(f"{name!r} was saved as a value: it is in what load() returns; nothing was loaded")
        if not callable(getattr(part, "load_state_dict", None)):
            raise WrongArgument(f"{name} has no load_state_dict: {type(part).__name__}; nothing was loaded")
    # Buffers last: their state alone is too large to be copied, and loading one fails without changing anything.
    order = sorted(parts, key=lambda name: hasattr(parts[name], "sample"))
    before: dict[str, Any] = {}
    done: list[str] = []
    try:
        for name in order:
            if name != order[-1] or not hasattr(parts[name], "sample"):
                before[name] = copy.deepcopy(parts[name].state_dict())
            done.append(name)
            parts[name].load_state_dict(states[name] if trusted else without_pickles(states[name]))
    except Exception as cause:
        lost = [name for name in reversed(done) if name in before and not _put_back(parts[name], before[name])]
        if isinstance(cause, ReapError) and not lost:
            raise
        now = f"{', '.join(lost)} could not be restored to what they were" if lost else "nothing was loaded"
        raise UsageError(f"{done[-1]} rejected its state from {place}: {cause}; {now}") from cause
    values = {name: state for name, state in states.items() if name not in objects}
    return Loaded(place, about["number"], values, tuple(name for name in objects if name not in parts))


def _put_back(part: Any, state: Any) -> bool:
    """Restore the state a part had before; return whether it accepted it."""
    try:
        part.load_state_dict(state)
    except Exception:
        _log.exception("%s rejected the state that it had before", type(part).__name__)
        return False
    return True


def newest(path: Any) -> Path | None:
    """Return the checkpoint that `load` would take; None if there is none."""
    root = _directory(path)
    if not root.is_dir():
        return None
    try:
        return _newest(root)[0]
    except UsageError:
        return None


def _directory(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise WrongArgument(f"path must be a directory, got {path!r}")
    return Path(path)


def _states(objects: Mapping[str, Any], running: Sequence[BaseCollector]) -> dict[str, Any]:
    """Return the state of each object while these collectors are paused, so that no row is written in between."""
    if running:
        with running[0].pause():
            return _states(objects, running[1:])
    return {name: part.state_dict() for name, part in objects.items()}


def _value(name: str, part: Any) -> Any:
    try:
        return _plain(part)
    except TypeError:
        raise WrongArgument(
            f"{name} is a {type(part).__name__}: it has no state_dict, and is not made of numbers, texts and tensors"
        ) from None


def _plain(value: Any) -> Any:
    """Return the value in a form that loads without executing anything: NumPy scalars become Python numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        if not all(isinstance(key, (str, int)) for key in value):
            raise TypeError
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value] if isinstance(value, list) else tuple(map(_plain, value))
    if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
        return value
    raise TypeError


def _write(place: Path, number: int, states: Mapping[str, Any], objects: Sequence[str]) -> None:
    files = {name: save_tensors(state, place / f"{name}.pt") for name, state in states.items()}
    about = {"format": _FORMAT, "reap": __version__, "torch": torch.__version__, "number": number}
    handle = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        write_manifest(place / f"{_MARKER}.new", {**about, "objects": objects, "files": files})
        os.replace(place / f"{_MARKER}.new", place / _MARKER)
        # The files' names too, before anything older is removed: a marker without its files is no checkpoint.
        sync(handle)
    finally:
        os.close(handle)


def _numbers(root: Path) -> list[int]:
    found = [_NAME.fullmatch(name) for name in os.listdir(root)]
    return sorted(int(match[1]) for match in found if match)


def _remove(root: Path, newest: int, keep: int) -> None:
    """Remove unfinished checkpoints, and complete ones beyond the `keep` newest before this one."""
    older = [number for number in _numbers(root) if number < newest]
    whole = [number for number in older if (root / f"checkpoint-{number:08}" / _MARKER).exists()]
    wanted = {*whole[len(whole) - keep :]} if keep else set()
    for number in older:
        if number not in wanted:
            place = root / f"checkpoint-{number:08}"
            with contextlib.suppress(OSError):  # the marker first: half a checkpoint must not look complete
                (place / _MARKER).unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)


def _newest(root: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    if (root / _MARKER).exists():
        return root, *_read(root)
    if not root.is_dir():
        raise UsageError(f"path={str(root)!r} holds no checkpoint: it is not a directory")
    damaged = []
    for number in reversed(_numbers(root)):
        place = root / f"checkpoint-{number:08}"
        if not (place / _MARKER).exists():
            continue  # its process was killed before it was complete
        try:
            return place, *_read(place)
        except CorruptState as reason:
            damaged.append(str(reason))
            _log.warning("a checkpoint is damaged; the one before it is used: %s", reason)
    if damaged:
        raise CorruptState(
            f"path={str(root)!r}: all checkpoints there are damaged: {'; '.join(damaged)}; nothing was loaded"
        )
    raise UsageError(f"path={str(root)!r} holds no checkpoint")


def _read(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        about = read_manifest(place / _MARKER)
        if about["format"] != _FORMAT:
            raise CorruptState(f"{place} has format {about['format']!r:.40}, this reap {__version__} reads {_FORMAT}")
        names = about["files"]
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise CorruptState(f"{place / _MARKER} names invalid files")
        states = {name: load_tensors(place / f"{name}.pt", names[name]) for name in names}
        if not isinstance(about["number"], int) or not {*about["objects"]} <= states.keys():
            raise CorruptState(f"{place / _MARKER} does not match its files")
    except CorruptState:
        raise
    except Exception as error:  # the many errors for broken JSON, zip files, tensors and disks
        raise CorruptState(f"{place} is damaged: {error!r:.300}") from error
    return about, states
