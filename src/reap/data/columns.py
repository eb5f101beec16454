"""Columns of a dataset: the entries of every frame, as arrays that any format can store.

batch [N, T] ──► rows of plain arrays ──► sorted by trajectory ──► whole episodes, as they end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from reap.core.assemble import tree_of
from reap.core.slot import MASK, TRAJ_IDS
from reap.data.spaces import space_from, space_state
from reap.envs.spaces import Actions
from reap.errors import SpecMismatch, UsageError
from reap.spec import EnvSpec, Key, Leaf, as_array, as_key, numpy_dtype, own_entry, show
from reap.trajectories import FINAL, ended

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]  # the columns of one episode, each `[steps, …]`
Pieces = list[Arrays]  # one episode in the order of its steps, split as it came in several batches
FLAGS = ("done", "terminated", "truncated")
_COUNTERS = ("step_count", "policy_version")  # entries that collectors and counters add, recognized by name


@dataclass(frozen=True)
class Column:
    """One entry of every frame: its key in a batch, its shape and dtype, and its role for other libraries."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    one_hot: bool = False
    scores: bool = False  # an action of scores, of which the env received the index of the largest
    side: bool = False  # not an observation of the env: a counter, an info, recurrent state
    space: gym.Space[Any] | None = field(default=None, compare=False)  # the env's space, of observations and actions

    @property
    def name(self) -> str:
        """The key joined by dots: ("next", "observation") is "next.observation"."""
        return ".".join(self.key)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype with the same bytes."""
        return numpy_dtype(self.dtype)

    @property
    def is_observation(self) -> bool:
        """Whether this is an observation of the env: no flag, not under "collector" or "next", no `side` entry."""
        return not self.side and self.key[0] not in ("next", "collector") and self.key[-1] not in FLAGS

    def state(self) -> dict[str, Any]:
        """Return this column as JSON."""
        dtype = str(self.dtype).removeprefix("torch.")
        found = {"key": list(self.key), "shape": list(self.shape), "dtype": dtype, "one_hot": self.one_hot}
        return {**found, "scores": self.scores, "side": self.side, "space": space_state(self.space)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Column:
        """Return the column that `state` encoded."""
        key, shape, dtype = tuple(state["key"]), tuple(state["shape"]), getattr(torch, state["dtype"])
        more = (state.get("scores", False), state.get("side", False), space_from(state.get("space")))
        return cls(key, shape, dtype, state["one_hot"], *more)

    def as_index(self, values: Array) -> Array:
        """Return one-hot rows and scores as the index that the env received; other values unchanged."""
        if self.scores:
            assert self.space is not None
            return np.asarray(_decoder(self.space, self.shape, self.dtype)(values))
        return values.argmax(-1).astype(np.int64) if self.one_hot else values

    def from_index(self, values: Array) -> Array:
        """Return the rows from which `as_index` made these values."""
        if not self.one_hot:
            return values.astype(self.numpy, copy=False).reshape(len(values), *self.shape)
        chosen: Array = np.arange(self.shape[-1]) == np.asarray(values).reshape(-1, 1)
        return chosen.astype(self.numpy)


def observation_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the observation columns that also exist under "next"."""
    following = {column.key[1:] for column in columns if column.key[0] == "next"}
    return [column for column in columns if column.is_observation and column.key in following]


def columns_of(batch: TensorDictBase, keys: Sequence[Key] | None = None, spec: EnvSpec | None = None) -> list[Column]:
    """Return the columns of a batch `[…, T]`, of all entries or of `keys`. `spec` tells how actions are encoded."""
    found = []
    tensors = {as_key(key): value for key, value in batch.items(True, True) if isinstance(value, torch.Tensor)}
    wanted = [key for key in tensors if key != MASK] if keys is None else [*dict.fromkeys([*keys, TRAJ_IDS])]
    for key in map(as_key, batch.keys(True, True, is_leaf=is_leaf_nontensor)):
        if key not in tensors and key != FINAL and keys is None:
            raise UsageError(
                f"{show(key)} holds no tensors of one shape, and cannot be recorded; list what to record in keys="
            )
    for key in wanted:
        if key not in tensors:
            raise UsageError(
                f"keys contains {show(key)}, which the batch does not have; it has {[*map(show, tensors)]}"
            )
        shape = tuple(tensors[key].shape[batch.ndim :])
        if spec is not None and key in spec.action:
            found.append(_action_column(key, shape, tensors[key], spec.action[key]))
            continue
        side, leaf = _is_side(key, spec), None if spec is None else spec.observation.get(key)
        known = leaf.space if leaf is not None and not side and isinstance(leaf.space, gym.Space) else None
        found.append(Column(key, shape, tensors[key].dtype, side=side, space=known))
    if not observation_columns(found):  # an env whose only observations are side entries
        found = [replace(column, side=False) for column in found]
    names = [column.name for column in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"two keys of this batch are both {twice[0]!r} when their parts are joined by dots")
    return found


def _is_side(key: Key, spec: EnvSpec | None) -> bool:
    """Return whether an entry is not an observation of the env. An entry under "next" is judged by its root key."""
    own = key[1:] if key[0] == "next" else key
    if spec is None:
        return own[-1:] != () and own[-1] in _COUNTERS
    if own not in spec.observation or own in spec.side:
        return True
    return own[-1] in _COUNTERS and not isinstance(spec.observation[own].space, gym.Space)


