"""Buffer writers: write batches to a replay buffer. This process, the background thread and workers all use them.

rollout ─► batch ─► split ─► postproc ─► hook ─┬─► consumer
                                               └─► sink.write ─► buffer.extend    whole rollouts
                                                                 buffer.add       step by step
                                                                 buffer.extend    whole episodes, when they end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDict, TensorDictBase

from reap.buffers.replay import ReplayBuffer
from reap.collectors.options import Options
from reap.core.columns.assemble_frames import mark_frames
from reap.core.columns.assemble_ragged import assembler
from reap.core.slot import FIRST, FRAME, MASK, Layout, Slot
from reap.errors import UsageError, WrongArgument, WrongState
from reap.spec import Key
from reap.trajectories import FINAL, WholeTrajectories, split_trajectories


@dataclass(frozen=True)
class WriteOptions:
    """The collector options that matter for writing to a buffer."""

    by_step: bool
    whole: bool
    group: int | None
    split: bool
    truncate: bool
    postproc: Callable[[Any], Any] | None
    before: Callable[[], Any] | None
    hook: Callable[[Any], Any] | None

    @classmethod
    def of(cls, options: Options) -> WriteOptions:
        """Return the write options among a collector's options."""
        return cls(
            by_step=not options.extend_buffer,
            whole=options.trajs_per_batch is not None,
            group=options.trajs_per_write,
            split=bool(options.split_trajs),
            truncate=options.set_truncated,
            postproc=options.postproc,
            before=options.pre_collect_hook,
            hook=options.post_collect_hook,
        )

    @property
    def user_code(self) -> dict[str, Any]:
        """The user's functions among these, by option name."""
        return {"postproc": self.postproc, "pre_collect_hook": self.before, "post_collect_hook": self.hook}


class Sink(Protocol):
    """Writes a collector's batches to a replay buffer, in the way the options ask for."""

    def write(self, batch: TensorDictBase, worker: int = 0) -> None:
        """Write a batch `[T]` or `[N, T]` that this worker has collected."""

    def forget(self) -> None:
        """Drop the frames held back of unfinished episodes: after a new seed or state, trajectory ids may repeat."""


class _Batches:
    """Writes every batch at once, with `extend`."""

    def __init__(self, buffer: Any) -> None:
        self._buffer, self._ours = buffer, isinstance(buffer, ReplayBuffer)

    def write(self, batch: TensorDictBase, worker: int = 0) -> None:
        self._buffer.extend(_storable(batch, self._ours))

    def forget(self) -> None:
        pass


class _Steps(_Batches):
    """Writes every step with a call of its own."""

    def write(self, batch: TensorDictBase, worker: int = 0) -> None:
        batch = _storable(batch, self._ours)
        for t in range(batch.batch_size[-1]):
            if self._ours:  # keep the time dimension: reap's buffer would take the lanes for steps without it
                self._buffer.extend(batch[..., t : t + 1])
            else:
                self._buffer.add(batch[..., t])


class _Episodes(_Batches):
    """Writes only whole episodes, each in adjacent rows, `group` of them per write (None: all that have ended)."""

    def __init__(self, buffer: Any, group: int | None) -> None:
        super().__init__(buffer)
        self._group = group
        self.forget()

    def write(self, batch: TensorDictBase, worker: int = 0) -> None:
        whole = self._whole
        whole.feed(_storable(batch, self._ours), worker)
        while len(whole) >= (self._group or 1):
            self._buffer.extend(_storable(whole.take(self._group or len(whole), "cat"), self._ours))

    def forget(self) -> None:
        self._whole = WholeTrajectories()


def _storable(batch: TensorDictBase, ours: bool) -> TensorDictBase:
    """Return the batch without entries no buffer stores; for a buffer that is not reap's, without dimension names."""
    if batch.get(FINAL, None) is not None:  # the successors a compact batch keeps apart
        batch = batch.exclude(FINAL)
    if batch.get(FIRST, None) is not None:  # it is kept once per rollout, and would be stored with every row
        batch = batch.exclude(FIRST)
    return batch if ours else _without_names(batch.copy())


