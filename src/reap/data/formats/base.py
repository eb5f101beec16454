"""The interface of a format: a writer that takes episodes one by one, and a reader that returns them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from reap.data.columns import Array, Arrays, Column
from reap.spec import Key

KEY = "reap"  # the name under which each format stores our metadata
Spaces = Mapping[Key, gym.Space[Any]]


class DatasetWriter(Protocol):
    """Writes one dataset. `spaces` are the env's spaces by column, as far as they are known."""

    def __init__(self, path: Path, columns: Sequence[Column], spaces: Spaces) -> None: ...

    def add(self, episode: Arrays) -> None:
        """Write one episode, now or later: the caller gives up its arrays and does not change them."""

    def close(self, metadata: Mapping[str, Any]) -> None:
        """Write what is left, then the metadata: a dataset without metadata is incomplete."""


class DatasetReader(Protocol):
    """Reads one dataset."""

    def __init__(self, path: Path) -> None: ...

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was passed to `DatasetWriter.close`."""

    def episodes(self, which: Iterable[int]) -> Iterator[Arrays]:
        """Yield the episodes with these numbers."""


def flat_rows(values: Array) -> Array:
    """Return an array `[steps, …]` as a contiguous `[steps, n]`, complex numbers as pairs of floats."""
    values = np.ascontiguousarray(values).reshape(len(values), int(np.prod(values.shape[1:])))
    return values.view(values.real.dtype) if np.iscomplexobj(values) else values


def shaped(values: Array, column: Column) -> Array:
    """Return the array that `flat_rows` flattened."""
    return np.ascontiguousarray(values).reshape(-1).view(column.numpy).reshape(-1, *column.shape)


def bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and end row of each of several consecutive episodes."""
    ends = np.cumsum([0, *lengths]).tolist()
    return list(itertools.pairwise(ends))


def lengths_of(metadata: Mapping[str, Any]) -> list[int]:
    """Return the number of steps of each episode."""
    return [int(one) for one in metadata["lengths"]]


def columns_in(metadata: Mapping[str, Any]) -> list[Column]:
    """Return the columns of the dataset."""
    return [Column.of(one) for one in metadata["columns"]]
