"""Datasets: whole episodes on disk, in the formats that RL libraries use.

    record(collector, path, format=…) ──► episodes are written as they end ──► load(path) ──► episodes, or all frames
    export(batches, path, format=…)   ──►                                                 ──► buffer.extend(….frames)

Every column of a batch is stored and read back bit for bit, together with the env's name and spec, its seed and the
versions of the libraries.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import tensordict
import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import Self

import reap
from reap.data.background_writer import BackgroundWriter
from reap.data.columns import Arrays, Column, EpisodeSplitter, as_tensordict, columns_of
from reap.data.formats.base import columns_in, lengths_of
from reap.errors import CorruptState, ReapError, RecordingFailed, UsageError, WrongArgument, WrongState, nearest
from reap.spec import AnyKey, EnvSpec, as_key
from reap.trajectories import FINAL, with_next

# By name: the prefix of its writer and reader class, and the suffix of its file or a file in its directory.
Format = Literal["minari", "parquet", "lerobot", "hdf5", "npz", "memmap"]
_FORMATS = {
    "minari": ("Minari", "data/metadata.json"),
    "parquet": ("Parquet", "data/train-00000-of-00001.parquet"),
    "lerobot": ("LeRobot", "meta/info.json"),
    "hdf5": ("D4RL", ".hdf5"),
    "npz": ("Npz", ".npz"),
    "memmap": ("Memmap", "reap.json"),
}
_OTHER_SUFFIXES = {".csv", ".json", ".jsonl", ".pt", ".pth", ".pkl", ".zip", ".npy", ".zarr", ".arrow", ".feather"}
_VERSION = 1


class Dataset(Sequence[TensorDict]):
    """The episodes of a recording. `dataset[3]` is one, a TensorDict `[steps]`; `frames` are those of all episodes.

    >>> dataset = load("runs/cartpole")
    >>> buffer.extend(dataset.frames)
    """

    def __init__(self, path: Path, format: str) -> None:
        self.path, self.format = path, format
        try:
            self._reader = _class_of(format, "Reader")(path)
            self.metadata: dict[str, Any] = self._reader.metadata
        except ReapError:
            raise
        except Exception as cause:  # each library has its own errors for incomplete files
            raise CorruptState(
                f"{path} is not a complete dataset: its metadata is missing ({cause!r}). It is written when a "
                f"recording is closed, so the recording was not closed or the file was truncated"
            ) from cause
        self.columns: list[Column] = columns_in(self.metadata)
        self.lengths = lengths_of(self.metadata)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self._read(range(len(self))[index]))
        try:
            return next(self._read([range(len(self))[index]]))
        except IndexError:
            raise IndexError(f"{self.path} has {len(self)} episodes, and no episode {index}") from None

    def __iter__(self) -> Iterator[TensorDict]:
        return self._read(range(len(self)))

    def _read(self, which: Iterable[int]) -> Iterator[TensorDict]:
        for arrays in self._arrays(which):
            yield as_tensordict(self.columns, arrays)

    def _arrays(self, which: Iterable[int]) -> Iterator[Arrays]:
        found = self._reader.episodes(which)
        while True:
            try:
                arrays = next(found)
            except StopIteration:
                return
            except ReapError:
                raise
            except Exception as cause:
                raise CorruptState(
                    f"an episode of {self.path} cannot be read: {cause!r}; a file may be truncated"
                ) from cause
            yield arrays

    @property
    def frames(self) -> TensorDictBase:
        """All frames `[steps]`, episode after episode. Those of a memmap dataset stay on disk until they are read."""
        if not len(self):
            empty = {one.name: np.zeros((0, *one.shape), one.numpy) for one in self.columns}
            return as_tensordict(self.columns, empty)
        if self.format == "memmap":
            try:
                found: TensorDictBase = self._reader.frames
            except Exception as cause:
                raise CorruptState(
                    f"the frames of {self.path} cannot be read: {cause!r}; a file may be truncated"
                ) from cause
            return found
        return torch.cat(list(self))

    def __repr__(self) -> str:
        env = self.metadata.get("env") or "an unnamed env"
        return (
            f"Dataset({str(self.path)!r}, {self.format}: {len(self)} episodes, {sum(self.lengths):,} frames of {env})"
        )


class Recording:
    """Writes the episodes of the batches it receives, as the episodes end. See `record`."""

    format: Format

    def __init__(
        self,
        path: Any,
        format: str | None,
        *,
        keys: Sequence[AnyKey] | None = None,
        unfinished: bool = False,
        spec: EnvSpec | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.format = _absolute(path), _format_of(_absolute(path), format)
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise UsageError(f"path={str(self.path)!r} already exists; give a new path")
        _class_of(self.format, "Writer")
        self._metadata: dict[str, Any] = dict(metadata or {})
        json.dumps(self._metadata)  # raises now, not after everything was recorded, if JSON cannot hold it
        self._keys = None if keys is None else [as_key(key) for key in keys]
        self._unfinished, self._spec = unfinished, spec
        self._splitter: EpisodeSplitter | None = None
        self._writer: BackgroundWriter | None = None
        self._columns: list[Column] = []
        self._lock = threading.Lock()  # one batch at a time, none while closing: batches may come from another thread
        self.closed = False

    @property
    def episodes(self) -> int:
        """The number of episodes written so far. Some that have ended may still wait to be written."""
        return len(self._lengths)

    @property
    def frames(self) -> int:
        """The number of frames written so far."""
        return sum(self._lengths)

    @property
    def _lengths(self) -> list[int]:
        return [] if self._writer is None else self._writer.lengths

    def add(self, batch: TensorDictBase) -> None:
        """Queue the episodes that end in this batch for writing in the background, and hold the unfinished ones.

        Blocks while too much data is queued. Raises `RecordingFailed` if earlier episodes could not be written.
        """
        if self._writer is not None and not self.closed:
            self._writer.wait_for_room()  # first: if Ctrl-C ends this wait, nothing of this batch was taken
        with self._lock:
            if self.closed:
                raise WrongState(f"the recording at {self.path} is closed")
            if batch.get(FINAL, None) is not None:
                batch = with_next(batch)
            if self._splitter is None:
                self._begin(columns_of(batch, self._keys, self._spec))
            assert self._splitter is not None
            assert self._writer is not None
            self._writer.write(self._splitter.feed(batch))

    def _begin(self, columns: Sequence[Column]) -> None:
        spaces = {column.key: column.space for column in columns if column.space is not None}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            self.path.rmdir()  # it is empty, and the writers create their own directories
        self._writer = BackgroundWriter(_class_of(self.format, "Writer")(self.path, columns, spaces), self.path)
        self._columns, self._splitter = list(columns), EpisodeSplitter(columns)

    def _write(self, episode: Arrays) -> None:
        assert self._writer is not None
        self._writer.wait_for_room()
        self._writer.write([[episode]])

    def drop_unfinished(self) -> None:
        """Drop the episodes that have not ended, because the envs were reset."""
        with self._lock:
            if self._splitter is not None:
                self._splitter.take_unfinished()

    def close(self) -> None:
        """Wait until all episodes and the metadata are written. May be called twice."""
        with self._lock:
            self.closed = True
            if self._writer is None or self._splitter is None:
                return  # no batch was received: there is no file
            self._writer.write(self._splitter.take_unfinished() if self._unfinished else [])
        self._writer.finish(
            {
                "reap_dataset": _VERSION,
                "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "versions": _versions(),
                **self._metadata,
                "columns": [column.state() for column in self._columns],
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RecordingFailed as failure:
            if failure is not error:  # `add` has already raised it inside the block
                raise


class CollectorRecording(Recording):
    """Writes the batches that a collector delivers between construction and `close`."""

    def __init__(self, collector: Any, path: Any, format: str | None, **options: Any) -> None:
        super().__init__(path, format, **options)
        self._collector = collector
        collector._listeners.add(self._hear)

    def _hear(self, batch: TensorDictBase) -> None:
        try:
            self.add(batch)
        except WrongState:
            if not self.closed:
                raise
            return  # a background thread was delivering this batch when the recording was closed
        if self._collector.options.reset_at_each_iter:
            self.drop_unfinished()

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield the collector's batches, and close the recording after the last one."""
        with self:
            yield from self._collector

    def close(self) -> None:
        self._collector._listeners.remove(self._hear)
        super().close()


