"""LeRobot's layout, version 2.1: a Parquet file per episode, and a description of the files under `meta/`.

data/chunk-000/episode_000000.parquet     observation.state, action, timestamp, frame_index, next.reward, next.done …
meta/info.json  episodes.jsonl  tasks.jsonl  episodes_stats.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reap.data.columns import Array, Arrays, Column, observation_columns
from reap.data.formats.base import KEY, Spaces, columns_in
from reap.data.formats.parquet import MANY, PLAIN, arrays_of, pyarrow, table_of

_CHUNK = 1000  # episodes per directory
_LOOKED_AT = 100_000  # values of an episode's column that its statistics are computed from
_PLACE = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_NUMBERS = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")


class LeRobotWriter:
    """Writes a file per episode. `fps` in the metadata is the frame rate; 1 by default."""

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None:
        pyarrow()
        self._path, self._columns = path, named(columns)
        (path / "meta").mkdir(parents=True)
        self._count = self._frames = 0
        self._episodes: list[str] = []
        self._stats: list[str] = []

    def add(self, episode: Arrays) -> None:
        steps = len(next(iter(episode.values())))
        frames = np.arange(steps)
        numbers: dict[str, Array] = {
            "timestamp": frames.astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(steps, self._count),
            "index": frames + self._frames,
            "task_index": np.zeros(steps, np.int64),
        }
        place = self._path / _place(self._count)
        place.parent.mkdir(parents=True, exist_ok=True)
        arrays = {new.name: episode[old.name] for old, new in self._columns}
        table = table_of([new for _, new in self._columns], arrays, numbers)
        pyarrow().parquet.write_table(table, place, **PLAIN)
        self._episodes.append(json.dumps({"episode_index": self._count, "tasks": ["play"], "length": steps}))
        stats = {new.name: _stats_of(episode[old.name]) for old, new in self._columns if new.numpy.kind in "fiu"}
        self._stats.append(json.dumps({"episode_index": self._count, "stats": stats}))
        self._count += 1
        self._frames += steps

    def close(self, metadata: Mapping[str, Any]) -> None:
        meta = self._path / "meta"
        (meta / "episodes.jsonl").write_text("".join(f"{line}\n" for line in self._episodes))
        (meta / "episodes_stats.jsonl").write_text("".join(f"{line}\n" for line in self._stats))
        (meta / "tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "play"}) + "\n")
        features = {
            new.name: {"dtype": str(new.numpy), "shape": list(new.shape or (1,)), "names": None}
            for _, new in self._columns
        }
        numbers = {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in _NUMBERS.items()}
        info = {
            "codebase_version": "v2.1",
            "robot_type": metadata.get("env"),
            "total_episodes": self._count,
            "total_frames": self._frames,
            "total_tasks": 1,
            "total_videos": 0,
            "total_chunks": -(-self._count // _CHUNK),
            "chunks_size": _CHUNK,
            "fps": metadata.get("fps", 1),
            "splits": {"train": f"0:{self._count}"},
            "data_path": _PLACE,
            "video_path": None,
            "features": {**features, **numbers},
            KEY: dict(metadata),
        }
        (meta / "info.json").write_text(json.dumps(info, indent=1))  # last: without this file there is no dataset


class LeRobotReader:
    """Reads what `LeRobotWriter` wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.metadata: dict[str, Any] = json.loads((path / "meta" / "info.json").read_text())[KEY]

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        columns = named(columns_in(self.metadata))
        for number in which:
            table = pyarrow().parquet.read_table(self._path / _place(number))
            arrays = arrays_of([new for _, new in columns], table)
            yield {old.name: arrays[new.name] for old, new in columns}


def named(columns: Sequence[Column]) -> list[tuple[Column, Column]]:
    """Pair each column with its LeRobot column: the key "observation" is called "observation.state" there."""
    seen = {one.key for one in observation_columns(columns)}
    found = []
    for one in columns:
        root, key = (one.key[:1], one.key[1:]) if one.key[0] == "next" else ((), one.key)
        if key == ("observation",) and key in seen:
            key = ("observation", "state")
        elif key in seen and key[0] != "observation":
            key = ("observation", *key)
        found.append((one, Column((*root, *key), one.shape, one.dtype)))
    return found


def _place(number: int) -> str:
    return _PLACE.format(episode_chunk=number // _CHUNK, episode_index=number)


def _stats_of(values: Array) -> dict[str, Any]:
    many = values[0].size > MANY  # for images: statistics per channel, from some of the pixels
    rows = values.reshape(-1, values.shape[-1]) if many else values.reshape(len(values), -1)
    looked = np.ascontiguousarray(rows[:: -(-rows.size // _LOOKED_AT)].T, np.float64)  # NumPy is slow on narrow rows
    found = {name: getattr(looked, name)(1).tolist() for name in ("min", "max", "mean", "std")}
    return {**found, "count": [len(values)]}
