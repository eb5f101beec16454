"""Samplers: which rows make the next sample. They draw positions, never rows: see ring.py.

RandomSampler                every row alike
SamplerWithoutReplacement    every row once, then again
PrioritizedSampler           in proportion to priority ** alpha
SliceSampler                 runs of rows, none over the end of an episode, a writer, the ring or a crash
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from reap.buffers.arguments import LARGEST, flag, number, whole
from reap.buffers.arguments import key as key_of
from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.episode_index import Cuts
from reap.buffers.storage.ring import HOLE
from reap.buffers.tree import SumTree
from reap.errors import CorruptState, NoSpace, SpecMismatch, Starved, UsageError, WrongArgument, WrongState
from reap.spec import AnyKey, Key, Leaf, show

Array = np.ndarray[Any, Any]
Info = dict[Any, torch.Tensor]
_TRIES = 16
_own = threading.local()


class Sampler:
    """Draws `count` positions of committed rows."""

    alone = False  # whether writers must wait while it draws and reads: for samplers that cannot draw again
    ran_out = False
    cuts = Cuts()  # what it needs runs to be cut by
    says: tuple[Key, ...] = ()  # names of what it tells about each row of a sample

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        """Positions, which this thread's next draw may write over, and what is to be known about them."""
        raise NotImplementedError

    def check_columns(self, columns: Mapping[Key, Leaf]) -> None:
        """Raise if samples of rows with these columns have no room for what is told about them."""
        refuse_taken(columns, [("index",), *self.says], "a sample says about itself")

    def update_priority(self, memory: BufferFiles, index: Array, priority: Array) -> None:
        """Only some samplers have priorities."""

    def empty(self) -> None:
        """Forget what is known about rows."""
        self.ran_out = False

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on from here."""
        return {}

    def check_state(self, state: Mapping[str, Any], head: int) -> None:
        """Raise `CorruptState` if `load_state_dict` could not go on from there. `head`: all positions are below it."""

    def grown(self, state: Mapping[str, Any], old: int, new: int, first: int) -> Mapping[str, Any]:
        """Its state in a buffer of `old` rows, for one of `new` rows in which position `first` is row 0."""
        return state

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        """Go on from there, with positions that have moved on by `shift`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def nothing() -> Starved:
    """The error for a buffer without rows."""
    return Starved("cannot sample: the buffer is empty; extend it first")


def refuse_taken(columns: Iterable[Key], names: Iterable[Key], who: str) -> None:
    """Raise if a column has one of these names, or lies in it, or it would lie in a column."""
    for name in names:
        for key in columns:
            if key[: len(name)] == name or name[: len(key)] == key:
                raise SpecMismatch(f"the column {show(key)} has the name of what {who}, {show(name)}; rename it")


def _require(right: bool, name: str, value: Any) -> None:
    """Raise `CorruptState` unless an entry of a sampler's state is `right`."""
    if not right:
        raise CorruptState(f"the sampler's {name!r} is not what a sampler like this one has: {value!r:.80}")


class RandomSampler(Sampler):
    """Every row alike, with replacement.

    >>> ReplayBuffer(storage=LazyTensorStorage(10_000), sampler=RandomSampler(), batch_size=256)
    """

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        ring = memory.ring
        low, high = ring.window()
        if low == high:
            raise nothing()
        positions = _between(low, high, count, generator)
        if not ring.holes(low):
            return positions, {}
        for _ in range(_TRIES):
            bad = np.flatnonzero(ring.marks[positions % ring.capacity] == HOLE)
            if not len(bad):
                return positions, {}
            positions[bad] = _integers(high - low, len(bad), generator) + low
        live = _live(memory, low, high)
        return live[_integers(len(live), count, generator)], {}