def record(
    collector: Any,
    path: Any,
    format: Format | None = None,
    *,
    keys: Sequence[AnyKey] | None = None,
    unfinished: bool = False,
    env: str | None = None,
    seed: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> CollectorRecording:
    """Write a collector's episodes to disk, as they end.

    >>> for batch in record(collector, "runs/cartpole", format="minari"):
    ...     train(batch)                     # as without a recording

    Or around a loop of your own: `with record(collector, path): …`.

    Args:
        collector: any collector that delivers batches in this process, to you or to a replay buffer.
        path: a new directory; for "hdf5" and "npz" a new file.
        format: "minari", "parquet", "lerobot", "hdf5" (D4RL), "npz" or "memmap"; None: by the suffix of the path,
            else "memmap".
        keys: the entries of a batch to store; None: all.
        unfinished: also write the episodes that have not ended when the recording is closed.
        env: the env's name, for the metadata; None: its Gymnasium id.
        seed: the seed you passed to `set_seed`, for the metadata.
        metadata: anything else to keep with the dataset; must be JSON-serializable.
    """
    if not hasattr(collector, "_listeners"):
        raise WrongArgument(f"record() takes a collector, got {type(collector).__name__}; export() takes batches")
    if getattr(collector, "_workers_write", False):
        raise UsageError(
            f"record() writes what is delivered here, and the workers of this {type(collector).__name__} write to its "
            f"replay buffer themselves; export() what is in the buffer"
        )
    spec, registered = _about_env(collector)
    policy = getattr(collector, "policy", None)
    about = {
        "env": env or (registered.id if registered is not None else None),
        "env_spec": _as_json(registered),
        "seed": seed,
        "policy": None if policy is None else type(policy).__name__,
        "collector": type(collector).__name__,
        **(metadata or {}),
    }
    return CollectorRecording(collector, path, format, keys=keys, unfinished=unfinished, spec=spec, metadata=about)


def export(
    data: Any,
    path: Any,
    format: Format | None = None,
    *,
    keys: Sequence[AnyKey] | None = None,
    unfinished: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Dataset:
    """Write a dataset in another format, or write a batch, or several batches of one collector in their order.

    >>> export(load("runs/cartpole"), "runs/cartpole.hdf5")
    """
    if isinstance(data, Dataset):
        about = {key: value for key, value in data.metadata.items() if key not in ("row_groups", "actions")}
        recording = Recording(path, format, metadata={**about, **(metadata or {})})
        if keys is not None:
            raise UsageError("a dataset is exported whole; leave keys out, which are for batches")
        with recording:
            recording._begin(data.columns)
            for arrays in data._arrays(range(len(data))):
                recording._write(arrays)
    else:
        batches = [data] if isinstance(data, TensorDictBase) else data
        if not isinstance(batches, Iterable) or isinstance(batches, str | bytes):
            kind = type(data).__name__
            raise WrongArgument(
                f"export() takes a dataset, a batch or several batches, got {kind}; record() takes collectors"
            )
        with Recording(path, format, keys=keys, unfinished=unfinished, metadata=metadata) as recording:
            for batch in batches:
                recording.add(batch)
    if not recording.episodes:
        raise UsageError("no episode ends in these batches; unfinished=True exports those that do not")
    return Dataset(recording.path, recording.format)


def load(path: Any, format: Format | None = None) -> Dataset:
    """Open a dataset that was recorded or exported. By default its format is detected from its files."""
    path = _absolute(path)
    if not path.exists():
        raise UsageError(f"path={str(path)!r} does not exist")
    return Dataset(path, _format_of(path, format))


def _absolute(path: Any) -> Path:
    """Return the absolute path: Minari needs it, and it stays valid if the working directory changes later."""
    if isinstance(path, Path) or (isinstance(path, str) and path):
        return Path(path).absolute()
    raise WrongArgument(f"path must be a directory or a file, got {path!r}")


def _format_of(path: Path, given: str | None) -> Any:
    if given is not None:
        if given not in _FORMATS:
            raise UsageError(
                f"format must be one of {', '.join(map(repr, _FORMATS))}, got {given!r}{nearest(str(given), _FORMATS)}"
            )
        return given
    for name, (_, sign) in _FORMATS.items():
        if path.suffix == sign or (path.is_dir() and (path / sign).exists()):
            return name
    if path.suffix == ".h5":
        return "hdf5"
    if path.is_file() or path.suffix in _OTHER_SUFFIXES:
        raise UsageError(
            f"path={str(path)!r}: files are .npz, .hdf5 or .h5; other datasets are directories, and format= says which"
        )
    return "parquet" if path.suffix == ".parquet" else "memmap"


def _class_of(format: str, kind: Literal["Writer", "Reader"]) -> Any:
    """Return the writer class or the reader class of a format."""
    return getattr(importlib.import_module(f"reap.data.formats.{format}"), _FORMATS[format][0] + kind)


def _about_env(collector: Any) -> tuple[EnvSpec | None, Any]:
    """Return the env's spec and its Gymnasium registration; None for each that the collector cannot provide."""
    found: list[Any] = []
    for path, kind in (("spec", EnvSpec), ("envs[0].spec", gym.envs.registration.EnvSpec)):
        value = None
        with contextlib.suppress(Exception):  # envs of any kind, in any process; this is only metadata
            value = collector.getattr_env(path)
        found.append(value if isinstance(value, kind) else None)
    return found[0], found[1]


def _as_json(spec: Any) -> str | None:
    with contextlib.suppress(Exception):  # fails for envs that are made by functions
        return None if spec is None else str(spec.to_json())
    return None


def _versions() -> dict[str, str]:
    return {
        "reap": reap.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tensordict": str(tensordict.__version__),
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }
