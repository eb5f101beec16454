"""Columns of a dataset: what every frame holds, as arrays that any format can store.

batch [N, T] ──► rows of plain arrays ──► sorted by trajectory ──► whole episodes, as they end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from reap.core.assemble import tree_of
from reap.core.slot import MASK, TRAJ_IDS
from reap.errors import SpecMismatch, UsageError
from reap.spec import EnvSpec, Key, as_key, numpy_dtype, own_entry, show
from reap.trajectories import FINAL, ended

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]  # the columns of one episode, each `[steps, …]`
Pieces = list[Arrays]  # one episode in the order of its steps, as it came in several batches
FLAGS = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class Column:
    """One entry of every frame: its key in a batch, its shape and dtype, and whether it is a one-hot choice."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    one_hot: bool = False

    @property
    def name(self) -> str:
        """The key as one word: ("next", "observation") is "next.observation"."""
        return ".".join(self.key)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type with the same bytes."""
        return numpy_dtype(self.dtype)

    @property
    def is_observation(self) -> bool:
        """Whether this is what the env shows: neither a flag, nor of the collector, nor what a step leads to."""
        return self.key[0] not in ("next", "collector") and self.key[-1] not in FLAGS

    def state(self) -> dict[str, Any]:
        """This column in JSON."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"key": list(self.key), "shape": list(self.shape), "dtype": dtype, "one_hot": self.one_hot}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Column:
        """The column that `state` returned."""
        return cls(tuple(state["key"]), tuple(state["shape"]), getattr(torch, state["dtype"]), state["one_hot"])

    def as_index(self, values: Array) -> Array:
        """One-hot rows as the number of the choice, as other libraries store discrete actions; others as they are."""
        return values.argmax(-1).astype(np.int64) if self.one_hot else values

    def from_index(self, values: Array) -> Array:
        """The rows that `as_index` was given."""
        if not self.one_hot:
            return values.astype(self.numpy, copy=False).reshape(len(values), *self.shape)
        chosen: Array = np.arange(self.shape[-1]) == np.asarray(values).reshape(-1, 1)
        return chosen.astype(self.numpy)


def observation_columns(columns: Sequence[Column]) -> list[Column]:
    """The columns that a step leads to the next value of."""
    following = {column.key[1:] for column in columns if column.key[0] == "next"}
    return [column for column in columns if column.is_observation and column.key in following]


def columns_of(batch: TensorDictBase, keys: Sequence[Key] | None = None, spec: EnvSpec | None = None) -> list[Column]:
    """The columns of a batch `[…, T]`: of all its entries, or of these; `spec` knows which actions are one-hot."""
    found = []
    tensors = {as_key(key): value for key, value in batch.items(True, True) if isinstance(value, torch.Tensor)}
    wanted = [key for key in tensors if key != MASK] if keys is None else [*dict.fromkeys([*keys, TRAJ_IDS])]
    for key in map(as_key, batch.keys(True, True, is_leaf=is_leaf_nontensor)):
        if key not in tensors and key != FINAL and keys is None:
            raise UsageError(
                f"{show(key)} holds no tensors of one shape, and cannot be recorded; name what to record by keys="
            )
    for key in wanted:
        if key not in tensors:
            raise UsageError(f"keys names {show(key)}, which this batch has not; it has {[*map(show, tensors)]}")
        value = tensors[key]
        leaf = None if spec is None else spec.action.get(key)
        shape = tuple(value.shape[batch.ndim :])
        simple = leaf is not None and leaf.one_hot and len(shape) == 1 and hasattr(leaf.space, "n")
        found.append(Column(key, shape, value.dtype, simple))
    names = [column.name for column in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"two keys of this batch are both {twice[0]!r} when their parts are joined by dots")
    return found


def as_tensordict(columns: Sequence[Column], arrays: Mapping[str, Array]) -> TensorDict:
    """One episode `[steps]` as a batch."""
    leaves = {}
    for column in columns:
        found = np.ascontiguousarray(arrays[column.name])
        values = torch.from_numpy(found if found.flags.writeable else found.copy())
        leaves[column.key] = values.view(column.dtype) if values.dtype != column.dtype else values
    steps = len(next(iter(arrays.values())))
    return TensorDict(tree_of(leaves), batch_size=[steps], names=["time"])


class EpisodeSplitter:
    """Takes batches, returns the episodes that end in them.

    Pieces of open episodes are held by their trajectory ids, which no two workers share, until they end.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._held: dict[int, Pieces] = {}

    def feed(self, batch: TensorDictBase) -> list[Pieces]:
        """The episodes that end in this batch `[…, T]`, in the order of their trajectory ids.

        They are in memory of their own: each value of the batch is copied once, whatever its layout.
        """
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise UsageError("a dataset is made of whole episodes: it needs track_traj_ids=True")
        mask = own_entry(batch, MASK)
        ids = ids.reshape(-1).cpu().numpy()
        made = ids >= 0 if mask is None else mask.reshape(-1).cpu().numpy() & (ids >= 0)
        over, arrays, steps = _over(batch), self._arrays(batch), batch.batch_size[-1]
        order = np.argsort(ids, kind="stable")
        order = order[made[order]]
        sorted_ids = ids[order]
        begins = np.flatnonzero(np.r_[True, sorted_ids[1:] != sorted_ids[:-1]]) if len(order) else order
        found = []
        for begin, end in zip(begins, np.r_[begins[1:], len(order)]):
            number = int(sorted_ids[begin])
            self._held.setdefault(number, []).append(_piece(arrays, order[begin:end], steps))
            if over[order[end - 1]]:
                found.append(self._held.pop(number))
        return found

    def unfinished(self) -> list[Pieces]:
        """The episodes that have not ended, and from now on are not held any more."""
        pieces, self._held = [*self._held.values()], {}
        return pieces

    def _arrays(self, batch: TensorDictBase) -> Arrays:
        """Every column as `[lanes, T, …]`: views of the batch where its layout allows it."""
        arrays = {}
        for column in self._columns:
            values = batch.get(column.key, None)
            if values is None or (tuple(values.shape[batch.ndim :]), values.dtype) != (column.shape, column.dtype):
                now = "not there" if values is None else f"{values.dtype}{list(values.shape[batch.ndim :])}"
                raise SpecMismatch(f"{show(column.key)} is {now}; it was {column.dtype}{list(column.shape)} before")
            lanes = batch.batch_size[:-1].numel()
            rows = values.detach().cpu().reshape(lanes, batch.batch_size[-1], *column.shape)
            arrays[column.name] = (rows.view(torch.int16) if rows.dtype is torch.bfloat16 else rows).numpy()
        return arrays


def _over(batch: TensorDictBase) -> Array:
    """Which frames end an episode, lane by lane."""
    flags = [key for key in batch.keys(True, True) if as_key(key)[0] == "next" and as_key(key)[-1] == "done"]
    over: Array = ended(batch.select(*flags).reshape(-1)).numpy()  # without the rest, which reshaping would copy
    return over


def _piece(arrays: Arrays, rows: Array, steps: int) -> Arrays:
    """A copy of these rows, counted through lanes `[lanes, steps]`; those of one lane mostly lie side by side."""
    lane, first = divmod(int(rows[0]), steps)
    end = first + len(rows)
    if end <= steps and rows[-1] - rows[0] == len(rows) - 1:
        return {name: values[lane, first:end].copy() for name, values in arrays.items()}
    return {name: values[rows // steps, rows % steps] for name, values in arrays.items()}


def joined(pieces: Sequence[Arrays]) -> Arrays:
    """Pieces of one episode, or several episodes, in their order, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
