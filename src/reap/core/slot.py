"""Slots: memory for one rollout.   FREE → WRITING → FULL → READING → FREE, one owner at a time.

    Layout   which columns, how many steps and lanes, where each begins in the block
    Slot     one block of bytes and every column as an array `[T, N, …]` on it; loose columns (text, ragged, objects)
             are arrays of references beside the block
    Row      one time step of a slot, cut once, so that the hot loop only writes
    Pool     a few slots; hands out free ones, takes lent ones back

A batch is lent, and copied only where contiguous ones are asked for or the consumer holds every slot: its tensors look
at the slot's block, each column through an owner object made for this loan. When the last tensor on a column dies,
Python frees its owner and the owner's weak reference fires; after the last column's the slot is free again for whoever
wants one next. Every column is a storage of its own, so saving one does not drag the others along. References are not
lent but handed over: a slot keeps no object alive that a consumer has dropped.
"""

from __future__ import annotations

import contextlib
import copy
import enum
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
_CHUNK = 1024  # rows cut at once: beyond it the views would outweigh the data they look at

FLAGS = ("done", "terminated", "truncated")
TRAJ_IDS: Key = ("collector", "traj_ids")
MASK: Key = ("collector", "mask")
CUT: Key = ("collector", "cut")  # the first row of a lane after a failure: the trajectory before it was cut
VERSION: Key = ("policy_version",)
FIRST: Key = ("collector", "first")  # under it: what policies saw at the first row of columns that are kept once
FRAME: Key = ("next", "_frame")  # a whole step, where it has no columns (see core/columns/assemble_frames.py)


def aligned(make: Callable[..., np.ndarray[Any, Any]], nbytes: int) -> np.ndarray[Any, Any]:
    """Return so many bytes, made by `np.empty` or `np.zeros`, that begin at a multiple of 64, as torch's own do.

    Convolutions of rows that begin elsewhere have other last bits.
    """
    raw = make(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes]


