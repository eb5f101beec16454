"""Minari: the directory that `minari.load_dataset` and `MinariDataset` read, with an HDF5 group per episode.

Observations are stored once: those of all steps and the final one. Columns that Minari has no name for are in `infos`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from reap.data.columns import Array, Arrays, Column, observation_columns
from reap.data.formats.base import KEY, Spaces, columns_in
from reap.errors import UsageError, missing
from reap.spec import show

_FLAGS = {("next", "terminated"): "terminations", ("next", "truncated"): "truncations"}
_FILE = "main_data.hdf5"
_CHUNK = 1 << 18  # bytes per HDF5 chunk, which is read and written as a whole


def _minari() -> Any:
    try:
        import h5py  # noqa: F401  # Minari's storage imports it
        import minari
    except ImportError:
        raise missing("minari", "minari") from None
    return minari


class MinariWriter:
    """Writes a group per episode to Minari's HDF5 file; Minari's own storage writes its metadata beside it.

    Minari's storage would divide images into chunks of a few rows and columns each, which takes three times as long to
    write (and as JPEG is lossy). Here chunks are whole frames.
    """

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None:
        self._minari = _minari()
        import h5py
        from minari.dataset.minari_storage import MinariStorage

        self._columns, self._observations = columns, observation_columns(columns)
        others = [one for one in columns if one not in self._observations]
        self._actions = [one for one in others if one.key in spaces] or [one for one in others if one.name == "action"]
        self._reward = next((one for one in columns if one.key == ("next", "reward")), None)
        if not self._observations or not self._actions or self._reward is None:
            raise UsageError("a Minari dataset needs an observation and its next value, 'action', ('next', 'reward')")
        (path / "data").mkdir(parents=True)
        self._name = path.name
        self._storage = MinariStorage.new(
            path / "data", _space(self._observations, spaces), _space(self._actions, spaces), jpeg_encoding=False
        )
        self._file = h5py.File(path / "data" / _FILE, "w", track_order=True)
        self._count = self._steps = 0

    def add(self, episode: Arrays) -> None:
        assert self._reward is not None
        rewards = episode[self._reward.name]
        steps = len(rewards)
        names = {".".join(key): name for key, name in _FLAGS.items()}
        flags = {names[name]: values.reshape(steps) for name, values in episode.items() if name in names}
        seen = {one.name: _all_observations(one, episode) for one in self._observations}
        group = self._file.create_group(f"episode_{self._count}")
        group.attrs["id"], group.attrs["total_steps"] = self._count, steps
        _put(group, "observations", _plain(seen))
        _put(group, "actions", _plain({one.name: one.as_index(episode[one.name]) for one in self._actions}))
        _put(group, "rewards", rewards.reshape(steps) if rewards[0].size == 1 else rewards)
        for name in _FLAGS.values():
            _put(group, name, flags.get(name, np.zeros(steps, bool)))
        for name in _in_infos(self._columns, self._actions):
            _put(group.require_group("infos"), name, episode[name])
        self._count += 1
        self._steps += steps

    def close(self, metadata: Mapping[str, Any]) -> None:
        self._file.close()
        actions = [list(one.key) for one in self._actions]
        # First what `load` needs: if Minari's own part fails, the recording can still be read.
        self._storage.update_metadata({KEY: json.dumps({**metadata, "actions": actions})})
        about: dict[str, Any] = {"dataset_id": self._name, "minari_version": self._minari.__version__}
        about |= {"total_episodes": self._count, "total_steps": self._steps, "dataset_size": self._storage.get_size()}
        if metadata.get("env_spec"):
            about["env_spec"] = metadata["env_spec"]
        if metadata.get("policy"):
            about["algorithm_name"] = str(metadata["policy"])
        self._storage.update_metadata(about)


def _put(group: Any, name: str, values: Any) -> None:
    """Store an array, or a dictionary of arrays, under this name."""
    if isinstance(values, dict):
        for inner, array in values.items():
            _put(group.require_group(name), inner, array)
        return
    rows = _CHUNK // max(1, values[0].nbytes)
    chunks = (max(1, min(rows, len(values))), *(max(1, size) for size in values.shape[1:]))
    group.create_dataset(name, data=values, chunks=chunks, maxshape=(None, *values.shape[1:]))


class MinariReader:
    """Reads what `MinariWriter` wrote."""

    def __init__(self, path: Path) -> None:
        _minari()
        from minari.dataset.minari_storage import MinariStorage

        self._storage = MinariStorage.read(path / "data")
        self.metadata: dict[str, Any] = json.loads(self._storage.metadata[KEY])

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        columns = columns_in(self.metadata)
        seen = observation_columns(columns)
        actions = [one for one in columns if list(one.key) in self.metadata["actions"]]
        others = _in_infos(columns, actions)
        by_key = {column.key: column for column in columns}
        for found in self._storage.get_episodes(which):
            arrays: Arrays = {name: found["infos"][name] for name in others}
            for one in seen:
                values = _member(found["observations"], one, seen)
                arrays[one.name] = values[:-1]
                arrays[f"next.{one.name}"] = values[1:]
            for one in actions:
                if one.scores:
                    continue  # scores are under `infos`
                arrays[one.name] = one.from_index(_member(found["actions"], one, actions))
            for key, name in ((("next", "reward"), "rewards"), *_FLAGS.items()):
                if key in by_key:
                    arrays[by_key[key].name] = by_key[key].from_index(found[name])
            yield arrays


def _all_observations(column: Column, episode: Arrays) -> Array:
    """Return the observations of all steps and the final one."""
    now, following = episode[column.name], episode[f"next.{column.name}"]
    if not _same_bits(now[1:], following[:-1]):
        raise UsageError(
            f"{show(('next', *column.key))} differs from {show(column.key)} of the following step, and Minari stores "
            f"only one of them; record in another format, or leave it out of keys="
        )
    return np.concatenate([now, following[-1:]])


def _same_bits(one: Array, other: Array) -> bool:
    words = f"V{one.itemsize}" if one.itemsize not in (1, 2, 4, 8) else f"u{one.itemsize}"
    return np.array_equal(one.view(words), other.view(words))  # NaN equals itself here, and -0.0 differs from 0.0


def _in_infos(columns: Sequence[Column], actions: Sequence[Column]) -> list[str]:
    """Return the names of all columns but observations, actions, reward and flags; scores of actions are included."""
    seen = {one.key for one in observation_columns(columns)}
    acts = {one.key for one in actions if not one.scores}
    known = {*seen, *(("next", *key) for key in seen), *acts, ("next", "reward"), *_FLAGS}
    return [one.name for one in columns if one.key not in known]


def _plain(values: dict[str, Array]) -> Any:
    """Return a single array itself, several arrays as the dictionary."""
    return next(iter(values.values())) if len(values) == 1 else values


def _member(values: Any, column: Column, beside: Sequence[Column]) -> Array:
    return np.asarray(values if len(beside) == 1 else values[column.name])


def _space(columns: Sequence[Column], spaces: Spaces) -> gym.Space[Any]:
    found = {one.name: _space_of(one, spaces.get(one.key)) for one in columns}
    return next(iter(found.values())) if len(found) == 1 else gym.spaces.Dict(found)


def _space_of(column: Column, known: gym.Space[Any] | None) -> gym.Space[Any]:
    if known is not None and (column.one_hot or column.scores):
        return known
    if isinstance(known, gym.spaces.Box) and known.low.size == np.prod(column.shape, dtype=int):
        if known.dtype == column.numpy and known.shape == column.shape:
            return known
        if column.numpy.kind == "f":  # the policy writes it in another dtype or shape than the env's
            low, high = (one.reshape(column.shape).astype(column.numpy) for one in (known.low, known.high))
            return gym.spaces.Box(low, high, column.shape, column.numpy.type)
    choice = (gym.spaces.Discrete, gym.spaces.MultiDiscrete)
    if isinstance(known, choice) and column.shape == known.shape and column.numpy.kind in "iu":
        return known
    kind = column.numpy
    if kind == np.bool_:
        return gym.spaces.MultiBinary(column.shape or 1)
    if np.issubdtype(kind, np.integer):
        return gym.spaces.Box(np.iinfo(kind).min, np.iinfo(kind).max, column.shape, kind.type)
    return gym.spaces.Box(-np.inf, np.inf, column.shape, kind.type)
