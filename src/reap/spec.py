"""Specs: the shapes and dtypes of one lane's values, addressed by nested keys.

Leaf      one column: shape, dtype, and the Gymnasium space it came from
            ragged: a dimension is -1, and every value has its own size      non-tensor: no dtype, any Python object
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
LANE_AT: Key = ("_ready",)  # which lane a position holds, where lanes answer as they are ready

# bfloat16 has no NumPy type: its bits are stored as int16, and only torch reads them.
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
    """Return the NumPy type that holds the same bytes; for values that are not tensors (None), that of references."""
    return np.dtype(object if dtype is None else _NUMPY[dtype])


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch type for a NumPy one; raise a UsageError for strings and objects."""
    try:
        return _TORCH[np.dtype(dtype)]
    except KeyError:
        raise UsageError(f"dtype {dtype} has no tensor form") from None


def as_tensor(array: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor of this dtype on the memory of an array, which on a device is a tensor already."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return tensor.view(torch.bfloat16) if dtype is torch.bfloat16 else tensor


def as_array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as a NumPy array, on the same memory if that is possible; bfloat16 as int16."""
    value = value.detach()
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy(force=True)


def as_key(key: AnyKey) -> Key:
    """Return a key as a tuple: "a" → ("a",)."""
    return (key,) if isinstance(key, str) else tuple(key)


def private(key: Key) -> bool:
    """Return whether a key is left out of batches: one of its parts begins with an underscore."""
    return any(part.startswith("_") for part in key)


def show(key: Key) -> str:
    """Return a key as users write it."""
    return repr(key[0]) if len(key) == 1 else repr(key)


def show_keys(keys: Iterable[Key]) -> str:
    """Return keys as users write them, in a list."""
    return "[" + ", ".join(show(k) for k in keys) + "]"


def in_every_row(row: np.ndarray[Any, Any], steps: int) -> np.ndarray[Any, Any]:
    """Return one row `[1, …]` as a column of `steps` equal rows that share its memory."""
    return np.lib.stride_tricks.as_strided(row, (steps, *row.shape[1:]), (0, *row.strides[1:]))


@dataclass(frozen=True)
class Leaf:
    """One column of the data, as one lane sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: any Python object
    space: gym.Space[Any] | None = None
    one_hot: bool = False
    once: bool = False  # the slot stores only the latest value: the policy sees it, batches do not have it

    def __str__(self) -> str:
        if self.dtype is None:
            return "object"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @property
    def ragged(self) -> bool:
        """Whether the values are tensors that each have their own shape."""
        return -1 in self.shape

    @property
    def loose(self) -> bool:
        """Whether the leaf is ragged or not a tensor: its column holds references, one per frame, in place of bytes."""
        return self.dtype is None or -1 in self.shape

    def column(self, *size: int) -> np.ndarray[Any, Any]:
        """Return an array `[*size, …]` for values of this leaf."""
        if self.loose:
            return np.full(size, None, object)
        return np.zeros((*size, *self.shape), numpy_dtype(self.dtype))

    def copied(self, column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a copy of a column `[T, …]`; if the leaf stores only the latest value, a copy of that one row."""
        return in_every_row(column[:1].copy(), len(column)) if self.once else column.copy()

    def blank(self) -> Any:
        """Return the filler for missing values: zeros; for a loose leaf an empty tensor, an empty text or None."""
        if self.dtype is None:
            return "" if isinstance(self.space, gym.spaces.Text) else None
        return torch.zeros([max(n, 0) for n in self.shape], dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of one value in bytes, if the leaf is not loose."""
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize

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
        """Return random values of shape `[*size, *shape]` from torch's generator, encoded like this leaf."""
        # A leaf of several agents holds several values of its space: their number follows from its shape.
        count = int(np.prod(size, dtype=np.int64)) * int(np.prod(self.shape, dtype=np.int64)) // _width(self)
        return _random(self, count).reshape(*size, *self.shape).to(self.dtype)


@dataclass(frozen=True)
class BatchShape:
    """How a batch differs from the usual shape."""

    dims: tuple[int, ...] | None = None  # dimensions of the lanes, where they are not a single one
    hidden: frozenset[Key] = frozenset()  # columns that are not delivered
    inner: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)  # additional batch dimensions of branches
    contiguous: bool = False  # copy batches to put lanes first in memory; else they are views of time-major memory


USUAL = BatchShape()


@dataclass(frozen=True)
class EnvSpec:
    """The leaves an env reports, and the ones it takes.

    `batched` says whether batches have a lane dimension. `rows` says whether every step of every lane is a frame
    ("whole"). If not, the env marks steps that are none; these stay in place ("masked"), or are taken out, so that the
    lane's later rows move up ("skipping"). `ready_of` is for envs whose lanes answer as they are ready: the number of
    all lanes, of which `lanes` answer at a time; the leaf `LANE_AT` says which ones (see core/lanes/ready.py).
    """

    observation: Mapping[Key, Leaf]
    action: Mapping[Key, Leaf]
    lanes: int = 1
    batched: bool = False
    reward: Mapping[Key, Leaf] = field(default_factory=lambda: {("reward",): Leaf((1,), torch.float32)})
    rows: Literal["whole", "masked", "skipping"] = "whole"
    single_steps: bool = True  # a lane can be stepped without the others
    single_resets: bool = True  # a lane can be reset in the middle of its episode, without the others
    side: frozenset[Key] = frozenset()  # leaves beside the observation proper: counters, infos, recurrent state
    ready_of: int | None = None
    look: BatchShape = USUAL
    primed: frozenset[Key] = frozenset()  # leaves whose next value a policy may write; the env reports the first

    @property
    def size(self) -> tuple[int, ...]:
        """The dimensions before those of a leaf, as a policy sees them."""
        return (self.look.dims or (self.lanes,)) if self.batched else ()

    @property
    def all_lanes(self) -> int:
        """The number of all lanes, whether they answer together or as they are ready."""
        return self.ready_of or self.lanes


def own_entry(batch: Any, key: Key) -> Any:
    """Return a batch's entry about itself, such as "mask"; None if it is missing, or an observation of that name."""
    value = batch.get(key, None)
    return value if value is None or batch.get(("next", *key), None) is None else None


def _width(leaf: Leaf) -> int:
    """Return how many numbers one value of the leaf's space has, as it is encoded."""
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
    if callable(getattr(space, "rand", None)):  # a TorchRL spec
        return space.rand((count,))  # type: ignore[union-attr, no-any-return]
    raise UsageError(f"no random values for space {space}")


def _random_box(space: gym.spaces.Box, count: int) -> torch.Tensor:
    """Draw as Gymnasium does: uniform between two bounds, exponential beyond one, normal without any."""
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
