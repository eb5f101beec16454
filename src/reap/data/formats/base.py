"""What a format is: a writer that takes episodes one by one, and a reader that gives them back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from reap.data.columns import Array, Arrays, Column
from reap.spec import Key

KEY = "reap"  # under which each format keeps our metadata
Spaces = Mapping[Key, gym.Space[Any]]


class DatasetWriter(Protocol):
    """Writes one dataset. `spaces` are those of the env, as far as they are known."""

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None: ...

    def add(self, episode: Arrays) -> None:
        """Write one episode, now or later: nobody else has its arrays, or changes what they show."""

    def close(self, metadata: Mapping[str, Any]) -> None:
        """Write what is left, then the metadata: a dataset without it was not written to its end."""


class DatasetReader(Protocol):
    """Reads one dataset."""

    def __init__(self, path: Path) -> None: ...

    @property
    def metadata(self) -> dict[str, Any]:
        """What `DatasetWriter.close` was given."""

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        """These episodes."""


def flat_rows(values: Array) -> Array:
    """An array `[steps, …]` as `[steps, n]`, in one piece of memory; complex numbers as pairs."""
    values = np.ascontiguousarray(values).reshape(len(values), int(np.prod(values.shape[1:])))
    return values.view(values.real.dtype) if np.iscomplexobj(values) else values


def shaped(values: Array, column: Column) -> Array:
    """The array that `flat_rows` was given."""
    return np.ascontiguousarray(values).reshape(-1).view(column.numpy).reshape(-1, *column.shape)


def bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where each of several episodes begins and ends that lie one behind another."""
    ends = np.cumsum([0, *lengths]).tolist()
    return list(itertools.pairwise(ends))


def lengths_of(metadata: Mapping[str, Any]) -> list[int]:
    """How many steps each episode has."""
    return [int(one) for one in metadata["lengths"]]


def columns_in(metadata: Mapping[str, Any]) -> list[Column]:
    """The columns of the dataset."""
    return [Column.of(one) for one in metadata["columns"]]