class SamplerWithoutReplacement(Sampler):
    """Every row once, in random order, then all over again; iterating over the buffer ends with the round.

    Rows that arrive during a round are drawn from the next one on, those that are overwritten are left out.

    Args:
        drop_last: leave out what is left of a round when it is less than a batch.
        shuffle: False for the order in which rows were written.
    """

    alone = True

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last, self.shuffle = flag(drop_last, "drop_last"), flag(shuffle, "shuffle")
        self._left = np.zeros(0, np.int64)

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        low, high = memory.ring.window()
        left = self._left[self._left >= low]
        if len(left) < (count if self.drop_last else 1):
            left = _live(memory, low, high)
            if self.shuffle:
                left = left[torch.randperm(len(left), generator=generator).numpy()]
            if self.drop_last and len(left) < count:
                raise WrongState(f"{len(left)} rows do not make a batch of {count}, and drop_last=True")
        self._left = left[count:]
        self.ran_out = len(self._left) < (count if self.drop_last else 1)
        return left[:count], {}

    def empty(self) -> None:
        super().empty()
        self._left = np.zeros(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"left": torch.from_numpy(self._left.copy()), "ran_out": self.ran_out}

    def check_state(self, state: Mapping[str, Any], head: int) -> None:
        left = state["left"]
        _require(isinstance(left, torch.Tensor) and left.dtype is torch.int64 and left.ndim == 1, "left", left)
        _require(bool(((left >= 0) & (left < head)).all()), "left", left)
        _require(type(state["ran_out"]) is bool, "ran_out", state["ran_out"])

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        self._left, self.ran_out = state["left"].numpy() + shift, state["ran_out"]


