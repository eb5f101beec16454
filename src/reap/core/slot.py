"""Slots: memory for one rollout.   free → being filled → full → being read → free: one owner at a time.

    Layout   which columns, how many steps and lanes, and where each column begins in the block
    Slot     one block of bytes and every column as an array `[T, N, …]` on it; loose columns (text, ragged, objects)
             are arrays of references beside the block
    Row      views of one time step of a slot, created once, so that the hot loop only writes
    Pool     a few slots; hands out free ones and takes lent ones back

A batch is lent: its tensors are views of the slot's block, each column through an owner object made for this loan. It
is copied only if contiguous batches are asked for or the consumer holds every slot. When the last tensor on a column
dies, Python frees its owner and the owner's weak reference fires; after the last column, the slot counts as free at the
next `acquire`. Every column is a storage of its own, so saving one does not save the others with it. References in
loose columns are handed over, not lent: a slot keeps no object alive that the consumer has dropped.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from reap.core.columns.object_columns import ObjectColumn
from reap.errors import ReapError, UsageError
from reap.spec import USUAL, BatchShape, EnvSpec, Key, Leaf, in_every_row, numpy_dtype

_ALIGN = 64
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_CHUNK = 1024  # rows cut at once: more of them would take more memory than the data they view

FLAGS = ("done", "terminated", "truncated")
TRAJ_IDS: Key = ("collector", "traj_ids")
MASK: Key = ("collector", "mask")
CUT: Key = ("collector", "cut")  # the first row of a lane after a failure: the trajectory before it was cut
VERSION: Key = ("policy_version",)
FIRST: Key = ("collector", "first")  # prefix of columns with what the policy saw at the first row of `once` leaves
FRAME: Key = ("next", "_frame")  # a reference to a whole step of an env without columns (columns/assemble_frames.py)


def aligned(make: Callable[..., np.ndarray[Any, Any]], nbytes: int) -> np.ndarray[Any, Any]:
    """Return `nbytes` bytes from `make` (`np.empty` or `np.zeros`), aligned to 64 bytes as torch's own memory is.

    On rows with another alignment, convolutions give results that differ in the last bits.
    """
    raw = make(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes]


class Layout:
    """Says where every column `[T, N, …]` lies in a block of bytes, and which are `loose`: references beside it."""

    def __init__(
        self, columns: Mapping[Key, Leaf], steps: int, lanes: int, *, batched: bool, look: BatchShape = USUAL
    ) -> None:
        self.columns = dict(columns)
        self.steps, self.lanes, self.batched, self.look = steps, lanes, batched, look
        self.loose = {key: leaf for key, leaf in self.columns.items() if leaf.loose}
        self.offsets: dict[Key, int] = {}
        end = 0
        for key, leaf in self.columns.items():
            if leaf.loose:
                continue
            self.offsets[key] = end
            length = (1 if leaf.once else steps) * lanes * leaf.nbytes
            end += -(-length // _ALIGN) * _ALIGN
        self.nbytes = end

    @property
    def in_place(self) -> Layout:
        """This layout without contiguous copies: its batches are views, so what is written to them is delivered."""
        found = copy.copy(self)
        found.look = replace(self.look, contiguous=False)
        return found

    def block(self) -> np.ndarray[Any, Any]:
        """Return new memory for every column."""
        with self.needing_memory():
            return aligned(np.zeros, self.nbytes)

    @contextlib.contextmanager
    def needing_memory(self) -> Iterator[None]:
        """While a slot's memory is allocated inside, turn an out-of-memory error into a UsageError with its size."""
        try:
            if self.nbytes > _MEMORY:  # the system would allocate it, and kill the process when it is written to
                raise MemoryError(f"this machine has {_MEMORY / 2**30:,.1f} GiB")
            yield
        except ReapError:
            raise
        except (MemoryError, OSError, OverflowError, ValueError) as cause:
            raise UsageError(
                f"frames_per_batch: {self.steps:,} steps of {self.lanes:,} lanes take {self.nbytes / 2**30:,.1f} GiB, "
                f"and there is no room for that ({cause})"
            ) from cause

    def same_as(self, other: Layout) -> bool:
        """Return whether memory of one layout fits rollouts of the other."""
        return self.columns == other.columns and (self.steps, *self.dims) == (other.steps, *other.dims)

    @property
    def frames(self) -> int:
        """How many frames a full rollout has."""
        return self.steps * self.lanes

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The leading dimensions of a delivered batch."""
        return (*self.dims, self.steps)

    @property
    def dims(self) -> tuple[int, ...]:
        """The lane dimensions as they are delivered and as policies see them."""
        return (self.look.dims or (self.lanes,)) if self.batched else ()

    def arrays(self, block: np.ndarray[Any, Any]) -> dict[Key, np.ndarray[Any, Any]]:
        """Return every column that is not loose as an array `[T, N, …]` on `block`."""
        found = {}
        for key in self.offsets:
            leaf = self.columns[key]
            dtype, shape = numpy_dtype(leaf.dtype), (1 if leaf.once else self.steps, self.lanes, *leaf.shape)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            array = block[self.offsets[key] : self.offsets[key] + size].view(dtype).reshape(shape)
            found[key] = in_every_row(array, self.steps) if leaf.once else array
        return found

    def tensors(self, arrays: Mapping[Key, np.ndarray[Any, Any]]) -> dict[Key, torch.Tensor]:
        """Return columns as tensors in the delivered order: `[N, T, …]`, or `[T, …]` unbatched."""
        found = {}
        dims = self.look.dims
        for key, array in arrays.items():
            if key in self.look.hidden:
                continue
            tensor = self.tensor(key, array)
            tensor = tensor.transpose(0, 1) if self.batched else tensor[:, 0]
            if self.look.contiguous and not self.columns[key].once:
                tensor = tensor.contiguous()  # the slot is free again once all columns are copied
            found[key] = tensor if dims is None else tensor.reshape(*dims, *tensor.shape[1:])
        return found

    def tensor(self, key: Key, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return a column, or a part of it, as a tensor on the same memory."""
        tensor = torch.from_numpy(array)  # `as_tensor` written out, which saves a call per column
        return tensor.view(torch.bfloat16) if self.columns[key].dtype is torch.bfloat16 else tensor


