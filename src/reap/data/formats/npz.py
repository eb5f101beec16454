"""NumPy's `.npz`: one file with an array per episode and column, named like "000012/next.reward"."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reap.data.columns import Arrays, Column
from reap.data.formats.base import KEY, Spaces, columns_in


class NpzWriter:
    """Adds arrays to an uncompressed zip file, which is readable only after it is closed."""

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None:
        self._file = zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True)
        self._count = 0

    def add(self, episode: Arrays) -> None:
        for name, values in episode.items():
            self._put(f"{self._count:06}/{name}", values)
        self._count += 1

    def close(self, metadata: Mapping[str, Any]) -> None:
        self._put(KEY, np.array(json.dumps(metadata)))
        self._file.close()

    def _put(self, name: str, values: np.ndarray[Any, Any]) -> None:
        with self._file.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.ascontiguousarray(values).reshape(values.shape), allow_pickle=False)


class NpzReader:
    """Reads what `NpzWriter` wrote; `numpy.load` can read it, too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with np.load(path, allow_pickle=False) as file:
            self.metadata: dict[str, Any] = json.loads(str(file[KEY]))

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        names = [column.name for column in columns_in(self.metadata)]
        with np.load(self._path, allow_pickle=False) as file:
            for number in which:
                yield {name: file[f"{number:06}/{name}"] for name in names}
