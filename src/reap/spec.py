"""Specs: what one lane's values look like, addressed by nested keys.

Leaf      one column: shape, dtype, and the Gymnasium space it came from
            ragged: a dimension is -1, every value has its own      non-tensor: no dtype, any Python object
EnvSpec   the leaves an env reports and the leaves it takes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch

from reap.errors import UsageError

Key = tuple[str, ...]
AnyKey = str | tuple[str, ...]
LANE_AT: Key = ("_ready",)  # which lane a position holds, where lanes come as they are ready

# bfloat16 has no NumPy type: its bits travel as int16, and only torch ever reads them.
_NUMPY = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.int16,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
_TORCH = {np.dtype(n): t for t, n in _NUMPY.items() if t is not torch.bfloat16}
TENSOR_DTYPES = frozenset(_TORCH)


def numpy_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the NumPy type that holds the same bytes; for values that are no tensors, references."""
    return np.dtype(object if dtype is None else _NUMPY[dtype])


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch type for a NumPy one; a UsageError for strings and objects."""
    try:
        return _TORCH[np.dtype(dtype)]
    except KeyError:
        raise UsageError(f"dtype {dtype} has no tensor form") from None


def as_key(key: AnyKey) -> Key:
    """Return a key as a tuple: "a" → ("a",)."""
    return (key,) if isinstance(key, str) else tuple(key)


def private(key: Key) -> bool:
    """Return whether a key is not delivered: one of its parts begins with an underscore."""
    return any(part.startswith("_") for part in key)


def show(key: Key) -> str:
    """Return a key as users write it."""
    return repr(key[0]) if len(key) == 1 else repr(key)


def show_keys(keys: Iterable[Key]) -> str:
    """Keys as users write them, in a list."""
    return "[" + ", ".join(show(k) for k in keys) + "]"


def in_every_row(row: np.ndarray[Any, Any], steps: int) -> np.ndarray[Any, Any]:
    """One row `[1, …]` as a column of so many, all of them the same memory."""
    return np.lib.stride_tricks.as_strided(row, (steps, *row.shape[1:]), (0, *row.strides[1:]))


@dataclass(frozen=True)
class Leaf:
    """One column of the data, as one lane sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: not tensors
    space: gym.Space[Any] | None = None
    one_hot: bool = False
    once: bool = False  # a slot has room for the latest value only: for the policy to see, not to be delivered

    def __str__(self) -> str:
        if self.dtype is None:
            return "object"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @property
    def ragged(self) -> bool:
        """Tensors, each of its own shape."""
        return -1 in self.shape

    @property
    def loose(self) -> bool:
        """Ragged or no tensor at all: its column holds references, one per frame, in place of bytes."""
        return self.dtype is None or -1 in self.shape

    def column(self, *size: int) -> np.ndarray[Any, Any]:
        """Return an array `[*size, …]` for values of this leaf."""
        if self.loose:
            return np.full(size, None, object)
        return np.zeros((*size, *self.shape), numpy_dtype(self.dtype))

    def copied(self, column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a copy of a column `[T, …]`; where it is kept once, of its one row."""
        return in_every_row(column[:1].copy(), len(column)) if self.once else column.copy()

    def blank(self) -> Any:
        """Return what stands where no value is: zeros, for a loose leaf an empty tensor, an empty text or None."""
        if self.dtype is None:
            return "" if isinstance(self.space, gym.spaces.Text) else None
        return torch.zeros([max(n, 0) for n in self.shape], dtype=self.dtype)

    @property
    def n(self) -> int:
        """How many choices a discrete leaf has."""
        if not isinstance(self.space, gym.spaces.Discrete):
            raise UsageError(f"n is the size of a discrete space; this leaf is {self.space}")
        return int(self.space.n)

    @property
    def low(self) -> torch.Tensor:
        """The lower bound of a Box leaf."""
        return torch.as_tensor(self._box().low)

    @property
    def high(self) -> torch.Tensor:
        """The upper bound of a Box leaf."""
        return torch.as_tensor(self._box().high)

    def _box(self) -> gym.spaces.Box:
        if not isinstance(self.space, gym.spaces.Box):
            raise UsageError(f"low and high are the bounds of a Box; this leaf is {self.space}")
        return self.space

    def rand(self, size: tuple[int, ...] = ()) -> torch.Tensor:
        """Random values of shape `[*size, *shape]` from torch's generator, encoded as this leaf is."""
        # A leaf of several agents holds several values of its space: as many as its shape says.
        count = int(np.prod(size, dtype=np.int64)) * int(np.prod(self.shape, dtype=np.int64)) // _width(self)
        return _random(self, count).reshape(*size, *self.shape).to(self.dtype)


@dataclass(frozen=True)
class BatchShape:
    """How a batch looks where it does not look the usual way."""

    dims: tuple[int, ...] | None = None  # of the lanes, where they are not one dimension
    hidden: frozenset[Key] = frozenset()  # columns that are not delivered
    inner: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)  # batch dimensions a branch has of its own
    contiguous: bool = False  # lanes first in memory too, by a copy; else a view of memory in which time is first