class PrioritizedSampler(Sampler):
    """In proportion to `(priority + eps) ** alpha`; new rows have the largest priority seen so far.

    Samples carry `priority_weight`, `(probability / smallest) ** -beta`, to correct for it.

    Args:
        max_capacity: as many rows as the storage holds.
        alpha: 0 is uniform, 1 is in proportion.
        beta: how much of it the weights correct.
        eps: added to every priority, so that none is zero.
        reduction: of a priority with several values per row: "max", "min", "mean" or "median".
    """

    says = (("priority_weight",),)

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
    ) -> None:
        self.max_size = whole(max_capacity, "max_capacity", 1)
        self.alpha, self.beta, self.eps = number(alpha, "alpha", 0), number(beta, "beta", 0), number(eps, "eps", 0)
        if not isinstance(reduction, str) or reduction not in ("max", "min", "mean", "median"):
            raise UsageError(f"reduction is 'max', 'min', 'mean' or 'median', got {reduction!r:.80}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UsageError(f"dtype is torch.float32 or another floating point type, got {dtype!r:.80}")
        self.dtype, self.reduction = dtype, reduction
        try:
            self.empty()
        except (MemoryError, ValueError, OverflowError) as error:
            raise NoSpace(f"max_capacity={max_capacity}: so many priorities do not fit into memory ({error})") from None

    def empty(self) -> None:
        self._tree = SumTree(self.max_size)
        self._low = self._high = 0
        self._largest = 0.0
        self._known = False

    @property
    def default_priority(self) -> float:
        """The priority of a new row."""
        return self._largest if self._known else 1.0

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        self._catch_up(memory)
        tree, total = self._tree, self._tree.total
        if not total:
            _live(memory, self._low, self._high)  # raises if there is no row, be it that writers died with all of them
            raise WrongState("every priority is zero: there is none to draw")
        rows = tree.draw(torch.rand(count, dtype=torch.float64, generator=generator).numpy())
        # Weights in float64 and as one power of the ratio: small priorities neither overflow nor lose their digits.
        weights = (tree[rows] / tree.least) ** -self.beta
        low = self._low
        positions = low + (rows - low) % memory.capacity
        return positions, {"priority_weight": torch.from_numpy(weights).to(self.dtype)}

    def _catch_up(self, memory: BufferFiles) -> None:
        """Take in the rows that came since, and forget those that went."""
        if self.max_size != memory.capacity:
            raise UsageError(f"max_capacity is {self.max_size}, the storage holds {memory.capacity} rows")
        ring = memory.ring
        low, high = ring.window()
        if (low, high) == (self._low, self._high):
            return
        value = self._power(np.array(self.default_priority))
        for first, end in _pieces(self._low, min(low, self._high), memory.capacity):
            self._tree.fill(first, end, 0.0)
        fresh = max(self._high, low)
        for first, end in _pieces(fresh, high, memory.capacity):
            holes = ring.holes(low)
            self._tree.fill(first, end, np.where(ring.marks[first:end] == HOLE, 0.0, value) if holes else value)
        self._low, self._high = low, high

    def update_priority(self, memory: BufferFiles, index: Array, priority: Array) -> None:
        self._catch_up(memory)
        index, priority = index.reshape(-1), priority.reshape(-1)
        if len(index) and (index.dtype.kind not in "iu" or not ((index >= 0) & (index < memory.capacity)).all()):
            raise UsageError(f"index holds numbers of rows, 0 to {memory.capacity - 1}, got {index.tolist()[:10]}")
        if len(priority) not in (1, len(index)):
            raise UsageError(f"priority holds {len(priority)} values for {len(index)} rows")
        if not (np.isfinite(priority) & (priority >= 0)).all():
            raise UsageError(f"priorities are finite and not negative, got {priority.tolist()[:10]}")
        index, priority = np.broadcast_arrays(index, priority)
        live = (index - self._low) % memory.capacity < self._high - self._low  # rows that went meanwhile stay away
        if memory.ring.holes(self._low):
            live &= memory.ring.marks[index] != HOLE
        if not live.all():
            index, priority = index[live], priority[live]
        if len(index):
            powers = self._power(priority)
            self._largest, self._known = max(self._largest, float(priority.max())), True
            self._tree[index] = powers

    def _power(self, priority: Array) -> Array:
        with np.errstate(over="ignore"):
            powers: Array = (priority.astype(np.float64) + self.eps) ** self.alpha
        if not np.isfinite(powers).all():
            raise UsageError(f"priority {priority.max():g} to the power of alpha={self.alpha:g} is no number any more")
        return powers

    def state_dict(self) -> dict[str, Any]:
        rows = self._tree[np.arange(self.max_size)]
        state = {"tree": torch.from_numpy(rows), "low": self._low, "high": self._high}
        return {**state, "largest": self._largest, "known": self._known}

    def grown(self, state: Mapping[str, Any], old: int, new: int, first: int) -> Mapping[str, Any]:
        found: list[Any] = [state.get(name) for name in ("tree", "low", "high")]
        tree, low, high = found
        _require(isinstance(tree, torch.Tensor) and tree.shape == (old,), "tree", tree)
        _require(type(low) is int and type(high) is int and 0 <= high - low <= old, "low", low)
        low = min(max(low, first), high)
        moved = torch.zeros(new, dtype=tree.dtype)
        positions = torch.arange(low, high)
        moved[(positions - first) % new] = tree[positions % old]
        return {**state, "tree": moved, "low": low}

    def check_state(self, state: Mapping[str, Any], head: int) -> None:
        tree, low, high = state["tree"], state["low"], state["high"]
        kind = isinstance(tree, torch.Tensor) and tree.dtype is torch.float64 and tree.shape == (self.max_size,)
        _require(kind, "tree", tree)
        _require(bool((tree.isfinite() & (tree >= 0)).all()), "tree", tree)
        for name, value in (("low", low), ("high", high)):
            _require(type(value) is int and 0 <= value <= head, name, value)
        _require(0 <= high - low <= self.max_size, "low", low)
        largest = state["largest"]
        _require(type(largest) is float and 0 <= largest < float("inf"), "largest", largest)
        _require(type(state["known"]) is bool, "known", state["known"])

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        self.empty()
        self._tree.fill(0, self.max_size, state["tree"].numpy())
        self._low, self._high = state["low"] + shift, state["high"] + shift
        self._largest, self._known = state["largest"], state["known"]

    def __repr__(self) -> str:
        return f"PrioritizedSampler({self.max_size}, alpha={self.alpha}, beta={self.beta}, eps={self.eps})"


class SliceSampler(Sampler):
    """Slices of episodes: `num_slices` of them in a batch, or as many of `slice_len` rows as make one.

    >>> sampler = SliceSampler(slice_len=32)          # batch_size=256: 8 slices, one after another

    An episode is drawn first, all alike, then a place in it. The last row of a slice is marked as truncated.

    Args:
        num_slices: how many slices make a batch.
        slice_len: how many rows make a slice.
        traj_key: where episodes' ids are, if not under ("collector", "traj_ids").
        end_key: the flag at an episode's last row, if not ("next", "done").
        truncated_key: where to mark the end of a slice; None for nowhere.
        strict_length: False lets shorter episodes in, whole; a batch may then be smaller.
        burn_in: how many rows at the beginning of each slice are there for a policy's memory to warm up, and not to be
            learned from; `burn_in` in a sample is True for them.
        cache_values: accepted as TorchRL has it; runs are kept up to date as rows come.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: AnyKey | None = None,
        traj_key: AnyKey | None = None,
        cache_values: bool = False,
        truncated_key: AnyKey | None = ("next", "truncated"),
        strict_length: bool = True,
        burn_in: int = 0,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            raise WrongArgument(f"num_slices or slice_len, one of them: got {num_slices} and {slice_len}")
        self.num_slices = None if num_slices is None else whole(num_slices, "num_slices", 1, LARGEST)
        self.slice_len = None if slice_len is None else whole(slice_len, "slice_len", 1, LARGEST)
        self.strict_length, self.burn_in = flag(strict_length, "strict_length"), whole(burn_in, "burn_in", 0)
        flag(cache_values, "cache_values", optional=True)
        self.says = (("burn_in",),) if burn_in else ()
        self._check_burn_in(slice_len)
        self.truncated_key: Key | None = None if truncated_key is None else key_of(truncated_key, "truncated_key")
        ids = Cuts.ids if traj_key is None else (key_of(traj_key, "traj_key"),)
        self.cuts = Cuts(ids, Cuts.ends if end_key is None else (key_of(end_key, "end_key"),))

    def check_columns(self, columns: Mapping[Key, Leaf]) -> None:
        super().check_columns(columns)
        key = self.truncated_key
        if key is not None and key in columns and columns[key].dtype is not torch.bool:
            raise SpecMismatch(f"truncated_key marks the end of a slice in a flag; {show(key)} is {columns[key]}")

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        slices, length = self._shape(count)
        starts, lengths = memory.runs.table()
        if not len(starts):
            raise nothing()
        self.cuts.check(memory.rows.layout.columns if memory.rows is not None else ())
        least = length if self.strict_length else self.burn_in + 1
        fit = lengths >= least
        if not fit.all():
            starts, lengths = starts[fit], lengths[fit]
        if not len(starts):
            what = "or strict_length=False" if self.strict_length else "or a smaller burn_in"
            raise Starved(
                f"no episode has {least} rows side by side yet: longer batches, trajs_per_batch, shorter slices, {what}"
            )
        which = _integers(len(starts), slices, generator)
        starts, sizes = starts[which], np.minimum(lengths[which], length)
        room = lengths[which] - sizes + 1
        starts = starts + (torch.rand(slices, dtype=torch.float64, generator=generator).numpy() * room).astype(np.int64)
        at = np.arange(length)
        inside: Any = slice(None) if self.strict_length else (at < sizes[:, None]).reshape(-1)
        told: Info = {}
        if self.truncated_key is not None:
            told[self.truncated_key] = torch.from_numpy((at == sizes[:, None] - 1).reshape(-1, 1)[inside])
        if self.burn_in:
            told["burn_in"] = torch.from_numpy(np.tile(at < self.burn_in, slices)[inside])
        return (starts[:, None] + at).reshape(-1)[inside], told

    def _check_burn_in(self, length: int | None) -> None:
        if length is not None and self.burn_in >= length:
            raise UsageError(f"burn_in={self.burn_in} leaves nothing of a slice of {length} rows to learn from")

    def _shape(self, count: int) -> tuple[int, int]:
        slices, length = self.num_slices, self.slice_len
        if slices is None:
            assert length is not None
            if count % length:
                raise WrongState(f"batch_size={count}: so many rows cannot be cut into slices of slice_len={length}")
            return count // length, length
        if count % slices:
            raise WrongState(f"batch_size={count}: so many rows cannot be cut into num_slices={slices}")
        self._check_burn_in(count // slices)
        return slices, count // slices

    def __repr__(self) -> str:
        burn_in = f", burn_in={self.burn_in}" if self.burn_in else ""
        return f"SliceSampler(num_slices={self.num_slices}, slice_len={self.slice_len}{burn_in})"


def _between(low: int, high: int, count: int, generator: torch.Generator | None) -> Array:
    """Numbers in [low, high), in memory that this thread's next call fills again."""
    if getattr(_own, "count", None) != count:
        _own.count, _own.drawn = count, torch.zeros(count, dtype=torch.int64)
        _own.seen = _own.drawn.numpy()
    _own.drawn.random_(low, high, generator=generator)
    seen: Array = _own.seen
    return seen


def _integers(below: int, count: int, generator: torch.Generator | None) -> Array:
    drawn: Array = torch.randint(below, (count,), generator=generator).numpy()
    return drawn


def _live(memory: BufferFiles, low: int, high: int) -> Array:
    """All positions in [low, high) but holes."""
    live = np.arange(low, high)
    if memory.ring.holes(low):
        live = live[memory.ring.marks_of(low, high) != HOLE]
    if not len(live):
        raise nothing()
    return live


def _pieces(low: int, high: int, capacity: int) -> list[tuple[int, int]]:
    """Positions [low, high) as ranges of rows: one, or two around the end of the ring."""
    if high <= low:
        return []
    if high - low >= capacity:
        return [(0, capacity)]
    a, b = low % capacity, (high - 1) % capacity + 1
    return [(a, b)] if a < b else [(a, capacity), (0, b)]