class Layout:
    """Where every column `[T, N, …]` lies in one block of bytes, and which are `loose`: references beside it."""

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
            rows, numbers = 1 if leaf.once else steps, int(np.prod(leaf.shape, dtype=np.int64))
            length = rows * lanes * numbers * numpy_dtype(leaf.dtype).itemsize
            end += -(-length // _ALIGN) * _ALIGN
        self.nbytes = end

    @property
    def in_place(self) -> Layout:
        """This layout, for a batch that lies in the slot itself: what is written to it is delivered."""
        found = copy.copy(self)
        found.look = replace(self.look, contiguous=False)
        return found

    def block(self) -> np.ndarray[Any, Any]:
        """Fresh memory for every column."""
        with self.needing_memory():
            return aligned(np.zeros, self.nbytes)

    @contextlib.contextmanager
    def needing_memory(self) -> Iterator[None]:
        """Inside, memory for a slot is reserved; that there is not so much of it is told as what it is."""
        try:
            if self.nbytes > _MEMORY:  # the system would give it, and end the process when it is written to
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
        """Whether rollouts of both can lie in one another's place."""
        return self.columns == other.columns and (self.steps, *self.dims) == (other.steps, *other.dims)

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The leading dimensions of a delivered batch."""
        return (*self.dims, self.steps)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the lanes, as they are delivered and as policies see them."""
        return (self.look.dims or (self.lanes,)) if self.batched else ()

    def arrays(self, block: np.ndarray[Any, Any]) -> dict[Key, np.ndarray[Any, Any]]:
        """Every column that has bytes, as an array `[T, N, …]` on `block`."""
        found = {}
        for key in self.offsets:
            leaf = self.columns[key]
            dtype, shape = numpy_dtype(leaf.dtype), (1 if leaf.once else self.steps, self.lanes, *leaf.shape)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            array = block[self.offsets[key] : self.offsets[key] + size].view(dtype).reshape(shape)
            found[key] = in_every_row(array, self.steps) if leaf.once else array
        return found

    def tensors(self, arrays: Mapping[Key, np.ndarray[Any, Any]]) -> dict[Key, torch.Tensor]:
        """Columns as tensors in the delivered order: `[N, T, …]`, or `[T, …]` unbatched."""
        found = {}
        dims = self.look.dims
        for key, array in arrays.items():
            if key in self.look.hidden:
                continue
            tensor = self.tensor(key, array)
            tensor = tensor.transpose(0, 1) if self.batched else tensor[:, 0]
            if self.look.contiguous and not self.columns[key].once:
                tensor = tensor.contiguous()  # the slot is free again as soon as all columns are copied
            found[key] = tensor if dims is None else tensor.reshape(*dims, *tensor.shape[1:])
        return found

    def tensor(self, key: Key, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A column, or a part of it, as a tensor on the same memory."""
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if self.columns[key].dtype is torch.bfloat16 else tensor


class State(enum.Enum):
    """Who owns a slot."""

    FREE = "free"
    WRITING = "writing"
    FULL = "full"
    READING = "reading"


class Row:
    """One time step of a slot. Arrays are `[N, …]`; policy views lose the lane dimension when unbatched."""

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
    reward: np.ndarray[Any, Any]  # the first of them, as one number per lane where it is one
    mask: np.ndarray[Any, Any] | None  # False: this lane made no frame; only where the env's rows are not whole
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    done: np.ndarray[Any, Any]
    after: tuple[np.ndarray[Any, Any], ...]  # the observation of the following step
    copies: tuple[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], ...]  # (after, next) pairs
    place: tuple[int, int] | None  # slot and step, where the env made the slot and knows it by a number
    narrow: dict[int, Row]  # its first positions, where fewer are decided about (see core/policies/buckets.py)

    @property
    def flags(self) -> tuple[np.ndarray[Any, Any], ...]:
        """What says that episodes ended, in the order of `FLAGS`."""
        return self.done, self.terminated, self.truncated

    def leave_out(self, lanes: Sequence[int]) -> None:
        """Say that this step is no frame of these lanes."""
        if self.mask is not None:
            self.mask[lanes] = False
        for array in (*self.next, *self.rewards):
            array[lanes] = 0
        for flag in self.flags:
            flag[lanes] = False


class Finals(NamedTuple):
    """What a compact slot keeps beside its columns: the successors that are no later row's observation."""

    lane: np.ndarray[Any, Any]  # [F]
    step: np.ndarray[Any, Any]  # [F]
    values: dict[Key, np.ndarray[Any, Any]]  # [F, …]
    steps: int  # of the rollout
    size: tuple[int, ...]  # the batch size they belong to


class Slot:
    """One block of memory and its columns; or columns that lie elsewhere, as a worker's lanes of a slot they share."""

    def __init__(
        self, layout: Layout, index: int = 0, arrays: Mapping[Key, np.ndarray[Any, Any]] | None = None
    ) -> None:
        self.layout, self.index = layout, index
        self.block = layout.block() if arrays is None else np.zeros(0, np.uint8)  # its own memory
        given = arrays or {}
        self._loose = {
            key: given[key] if key in given else leaf.column(layout.steps, layout.lanes)
            for key, leaf in layout.loose.items()
        }
        self.arrays = {**(layout.arrays(self.block) if arrays is None else arrays), **self._loose}
        self.state = State.FREE
        self.place: int | None = None  # what the env that made it calls it
        self.finals: Finals | None = None
        self._rows: tuple[RowKeys, list[Row]] | None = None
        self._loan: list[weakref.ref[np.ndarray[Any, Any]]] = []
        self._ended: deque[Any] = deque()  # those of the loan that nobody looks at any more
        keys = [(*root, flag) for root in ((), ("next",)) for flag in FLAGS]
        self._flags = [self.arrays[key] for key in keys if key in self.arrays]

    def clear_flags(self) -> None:
        """All flags False: the consumer of the last batch may have written to them."""
        for flag in self._flags:
            flag[...] = False

    def put(self, key: Key, values: torch.Tensor) -> None:
        """Write the first rows of a column."""
        self.arrays[key][: len(values)] = values.numpy()

    def hand_over(self) -> dict[Key, np.ndarray[Any, Any]]:
        """The references of all loose columns, which the slot then holds no more."""
        taken = {key: column.copy() for key, column in self._loose.items()}
        for column in self._loose.values():
            column[...] = None
        return taken

    def copied(self) -> dict[Key, np.ndarray[Any, Any]]:
        """Copies of all columns, each its own: keeping one keeps one."""
        columns = {key: leaf for key, leaf in self.layout.columns.items() if key not in self._loose}
        return {key: leaf.copied(self.arrays[key]) for key, leaf in columns.items()} | self.hand_over()

    def lend(self) -> dict[Key, np.ndarray[Any, Any]]:
        """The columns for a consumer to keep; the slot is `returned` when nothing looks at any of them any more."""
        owners = {key: array.view() for key, array in self.arrays.items() if key not in self._loose}
        # In a finalizer Python swallows Ctrl-C, and what the finalizer had to do is not done. This one has no Python
        # in it that could be interrupted; it is atomic, in whatever thread the last tensor is dropped.
        self._ended = deque()
        self._loan = [weakref.ref(owner, self._ended.append) for owner in owners.values()]
        return owners | self.hand_over()

    @property
    def returned(self) -> bool:
        """Whether nothing looks any more at what was lent."""
        return len(self._ended) == len(self._loan)

    def cut(self, keys: RowKeys, current: Sequence[np.ndarray[Any, Any]]) -> Iterator[Row]:
        """This slot's rows in order of time. Few steps: cut once and kept. Many: cut in chunks and forgotten."""
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

        def seen(key: Key) -> np.ndarray[Any, Any]:  # as policies see it
            part = arrays[key][a:b] if batched else arrays[key][a:b, 0]
            return part if dims is None else part.reshape(b - a, *dims, *part.shape[2:])

        def tensor_rows(key: Key) -> Sequence[Any]:
            if columns[key].loose:
                return [ObjectColumn(columns[key], array, batched) for array in arrays[key][a:b]]
            return self.layout.tensor(key, seen(key)).unbind(0)

        def policy_rows(key: Key) -> list[np.ndarray[Any, Any]]:
            part = seen(key)
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
        # A compact slot has no column for successors: the env writes them where the following step will read them.
        nexts = [
            list(arrays[("next", *k)][a:b]) if ("next", *k) in arrays else after
            for k, after in zip(keys.observation, afters)
        ]
        rewards = [list(arrays[("next", *k)][a:b]) for k in keys.reward]
        numbers = columns[("next", *keys.reward[0])].shape == (1,)
        reward = flat(("next", *keys.reward[0])) if numbers else rewards[0]
        mask = list(arrays[MASK][a:b]) if MASK in arrays else [None] * (b - a)
        done = flat(("next", "done"))
        terminated, truncated = flat(("next", "terminated")), flat(("next", "truncated"))
        # Tuples by `zip`, not one by one: a long rollout is cut anew every time.
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
            if self.place is not None:  # what lies beyond this slot has none
                beyond = successor and successor[0] is after[0] and a + t + 1 == self.layout.steps
                row.place = None if beyond else (self.place, a + t)
            yield row


def _tuples(columns: Sequence[Sequence[Any]], steps: int) -> Iterator[tuple[Any, ...]]:
    """For each step one of every column."""
    return zip(*columns) if columns else itertools.repeat((), steps)


class RowKeys:
    """Which columns a row shows to whom, in which order."""

    def __init__(
        self,
        spec: EnvSpec,
        inputs: Sequence[Key] = (),
        outputs: Sequence[Key] | None = None,
        *,
        copied: bool = True,  # whether the loop copies successors to the following row
    ) -> None:
        self.copied = copied
        # Where no policy is at hand (lanes in threads and processes, steps by hand) only actions come from outside.
        self.inputs, self.outputs = tuple(inputs), tuple(spec.action if outputs is None else outputs)
        self.action, self.observation, self.reward = tuple(spec.action), tuple(spec.observation), tuple(spec.reward)


class Pool:
    """At most `limit` lendable slots, made when first needed, and one reserve that never leaves.

    `acquire` never waits: when the consumer holds every lendable slot, the reserve is filled instead and the batch
    is copied out of it. One batch of memory per slot in flight, and never a batch overwritten.
    """

    def __init__(self, layout: Layout, limit: int = 2, make: Callable[[Layout, int], Slot] = Slot) -> None:
        self.layout = layout
        self._limit, self._make = limit, make
        self._slots: list[Slot] = []
        self._lent: list[Slot] = []
        self._free: deque[Slot] = deque()
        self._reserve: Slot | None = None

    def acquire(self) -> Slot:
        """A slot to write to."""
        for slot in [slot for slot in self._lent if slot.returned]:
            self._lent.remove(slot)
            slot.state = State.FREE
            self._free.append(slot)
        if self._free:
            slot = self._free.popleft()
        elif len(self._slots) < self._limit:
            slot = self._make(self.layout, len(self._slots))
            self._slots.append(slot)
        else:
            slot = self._reserve = self._reserve or self._make(self.layout, -1)
        slot.state = State.WRITING
        return slot

    def lend(self, slot: Slot) -> dict[Key, np.ndarray[Any, Any]]:
        """The columns of a full slot for the consumer to keep; lent, or copied if it is the reserve."""
        if slot is self._reserve:
            slot.state = State.FREE
            return slot.copied()
        slot.state = State.READING
        self._lent.append(slot)
        return slot.lend()

    def release(self, slot: Slot) -> None:
        """Take back a slot that was never lent."""
        slot.hand_over()
        slot.state = State.FREE
        if slot is not self._reserve:
            self._free.append(slot)