USUAL = BatchShape()


@dataclass(frozen=True)
class EnvSpec:
    """The leaves an env reports, and the ones it takes.

    `batched` says whether a lane dimension is delivered. `rows` says whether every step of every lane is a frame
    ("whole"), or the env marks those that are not, which stay where they are ("masked") or are taken out, the lane's
    later rows moving up ("skipping"). `ready_of` is for envs that answer as they are ready: of so many lanes, `lanes`
    at a time, and the leaf `LANE_AT` says which they are (see core/lanes/ready.py).
    """

    observation: Mapping[Key, Leaf]
    action: Mapping[Key, Leaf]
    lanes: int = 1
    batched: bool = False
    reward: Mapping[Key, Leaf] = field(default_factory=lambda: {("reward",): Leaf((1,), torch.float32)})
    rows: Literal["whole", "masked", "skipping"] = "whole"
    single_steps: bool = True  # lanes can be stepped without the others
    single_resets: bool = True  # a lane can be reset in the middle of its episode, without the others
    side: frozenset[Key] = frozenset()  # leaves beside the observation proper: counters, infos, memory
    ready_of: int | None = None
    look: BatchShape = USUAL
    primed: frozenset[Key] = frozenset()  # leaves a policy may write the next value of: the env says how they begin

    @property
    def size(self) -> tuple[int, ...]:
        """The dimensions a policy sees before those of a leaf."""
        return (self.look.dims or (self.lanes,)) if self.batched else ()

    @property
    def all_lanes(self) -> int:
        """How many lanes there are, whether they answer all together or as they are ready."""
        return self.ready_of or self.lanes


def own_entry(batch: Any, key: Key) -> Any:
    """Return what a batch has under a name like "mask" to say about itself; None where that is an observation."""
    value = batch.get(key, None)
    return value if value is None or batch.get(("next", *key), None) is None else None


def _width(leaf: Leaf) -> int:
    """Return how many numbers one value of the leaf's space takes, as it is encoded."""
    space = leaf.space
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n) if leaf.one_hot else 1
    if isinstance(space, gym.spaces.MultiDiscrete):
        return int(space.nvec.sum()) if leaf.one_hot else int(space.nvec.size)
    return max(int(np.prod(space.shape if space is not None and space.shape else (1,))), 1)


def _random(leaf: Leaf, count: int) -> torch.Tensor:
    space = leaf.space
    if isinstance(space, gym.spaces.Discrete):
        index = torch.randint(int(space.n), (count,))
        return torch.nn.functional.one_hot(index, int(space.n)) if leaf.one_hot else index
    if isinstance(space, gym.spaces.MultiDiscrete):
        nvec = torch.as_tensor(space.nvec.reshape(-1).astype(np.int64))
        index = (torch.rand(count, len(nvec), dtype=torch.float64) * nvec).long()
        if not leaf.one_hot:
            return index
        if bool((nvec == nvec[0]).all()):
            return torch.nn.functional.one_hot(index, int(nvec[0]))
        return torch.cat([torch.nn.functional.one_hot(index[:, i], int(n)) for i, n in enumerate(nvec)], -1)
    if isinstance(space, gym.spaces.MultiBinary):
        return torch.randint(2, (count, *space.shape))
    if isinstance(space, gym.spaces.Box):
        return _random_box(space, count)
    if callable(getattr(space, "rand", None)):  # a spec of TorchRL's
        return space.rand((count,))  # type: ignore[union-attr, no-any-return]
    raise UsageError(f"no random values for space {space}")


def _random_box(space: gym.spaces.Box, count: int) -> torch.Tensor:
    """Uniform between two bounds, exponential beyond one, normal without any: as Gymnasium draws them."""
    low = torch.as_tensor(space.low.astype(np.float64))
    high = torch.as_tensor(space.high.astype(np.float64))
    whole = not np.issubdtype(space.dtype, np.floating)
    top = high + 1 if whole else high
    below, above = torch.as_tensor(space.bounded_below), torch.as_tensor(space.bounded_above)
    uniform = torch.rand(count, *space.shape, dtype=torch.float64)
    if bool((below & above).all()):
        values = low + uniform * (top - low)
    else:
        tail = -torch.log1p(-uniform)
        values = torch.randn(count, *space.shape, dtype=torch.float64)
        values = torch.where(below & above, low + uniform * (top - low), values)
        values = torch.where(below & ~above, low + tail, values)
        values = torch.where(above & ~below, high - tail, values)
    return torch.minimum(values.floor() if whole else values, high)