def _action_column(key: Key, shape: tuple[int, ...], values: torch.Tensor, leaf: Leaf) -> Column:
    """Return the column of an action as the policy wrote it: as the env takes it, one-hot, or as scores."""
    space = leaf.space if isinstance(leaf.space, gym.Space) else None
    if space is None and leaf.one_hot and hasattr(leaf.space, "n"):  # a spec of TorchRL's
        space = gym.spaces.Discrete(int(leaf.space.n))  # type: ignore[union-attr]
    column = Column(key, shape, values.dtype, space=space)
    if not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        return column
    whole = not values.dtype.is_floating_point
    if whole and shape == space.shape and not np.any(space.start):
        return column
    if whole and isinstance(space, gym.spaces.Discrete) and shape == (int(space.n),) and not space.start:
        rows = values.reshape(-1, *shape)
        if bool(((rows == 0) | (rows == 1)).all() and (rows.sum(-1) == 1).all()):
            return replace(column, one_hot=True)
    try:
        _decoder(space, shape, values.dtype)
    except SpecMismatch:  # for instance for several agents
        return replace(column, space=None)
    return replace(column, scores=True)


def _decoder(space: gym.Space[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    """Return the function that maps rows of an action column to what the env receives."""
    return Actions(space, categorical=False).decoder({("action",): Leaf(shape, dtype, space)}, batch=True)


def as_tensordict(columns: Sequence[Column], arrays: Mapping[str, Array]) -> TensorDict:
    """Return the arrays of one episode as a TensorDict `[steps]`."""
    leaves = {}
    for column in columns:
        found = np.ascontiguousarray(arrays[column.name])
        values = torch.from_numpy(found if found.flags.writeable else found.copy())
        leaves[column.key] = values.view(column.dtype) if values.dtype != column.dtype else values
    steps = len(next(iter(arrays.values())))
    return TensorDict(tree_of(leaves), batch_size=[steps], names=["time"])


class EpisodeSplitter:
    """Splits batches into episodes.

    Pieces of unfinished episodes are held until they end, by trajectory id, which is unique among all workers.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._held: dict[int, Pieces] = {}

    def feed(self, batch: TensorDictBase) -> list[Pieces]:
        """Return the episodes that end in this batch `[…, T]`, in the order of their trajectory ids.

        Their arrays are copies: each value of the batch is copied once, whatever its memory layout.
        """
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise UsageError("a dataset is made of whole episodes: it needs track_traj_ids=True")
        mask = own_entry(batch, MASK)
        ids = ids.reshape(-1).cpu().numpy()
        made = ids >= 0 if mask is None else mask.reshape(-1).cpu().numpy() & (ids >= 0)
        ends, arrays, steps = _episode_ends(batch), self._arrays(batch), batch.batch_size[-1]
        order = np.argsort(ids, kind="stable")
        order = order[made[order]]
        sorted_ids = ids[order]
        begins = np.flatnonzero(np.r_[True, sorted_ids[1:] != sorted_ids[:-1]]) if len(order) else order
        found = []
        for begin, end in zip(begins, np.r_[begins[1:], len(order)]):
            number = int(sorted_ids[begin])
            self._held.setdefault(number, []).append(_piece(arrays, order[begin:end], steps))
            if ends[order[end - 1]]:
                found.append(self._held.pop(number))
        return found

    def take_unfinished(self) -> list[Pieces]:
        """Return the episodes that have not ended, and stop holding them."""
        pieces, self._held = [*self._held.values()], {}
        return pieces

    def _arrays(self, batch: TensorDictBase) -> Arrays:
        """Return every column as `[lanes, T, …]`, as views of the batch where its layout allows it."""
        arrays = {}
        for column in self._columns:
            values = batch.get(column.key, None)
            if values is None or (tuple(values.shape[batch.ndim :]), values.dtype) != (column.shape, column.dtype):
                now = "not there" if values is None else f"{values.dtype}{list(values.shape[batch.ndim :])}"
                raise SpecMismatch(f"{show(column.key)} is {now}; it was {column.dtype}{list(column.shape)} before")
            lanes = batch.batch_size[:-1].numel()
            rows = values.reshape(lanes, batch.batch_size[-1], *column.shape)
            arrays[column.name] = as_array(rows)
        return arrays


def _episode_ends(batch: TensorDictBase) -> Array:
    """Return which frames end an episode, flattened lane by lane."""
    flags = [key for key in batch.keys(True, True) if as_key(key)[0] == "next" and as_key(key)[-1] == "done"]
    ends: Array = ended(batch.select(*flags).reshape(-1)).numpy()  # only the flags, since reshaping copies
    return ends


def _piece(arrays: Arrays, rows: Array, steps: int) -> Arrays:
    """Return a copy of these rows, numbered through `[lanes, steps]`. Those of one lane are mostly contiguous."""
    lane, first = divmod(int(rows[0]), steps)
    end = first + len(rows)
    if end <= steps and rows[-1] - rows[0] == len(rows) - 1:
        return {name: values[lane, first:end].copy() for name, values in arrays.items()}
    return {name: values[rows // steps, rows % steps] for name, values in arrays.items()}


def joined(pieces: Sequence[Arrays]) -> Arrays:
    """Return pieces of one episode, or several episodes, concatenated in their order."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