class Row:
    """Views of one time step of a slot: arrays `[N, …]`; `inputs` and `outputs` have no lane dimension if unbatched."""

    __slots__ = (
        "action",
        "after",
        "copies",
        "done",
        "inputs",
        "mask",
        "narrow",
        "next",
        "outputs",
        "place",
        "reward",
        "rewards",
        "terminated",
        "truncated",
    )

    inputs: tuple[Any, ...]  # what the policy reads: tensors, and an ObjectColumn for each loose column
    outputs: tuple[np.ndarray[Any, Any], ...]  # what the policy writes, action among them
    action: tuple[np.ndarray[Any, Any], ...]  # what the env reads
    next: tuple[np.ndarray[Any, Any], ...]  # what the env writes: successors
    rewards: tuple[np.ndarray[Any, Any], ...]  # every reward leaf
    reward: np.ndarray[Any, Any]  # the first of them; without its last dimension if that has size 1
    mask: np.ndarray[Any, Any] | None  # False: this lane made no frame; None: the slot has no mask
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    done: np.ndarray[Any, Any]
    after: tuple[np.ndarray[Any, Any], ...]  # the observation of the following step
    copies: tuple[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], ...]  # (after, next) pairs
    place: tuple[int, int] | None  # slot number and step, if the env made the slot and numbered it
    narrow: dict[int, Row]  # by size: views of its first positions, if the policy acts on fewer (policies/buckets.py)

    @property
    def flags(self) -> tuple[np.ndarray[Any, Any], ...]:
        """The flags that episodes ended, in the order of `FLAGS`."""
        return self.done, self.terminated, self.truncated

    def leave_out(self, lanes: Sequence[int]) -> None:
        """Mark this step as no frame of these lanes, and clear what was written for them."""
        if self.mask is not None:
            self.mask[lanes] = False
        for array in (*self.next, *self.rewards):
            array[lanes] = 0
        for flag in self.flags:
            flag[lanes] = False


class Finals(NamedTuple):
    """What a compact slot keeps beside its columns: the successors that no later row has as its observation."""

    lane: np.ndarray[Any, Any]  # [F]
    step: np.ndarray[Any, Any]  # [F]
    values: dict[Key, np.ndarray[Any, Any]]  # [F, …]
    steps: int  # of the rollout
    size: tuple[int, ...]  # of the batch they belong to


