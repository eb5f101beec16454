"""Samplers: choose the rows of the next sample. They draw positions, not row numbers: see ring.py.

RandomSampler                all rows with equal probability
SamplerWithoutReplacement    every row once, then again
PrioritizedSampler           in proportion to priority ** alpha
SliceSampler                 runs of rows that never cross an episode, a writer, the ring's end or a crash
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
_scratch = threading.local()


class Sampler:
    """Draws positions of committed rows. The base class of all samplers."""

    alone = False  # True for samplers that cannot draw again: writers wait while it draws and rows are read
    ran_out = False
    cuts = Cuts()  # the leaves by which runs are cut for it
    says: tuple[Key, ...] = ()  # names of the entries it adds to each row of a sample

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        """Return positions and the info about them. This thread's next draw may overwrite the positions."""
        raise NotImplementedError

    def check_columns(self, columns: Mapping[Key, Leaf]) -> None:
        """Raise if one of these columns has the name of an entry that the sampler adds to samples."""
        check_names_free(columns, [("index",), *self.says], "the buffer adds to each sample")

    def update_priority(self, memory: BufferFiles, index: Array, priority: Array) -> None:
        """Set priorities; does nothing in samplers that have none."""

    def empty(self) -> None:
        """Forget everything about rows."""
        self.ran_out = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` can resume."""
        return {}

    def check_state(self, state: Mapping[str, Any], head: int) -> None:
        """Raise `CorruptState` if `load_state_dict` could not resume from `state`, whose positions are below `head`."""

    def grown(self, state: Mapping[str, Any], old: int, new: int, first: int) -> Mapping[str, Any]:
        """Return `state`, from a buffer of `old` rows, for one of `new` rows in which position `first` is row 0."""
        return state

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        """Resume from `state`, with `shift` added to all its positions."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def empty_buffer() -> Starved:
    """Return the error for a buffer without rows."""
    return Starved("cannot sample: the buffer is empty; extend it first")


def check_names_free(columns: Iterable[Key], names: Iterable[Key], who: str) -> None:
    """Raise if a column has one of these names, is nested in it, or contains it."""
    for name in names:
        for key in columns:
            if key[: len(name)] == name or name[: len(key)] == key:
                raise SpecMismatch(f"column {show(key)} collides with {show(name)}, which {who}; rename it")


def _require(right: bool, name: str, value: Any) -> None:
    """Raise `CorruptState` unless an entry of a sampler's state is `right`."""
    if not right:
        raise CorruptState(f"the sampler's state has an invalid {name!r}: {value!r:.80}")


class RandomSampler(Sampler):
    """Draws all rows with equal probability, with replacement.

    >>> ReplayBuffer(storage=LazyTensorStorage(10_000), sampler=RandomSampler(), batch_size=256)
    """

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        ring = memory.ring
        low, high = ring.window()
        if low == high:
            raise empty_buffer()
        positions = _between(low, high, count, generator)
        if not ring.holes(low):
            return positions, {}
        for _ in range(_TRIES):
            bad = np.flatnonzero(ring.marks[positions % ring.capacity] == HOLE)
            if not len(bad):
                return positions, {}
            positions[bad] = _integers(high - low, len(bad), generator) + low
        live = _without_holes(memory, low, high)
        return live[_integers(len(live), count, generator)], {}


class SamplerWithoutReplacement(Sampler):
    """Draws every row once, in random order, then begins the next round. Iterating over the buffer ends after a round.

    Rows that arrive during a round are drawn from the next round on; rows overwritten meanwhile are left out.

    Args:
        drop_last: skip the rows left at the end of a round if they are fewer than a batch.
        shuffle: False draws rows in the order in which they were written.
    """

    alone = True

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last, self.shuffle = flag(drop_last, "drop_last"), flag(shuffle, "shuffle")
        self._left = np.zeros(0, np.int64)

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        low, high = memory.ring.window()
        left = self._left[self._left >= low]
        if len(left) < (count if self.drop_last else 1):
            left = _without_holes(memory, low, high)
            if self.drop_last and len(left) < count:  # first: a draw that is tried again draws the same
                raise Starved(f"{len(left)} rows do not make a batch of {count}, and drop_last=True")
            if self.shuffle:
                left = left[torch.randperm(len(left), generator=generator).numpy()]
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
    """Draws rows in proportion to `(priority + eps) ** alpha`. New rows get the largest priority seen so far.

    Samples carry the importance weight `priority_weight`, which is `(probability / smallest probability) ** -beta`.

    Args:
        max_capacity: the number of rows of the storage.
        alpha: 0 draws uniformly, 1 in proportion to priorities.
        beta: how much of the bias the weights correct; 1 is all of it.
        eps: added to every priority, so that none is zero.
        reduction: makes one priority of several values per row: "max", "min", "mean" or "median".
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
            raise UsageError(f"reduction must be 'max', 'min', 'mean' or 'median', got {reduction!r:.80}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UsageError(f"dtype must be torch.float32 or another floating point type, got {dtype!r:.80}")
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
            _without_holes(memory, self._low, self._high)  # raises if no row is left, for instance because writers died
            raise WrongState("every priority is zero: there is none to draw")
        rows = tree.draw(torch.rand(count, dtype=torch.float64, generator=generator).numpy())
        # Weights in float64 and as one power of the ratio: small priorities neither overflow nor lose their digits.
        weights = (tree[rows] / tree.least) ** -self.beta
        low = self._low
        positions = low + (rows - low) % memory.capacity
        return positions, {"priority_weight": torch.from_numpy(weights).to(self.dtype)}

    def _catch_up(self, memory: BufferFiles) -> None:
        """Add the rows written since the last call, and remove the overwritten ones."""
        if self.max_size != memory.capacity:
            raise UsageError(
                f"max_capacity is {self.max_size}, but the storage holds {memory.capacity} rows; they must be equal"
            )
        ring = memory.ring
        low, high = ring.window()
        if (low, high) == (self._low, self._high):
            return
        value = self._power(np.array(self.default_priority))
        for first, end in _row_ranges(self._low, min(low, self._high), memory.capacity):
            self._tree.fill(first, end, 0.0)
        fresh = max(self._high, low)
        for first, end in _row_ranges(fresh, high, memory.capacity):
            holes = ring.holes(low)
            self._tree.fill(first, end, np.where(ring.marks[first:end] == HOLE, 0.0, value) if holes else value)
        self._low, self._high = low, high

    def update_priority(self, memory: BufferFiles, index: Array, priority: Array) -> None:
        self._catch_up(memory)
        index, priority = index.reshape(-1), priority.reshape(-1)
        if len(index) and (index.dtype.kind not in "iu" or not ((index >= 0) & (index < memory.capacity)).all()):
            raise UsageError(f"index must hold numbers of rows, 0 to {memory.capacity - 1}, got {index.tolist()[:10]}")
        if len(priority) not in (1, len(index)):
            raise UsageError(f"priority holds {len(priority)} values for {len(index)} rows")
        if not (np.isfinite(priority) & (priority >= 0)).all():
            raise UsageError(f"priorities must be finite and not negative, got {priority.tolist()[:10]}")
        index, priority = np.broadcast_arrays(index, priority)
        live = (index - self._low) % memory.capacity < self._high - self._low  # rows overwritten meanwhile get none
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
            raise UsageError(f"priority {priority.max():g} to the power of alpha={self.alpha:g} overflows")
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
    """Draws slices of episodes: `num_slices` per batch, or as many slices of `slice_len` rows as fill a batch.

    >>> sampler = SliceSampler(slice_len=32)          # batch_size=256: 8 slices, one after another

    An episode is drawn first, all with equal probability, then a place in it. The last row of a slice is marked as
    truncated.

    Args:
        num_slices: the number of slices per batch.
        slice_len: the number of rows per slice.
        traj_key: the key of the episode ids, if not ("collector", "traj_ids").
        end_key: the key of the flag that marks an episode's last row, if not ("next", "done").
        truncated_key: the flag that marks the end of a slice; None: no mark.
        strict_length: False also draws shorter episodes, whole; a batch may then be smaller.
        burn_in: the number of rows at the start of each slice that only warm up a recurrent policy's state and are not
            to be learned from; `burn_in` in a sample is True for them.
        cache_values: accepted for compatibility with TorchRL; the index of episodes is always kept up to date.
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
            raise WrongArgument(f"give exactly one of num_slices and slice_len, got {num_slices} and {slice_len}")
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
            raise SpecMismatch(
                f"truncated_key must name a bool column, which marks the end of a slice; {show(key)} is {columns[key]}"
            )

    def draw(self, memory: BufferFiles, count: int, generator: torch.Generator | None) -> tuple[Array, Info]:
        slices, length = self._shape(count)
        starts, lengths = memory.runs.table()
        if not len(starts):
            raise empty_buffer()
        self.cuts.check(memory.rows.layout.columns if memory.rows is not None else ())
        least = length if self.strict_length else self.burn_in + 1
        fit = lengths >= least
        if not fit.all():
            starts, lengths = starts[fit], lengths[fit]
        if not len(starts):
            what = "or strict_length=False" if self.strict_length else "or a smaller burn_in"
            raise Starved(
                f"no episode has {least} consecutive rows yet; try longer batches, trajs_per_batch, shorter "
                f"slices, {what}"
            )
        which = _integers(len(starts), slices, generator)
        starts, sizes = starts[which], np.minimum(lengths[which], length)
        room = lengths[which] - sizes + 1
        starts = starts + (torch.rand(slices, dtype=torch.float64, generator=generator).numpy() * room).astype(np.int64)
        at = np.arange(length)
        inside: Any = slice(None) if self.strict_length else (at < sizes[:, None]).reshape(-1)
        info: Info = {}
        if self.truncated_key is not None:
            info[self.truncated_key] = torch.from_numpy((at == sizes[:, None] - 1).reshape(-1, 1)[inside])
        if self.burn_in:
            info["burn_in"] = torch.from_numpy(np.tile(at < self.burn_in, slices)[inside])
        return (starts[:, None] + at).reshape(-1)[inside], info

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
    """Return random numbers in [low, high), in memory that this thread's next call overwrites."""
    if getattr(_scratch, "count", None) != count:
        _scratch.count, _scratch.drawn = count, torch.zeros(count, dtype=torch.int64)
        _scratch.seen = _scratch.drawn.numpy()
    _scratch.drawn.random_(low, high, generator=generator)
    seen: Array = _scratch.seen
    return seen


def _integers(below: int, count: int, generator: torch.Generator | None) -> Array:
    drawn: Array = torch.randint(below, (count,), generator=generator).numpy()
    return drawn


def _without_holes(memory: BufferFiles, low: int, high: int) -> Array:
    """Return all positions in [low, high) except holes."""
    live = np.arange(low, high)
    if memory.ring.holes(low):
        live = live[memory.ring.marks_of(low, high) != HOLE]
    if not len(live):
        raise empty_buffer()
    return live


def _row_ranges(low: int, high: int, capacity: int) -> list[tuple[int, int]]:
    """Return positions [low, high) as ranges of row numbers: one, or two if they wrap around the ring."""
    if high <= low:
        return []
    if high - low >= capacity:
        return [(0, capacity)]
    a, b = low % capacity, (high - 1) % capacity + 1
    return [(a, b)] if a < b else [(a, capacity), (0, b)]