def _without_names(td: TensorDictBase) -> TensorDictBase:
    td.names = None
    for value in td.values():
        if isinstance(value, TensorDict):
            _without_names(value)
    return td


def sink_for(options: WriteOptions, buffer: Any) -> Sink:
    """Return the sink that writes to this buffer as the options say; raise if the buffer cannot take that."""
    needed = "add" if options.by_step else "extend"
    if not callable(getattr(buffer, needed, None)):
        raise WrongArgument(f"replay_buffer needs a method {needed}(), got {type(buffer).__name__}")
    if options.whole:
        if getattr(getattr(buffer, "storage", None), "ndim", 1) != 1:
            raise UsageError("trajs_per_batch writes episodes as rows; the buffer's storage must have ndim=1")
        return _Episodes(buffer, options.group)
    return _Steps(buffer) if options.by_step else _Batches(buffer)


def mark_truncated(arrays: Any, layout: Layout) -> None:
    """Mark the last frame of every lane as truncated and done, which changes what the learner sees, not the env."""
    if FRAME in layout.columns:
        mark_frames(arrays)
        return
    marked = [key for key in arrays if (key[0], key[-1]) == ("next", "truncated") and key not in layout.look.hidden]
    if not marked:
        raise WrongState("set_truncated marks the last step as truncated, but this env has no such flag; leave it out")
    flags = [(*key[:-1], flag) for key in marked for flag in ("truncated", "done")]
    if MASK not in arrays:
        for flag in flags:
            arrays[flag][-1] = True
        return
    mask = arrays[MASK]
    lane = np.flatnonzero(mask.any(0))  # lanes that have a frame at all
    last = len(mask) - 1 - mask[::-1, lane].argmax(0)
    for flag in flags:
        arrays[flag][last, lane] = True


def post_processed(
    batch: TensorDictBase,
    *,
    split: Callable[[TensorDictBase], TensorDictBase] | None,
    postproc: Callable[[Any], Any] | None,
) -> TensorDictBase:
    """Split a batch and post-process it; return what is then shown to the hook, and delivered or written."""
    if split is not None:
        batch = split(batch)
    if postproc is not None:
        batch = postproc(batch)
        if batch is None:
            raise UsageError("postproc returned None; it must return the batch")
    return batch


@dataclass(frozen=True)
class WriterMaker:
    """Makes a worker's writer. It is sent to the worker process and called there."""

    options: WriteOptions
    description: Any
    transforms: Sequence[Any]
    timeout: float | None

    def __call__(self, fds: Sequence[int], worker: int) -> Writer:
        """Return the writer of this worker; `fds` are the buffer's file descriptors in the worker's process."""
        buffer = ReplayBuffer.open(fds, self.description)
        buffer.watch(self.timeout, worker)
        for transform in self.transforms:
            buffer.append_transform(transform)
        return Writer(self.options, buffer)


class Writer:
    """Writes a worker's full slots to the buffer, in the worker itself."""

    def __init__(self, options: WriteOptions, buffer: Any) -> None:
        self._options, self.buffer, self._sink = options, buffer, sink_for(options, buffer)
        self.before, self.hook, self.postproc = options.before, options.hook, options.postproc

    @property
    def wanted(self) -> bool:
        """Whether to collect another rollout; False while the buffer's limiter stops writers."""
        return bool(self.buffer.may_write)

    def write(self, slot: Slot) -> None:
        """Write the contents of a full slot to the buffer."""
        layout, options = slot.layout, self._options
        arrays: dict[Key, Any] = {key: slot.arrays[key] for key in layout.offsets} | slot.take_references()
        if options.truncate:
            mark_truncated(arrays, layout)
        if self.postproc is None and self.hook is None:
            batch = assembler(layout)(arrays, layout.in_place)  # views: the buffer copies them
        else:
            batch = assembler(layout)(arrays, layout).clone()  # they may keep it, and the slot is filled again
        split = partial(split_trajectories, prefix="collector") if options.split else None
        batch = post_processed(batch, split=split, postproc=self.postproc)
        if self.hook is not None:
            self.hook(batch)
        self._sink.write(batch)

    def forget(self) -> None:
        """Drop the frames of unfinished episodes, which will never be completed."""
        self._sink.forget()