class Slot:
    """One block of memory and its columns, or views of columns elsewhere, such as a worker's lanes of a shared slot."""

    def __init__(
        self, layout: Layout, index: int = 0, arrays: Mapping[Key, np.ndarray[Any, Any]] | None = None
    ) -> None:
        self.layout, self.index = layout, index
        self.block = layout.block() if arrays is None else np.zeros(0, np.uint8)  # empty if the columns lie elsewhere
        given = arrays or {}
        self._loose = {
            key: given[key] if key in given else leaf.column(layout.steps, layout.lanes)
            for key, leaf in layout.loose.items()
        }
        self.arrays = {**(layout.arrays(self.block) if arrays is None else arrays), **self._loose}
        self.number_in_env: int | None = None  # its number in the env that made it, if one did
        self.finals: Finals | None = None
        self._rows: tuple[RowKeys, list[Row]] | None = None
        self._loan: list[weakref.ref[np.ndarray[Any, Any]]] = []
        self._ended: deque[Any] = deque()  # the columns of the loan that are no longer referenced
        keys = [(*root, flag) for root in ((), ("next",)) for flag in FLAGS]
        self._flags = [self.arrays[key] for key in keys if key in self.arrays]

    def clear_flags(self) -> None:
        """Set all flags to False. The consumer of the last batch may have written to them."""
        for flag in self._flags:
            flag[...] = False

    def put(self, key: Key, values: torch.Tensor) -> None:
        """Write the first rows of a column."""
        self.arrays[key][: len(values)] = values.numpy()

    def take_references(self) -> dict[Key, np.ndarray[Any, Any]]:
        """Return the references of all loose columns, and drop them from the slot."""
        taken = {key: column.copy() for key, column in self._loose.items()}
        for column in self._loose.values():
            column[...] = None
        return taken

    def copied(self) -> dict[Key, np.ndarray[Any, Any]]:
        """Return copies of all columns, each in memory of its own, so that keeping one does not keep the others."""
        columns = {key: leaf for key, leaf in self.layout.columns.items() if key not in self._loose}
        return {key: leaf.copied(self.arrays[key]) for key, leaf in columns.items()} | self.take_references()

    def lend(self) -> dict[Key, np.ndarray[Any, Any]]:
        """Return the columns for a consumer to keep; the slot is `returned` once none of them is referenced."""
        owners = {key: array.view() for key, array in self.arrays.items() if key not in self._loose}
        # Ctrl-C during a Python finalizer is swallowed, and the finalizer is left unfinished. `deque.append` is C code:
        # it cannot be interrupted, and it is atomic in whatever thread drops the last tensor.
        self._ended = deque()
        self._loan = [weakref.ref(owner, self._ended.append) for owner in owners.values()]
        return owners | self.take_references()

    @property
    def returned(self) -> bool:
        """Whether none of the columns that were lent is referenced any more."""
        return len(self._ended) == len(self._loan)

    def cut(self, keys: RowKeys, current: Sequence[np.ndarray[Any, Any]]) -> Iterator[Row]:
        """Return this slot's rows in order of time.

        Up to `_CHUNK` rows are cut once and kept; longer slots are cut in chunks, again for each rollout.
        """
        if self._rows is not None and self._rows[0] is keys:
            return iter(self._rows[1])
        if self.layout.steps <= _CHUNK:
            self._rows = keys, list(self._cut(keys, current, 0, self.layout.steps))
            return iter(self._rows[1])
        bounds = range(0, self.layout.steps, _CHUNK)
        return (row for a in bounds for row in self._cut(keys, current, a, min(a + _CHUNK, self.layout.steps)))

    def _cut(self, keys: RowKeys, current: Sequence[np.ndarray[Any, Any]], a: int, b: int) -> Iterator[Row]:
        arrays, batched = self.arrays, self.layout.batched
        columns, dims = self.layout.columns, self.layout.look.dims

        def policy_view(key: Key) -> np.ndarray[Any, Any]:  # the column with the lane dimensions that policies see
            part = arrays[key][a:b] if batched else arrays[key][a:b, 0]
            return part if dims is None else part.reshape(b - a, *dims, *part.shape[2:])

        def tensor_rows(key: Key) -> Sequence[Any]:
            if columns[key].loose:
                return [ObjectColumn(columns[key], array, batched) for array in arrays[key][a:b]]
            return self.layout.tensor(key, policy_view(key)).unbind(0)

        def policy_rows(key: Key) -> list[np.ndarray[Any, Any]]:
            part = policy_view(key)
            # `part[t, ...]` stays an array even where `part[t]` would be a bare number
            return [part[t, ...] for t in range(b - a)]

        def after_rows(key: Key, last: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
            rows = list(arrays[key][a + 1 : b + 1])
            return rows if len(rows) == b - a else [*rows, last]

        def flat(key: Key) -> list[np.ndarray[Any, Any]]:
            return list(arrays[key][a:b, :, 0])

        inputs = [tensor_rows(k) for k in keys.inputs]
        outputs = [policy_rows(k) for k in keys.outputs]
        actions = [list(arrays[k][a:b]) for k in keys.action]
        afters = [after_rows(k, last) for k, last in zip(keys.observation, current)]
        # A compact slot has no columns for successors: the env writes them where the following step reads them.
        nexts = [
            list(arrays[("next", *k)][a:b]) if ("next", *k) in arrays else after
            for k, after in zip(keys.observation, afters)
        ]
        rewards = [list(arrays[("next", *k)][a:b]) for k in keys.reward]
        scalar = columns[("next", *keys.reward[0])].shape == (1,)
        reward = flat(("next", *keys.reward[0])) if scalar else rewards[0]
        mask = list(arrays[MASK][a:b]) if MASK in arrays else [None] * (b - a)
        done = flat(("next", "done"))
        terminated, truncated = flat(("next", "terminated")), flat(("next", "truncated"))
        # `zip` makes the tuples, which is faster than one by one: a long slot is cut again for every rollout.
        rows = zip(
            _tuples(inputs, b - a),
            _tuples(outputs, b - a),
            _tuples(actions, b - a),
            _tuples(nexts, b - a),
            _tuples(afters, b - a),
            _tuples(rewards, b - a),
            zip(reward, mask, done, terminated, truncated),
        )
        separate = [i for i, (after, new) in enumerate(zip(afters, nexts)) if after is not new and keys.copied]
        for t, (given, written, action, successor, after, rewarded, rest) in enumerate(rows):
            row = Row()
            row.narrow = {}
            row.inputs, row.outputs, row.action, row.next, row.after = given, written, action, successor, after
            row.rewards = rewarded
            row.reward, row.mask, row.done, row.terminated, row.truncated = rest
            row.copies = tuple([(after[i], successor[i]) for i in separate])
            row.place = None
            if self.number_in_env is not None:  # a last row whose successors lie outside this slot has no place
                beyond = successor and successor[0] is after[0] and a + t + 1 == self.layout.steps
                row.place = None if beyond else (self.number_in_env, a + t)
            yield row


def _tuples(columns: Sequence[Sequence[Any]], steps: int) -> Iterator[tuple[Any, ...]]:
    """Return, for each step, a tuple with one item of every column."""
    return zip(*columns) if columns else itertools.repeat((), steps)


class RowKeys:
    """Which columns the policy reads and writes, and the env reads and writes, in the order of a row's tuples."""

    def __init__(
        self,
        spec: EnvSpec,
        inputs: Sequence[Key] = (),
        outputs: Sequence[Key] | None = None,
        *,
        copied: bool = True,  # whether the loop copies successors to the following row
    ) -> None:
        self.copied = copied
        # Without a policy (lanes in threads and processes, steps by hand) only actions are written from outside.
        self.inputs, self.outputs = tuple(inputs), tuple(spec.action if outputs is None else outputs)
        self.action, self.observation, self.reward = tuple(spec.action), tuple(spec.observation), tuple(spec.reward)


class Pool:
    """At most `limit` slots that can be lent, made when first needed, and one reserve that is never lent.

    Only who has acquired a slot writes to it, until it is lent or released. `acquire` never waits: when the consumer
    holds every other slot, the reserve is filled instead and the batch is copied out of it. A batch in the consumer's
    hands is never overwritten.
    """

    def __init__(self, layout: Layout, limit: int = 2, make: Callable[[Layout, int], Slot] = Slot) -> None:
        self.layout = layout
        self._limit, self._make = limit, make
        self._slots: list[Slot] = []
        self._lent: list[Slot] = []
        self._free: deque[Slot] = deque()
        self._reserve: Slot | None = None

    def acquire(self) -> Slot:
        """Return a slot to write to."""
        for slot in [slot for slot in self._lent if slot.returned]:
            self._lent.remove(slot)
            self._free.append(slot)
        if self._free:
            return self._free.popleft()
        if len(self._slots) < self._limit:
            self._slots.append(self._make(self.layout, len(self._slots)))
            return self._slots[-1]
        self._reserve = self._reserve or self._make(self.layout, -1)
        return self._reserve

    def lend(self, slot: Slot) -> dict[Key, np.ndarray[Any, Any]]:
        """Return the columns of a full slot for the consumer to keep: lent, or copied if it is the reserve."""
        if slot is self._reserve:
            return slot.copied()
        self._lent.append(slot)
        return slot.lend()

    def release(self, slot: Slot) -> None:
        """Take back a slot that was never lent."""
        slot.take_references()
        if slot is not self._reserve:
            self._free.append(slot)
