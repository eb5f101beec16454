"""ReplayBuffer: any number of writers add frames, and any number of readers draw samples.

    extend ──► reserve → write → commit ──► rows ──► draw → read → still there? ──► sample
    (any process or thread)                         (any process or thread)

Guarantees: a sample holds committed rows only, each exactly as its writer wrote it. If a writer dies in any way, only
its own unfinished rows are lost. Slices and n-step windows never cross the end of an episode, rows of two writers, the
end of the ring or rows lost in a crash.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from reap._system.forks import renew
from reap.buffers import arguments
from reap.buffers.arguments import LARGEST
from reap.buffers.limiter import SamplesPerInsert
from reap.buffers.prefetch import Prefetch
from reap.buffers.row_reader import RowReader
from reap.buffers.row_source import Feed, sample_while
from reap.buffers.samplers import RandomSampler, Sampler
from reap.buffers.snapshots import dump, load_dump, restore, snapshot
from reap.buffers.storage.batch_writer import BatchWriter, as_batch
from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.ring import COUNT
from reap.buffers.storage.storages import LazyTensorStorage, Storage
from reap.buffers.transforms import Transforms
from reap.errors import NoSpace, ReapError, Starved, UsageError, WrongArgument, WrongState

DEFAULT_SIZE = 1000
_MOST_AHEAD = 1000  # the most samples a thread may prepare


class ReplayBuffer:
    """A replay buffer: stores one row per frame and draws samples from the rows.

    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
    >>> buffer.extend(batch)                    # [T] or [N, T]: a row for each frame
    >>> sample = buffer.sample()                # [256]

    Args:
        storage: how many rows there are, and where they lie: `LazyTensorStorage` (memory), `LazyMemmapStorage` (disk).
        sampler: `RandomSampler()` by default.
        batch_size: rows per sample; `sample(n)` overrides it.
        prefetch: how many samples a thread prepares ahead.
        transform: called with every sample; its `inv`, if it has one, with all data before it is written. `MultiStep`
            also reads the rows that follow.
        collate_fn: called with a sample before the transform.
        pin_memory: return samples in pinned memory.
        generator: source of random numbers; torch's global generator by default.
        writer: only a round-robin writer is accepted, since rows are always written in turn.
        dim_extend, shared, compilable, delayed_init: accepted for compatibility with TorchRL; they have no effect.
        limiter: `SamplesPerInsert` keeps a ratio between the rows a background collector writes and those sampled.
    """

    _with_info = False  # whether samples contain the info about their rows (index, weights, slice ends)

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        limiter: SamplesPerInsert | None = None,
    ) -> None:
        self._storage: Storage = made("storage", storage, Storage, lambda: LazyTensorStorage(DEFAULT_SIZE))
        self._sampler: Sampler = made("sampler", sampler, Sampler, RandomSampler)
        if writer is not None and "RoundRobin" not in str(getattr(writer, "__name__", type(writer).__name__)):
            raise UsageError(
                f"writer must be a round-robin writer, got {arguments.shown(writer)}: rows are always written in turn"
            )
        self._batch_size = None if batch_size is None else arguments.whole(batch_size, "batch_size", 1, LARGEST)
        prefetch = 0 if prefetch is None else arguments.whole(prefetch, "prefetch", 0, most=_MOST_AHEAD)
        pin = arguments.flag(pin_memory, "pin_memory")
        self._generator = arguments.generator(generator, "generator")
        for name, value in (("shared", shared), ("compilable", compilable), ("delayed_init", delayed_init)):
            arguments.flag(value, name, optional=True)
        if dim_extend is not None:
            arguments.whole(dim_extend, "dim_extend", 0)
        transforms = Transforms([] if transform is None else [transform])
        self._collate = arguments.function(collate_fn, "collate_fn")
        if limiter is not None and not isinstance(limiter, SamplesPerInsert):
            raise WrongArgument(f"limiter must be a SamplesPerInsert, got {type(limiter).__name__}")
        if limiter is not None and limiter.min_size > self._storage.max_size:
            raise UsageError(f"min_size={limiter.min_size} rows never fit into max_size={self._storage.max_size}")
        self.limiter, self.feed = limiter, Feed()
        self._memory: BufferFiles = self._storage.open()
        self._cuts = self._storage.cuts or self._sampler.cuts
        self._reader = RowReader(
            self._memory, self._sampler, self._cuts, with_info=self._with_info, device=self._storage.device, pin=pin
        )
        self._writer = BatchWriter(self._memory, self._cuts, self._reader.check_names)
        self._set_transforms(transforms)
        self._sampler_lock = threading.RLock()  # guards the sampler and the episode index; rows need no lock
        self._ahead, self._round_ended = prefetch, False
        self._prefetcher: Prefetch[tuple[Any, dict[Any, Any], bool]] | None = None
        renew(self, _sampler_lock=threading.RLock, _prefetcher=lambda: None)  # a fork has the rows, but not our threads

    # ---- writing ------------------------------------------------------------------------------------------------

    def extend(self, data: TensorDictBase | Tensor | Sequence[TensorDictBase | Tensor]) -> Tensor:
        """Write one row per frame of a batch `[…, T]` and return the row numbers.

        Frames whose mask is False are left out. A list of single frames is accepted, too.
        """
        return torch.from_numpy(self._writer.write(as_batch(data, self._transforms.inverse)))

    def add(self, data: TensorDictBase | Tensor) -> int:
        """Write one frame and return its row number."""
        if not isinstance(data, (Tensor, TensorDictBase)):
            raise WrongArgument(f"add takes a TensorDict or a tensor, got {type(data).__name__}")
        return int(self._writer.write(as_batch(data.unsqueeze(0), self._transforms.inverse))[0])

    def empty(self) -> None:
        """Remove all rows."""
        with self._sampler_lock:
            self._memory.ring.empty()
            self._sampler.empty()
            if self._prefetcher is not None:
                self._prefetcher.discard()

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return the next sample; with `return_info`, also a dictionary of row numbers and the sampler's info."""
        if batch_size is not None:
            batch_size = arguments.whole(batch_size, "batch_size", 1, LARGEST)
        count = batch_size or self._batch_size
        if count is None:
            raise WrongState("no batch_size: give one to the buffer or to sample()")
        if self._ahead and batch_size in (None, self._batch_size):
            if (prefetcher := self._prefetcher) is None:
                with self._sampler_lock:  # if several threads sample at once, only one creates it
                    prefetcher = self._prefetcher = self._prefetcher or Prefetch(self._ahead)
            make = functools.partial(self._sample, count, prefetcher.closing.is_set, threading.get_ident())
            sample, info, self._round_ended = prefetcher.next(make)
        else:
            sample, info, self._round_ended = self._sample(count)
        return (sample, info) if return_info else sample

    def sample_while(self, collector: Any, batch_size: int | None = None, return_info: bool = False) -> Iterator[Any]:
        """Yield samples for as long as a collector fills this buffer in the background: a learner's whole loop.

        >>> collector.start()
        >>> for sample in buffer.sample_while(collector):
        ...     learn(sample)

        The loop ends when the collector has made all its frames, whether learner or collector is faster; with a
        limiter, when as many rows were sampled as its ratio asks for. After the collector's `shutdown()` it ends at
        once. An error in the background is raised before the next sample, with its cause.
        """
        self.feed.check(collector)
        return sample_while(collector, functools.partial(self.sample, batch_size, return_info), lambda: self.owed)

    def _sample(
        self, count: int, closing: Callable[[], bool] | None = None, for_thread: int | None = None
    ) -> tuple[Any, dict[Any, Any], bool]:
        """Return a sample, its info, and whether it is the last of a round. Wait for missing rows until `closing()`.

        `for_thread`: the thread that the sample is for, if it is not the calling one.
        """
        try:
            return self._sample_now(count)
        except Starved as why:
            patience = None if self.limiter is None else self.limiter.timeout
            try_again = functools.partial(self._sample_now, count)
            return self.feed.retry(why, try_again, lambda: self.write_count, patience, closing, for_thread)

    def _sample_now(self, count: int, limited: bool = True) -> tuple[Any, dict[Any, Any], bool]:
        """Like `_sample`, but raise `Starved` instead of waiting. Not `limited`: the limiter no longer applies."""
        limiter = self.limiter if limited else None
        with self._sampler_lock:
            if limiter is not None:
                limiter.check(self._memory.ring)
            try:
                rows, info, columns = self._reader.draw(count, self._generator)
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, ReapError) or "alloc" not in str(error).lower():
                    raise
                raise NoSpace(f"batch_size={count}: such a sample does not fit into memory ({error!r:.200})") from None
            last = self._sampler.ran_out
        count = len(rows)  # fewer at the end of a round, or where episodes are short
        if limiter is not None:
            limiter.count(self._memory.ring, count)
        sample = self._reader.deliver(columns, count, info)
        if self._collate is not None:
            sample = self._collate(sample)
        return self._transforms(sample), info, last

    def __getitem__(self, index: Any) -> Any:
        """Return rows by number, transformed like samples. A slice skips rows being written. Writers wait meanwhile."""
        if not len(self):
            raise WrongState("the buffer is empty: there is no row to look at")
        if isinstance(index, Tensor):
            index = _array(index, "index")
        with self._sampler_lock:
            sample, chosen = self._reader.at(index)
        sample = self._transforms(sample)
        if np.ndim(chosen) == 0:
            return sample[0]
        return sample if chosen.ndim == 1 else sample.reshape(chosen.shape)

    def __iter__(self) -> Iterator[Any]:
        """Yield samples: without replacement until every row was seen once, with other samplers for ever."""
        if self._batch_size is None:
            raise WrongState("no batch_size: give one to the buffer to iterate over it")
        self._round_ended = False
        while not self._round_ended:
            yield self.sample()

    def next(self) -> Any:
        """Return the next sample, without end."""
        return self.sample()

    def __len__(self) -> int:
        return len(self._memory.ring)

    # ---- priorities ---------------------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of these rows. Does nothing if the sampler has no priorities."""
        if isinstance(index, tuple) and index:
            index = index[0]
        rows, values = np.atleast_1d(_array(index, "index")), np.atleast_1d(_array(priority, "priority", torch.float64))
        with self._sampler_lock:
            self._sampler.update_priority(self._memory, rows, values)

    # ---- sharing ------------------------------------------------------------------------------------------------

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Do nothing and return the buffer: its memory can be shared at any time. See `handle`."""
        return self

    def handle(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Return what another process needs to open this buffer: descriptors to inherit and a description to send.

        >>> fds, description = buffer.handle()            # here
        >>> buffer = ReplayBuffer.open(fds, description)  # in the other process, with its descriptor numbers
        """
        about = {"capacity": self._memory.capacity, "cuts": self._cuts, "batch": self._batch_size}
        return self._memory.fds, {**about, "place": self._memory.place, "limiter": self.limiter}

    @classmethod
    def open(cls, fds: Sequence[int], description: Mapping[str, Any], **options: Any) -> ReplayBuffer:
        """Open a buffer that another process made. The returned buffer owns the descriptors from now on."""
        storage = LazyTensorStorage(description["capacity"])
        storage.memory = BufferFiles(description["capacity"], fds, place=description["place"])
        storage.cuts = description["cuts"]
        known = {"batch_size": description["batch"], "limiter": description["limiter"]}
        return cls(storage=storage, **{**known, **options})

    def watch(self, timeout: float | None, worker: int | None = None) -> None:
        """Raise `WorkerSilent` from now on, naming the culprit, after waiting `timeout` seconds for another process.

        `worker`: the number under which other processes' errors name this one. A collector calls this on its own buffer
        and in its workers.
        """
        if timeout is not None:
            timeout = arguments.number(timeout, "timeout", 0, above=True, endless=True)
        self._memory.ring.lock.patience = timeout
        self._memory.ring.worker = None if worker is None else arguments.whole(worker, "worker", 0)

    def __reduce__(self) -> Any:
        raise UsageError(
            "a buffer cannot be copied to another process; send buffer.handle(), and give it to ReplayBuffer.open there"
        )

    # ---- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return rows, marks and the sampler's state, rows in the order of the ring. Writers wait meanwhile."""
        with self._sampler_lock:
            return snapshot(self._memory, self._sampler)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by a state from `state_dict`. The storage must be at least as large as the saved one.

        In a larger storage the oldest row becomes row 0, and new rows are written after the newest.
        A state that is damaged, or of another kind of buffer, raises an error and changes nothing.
        """
        with self._sampler_lock:
            restore(self._memory, self._sampler, state)
            if self._prefetcher is not None:
                self._prefetcher.discard()

    def dumps(self, path: str | Path) -> None:
        """Write everything to a directory. A dump already there stays intact until the new one is complete."""
        dump(path, self.state_dict())

    def loads(self, path: str | Path) -> None:
        """Read back what `dumps` wrote. A damaged dump raises `CorruptState` and changes nothing."""
        self.load_state_dict(load_dump(path))

    dump = save = dumps
    load = loads

    # ---- parts --------------------------------------------------------------------------------------------------

    @property
    def write_count(self) -> int:
        """The number of rows ever written."""
        return int(self._memory.ring.words[COUNT])

    @property
    def may_write(self) -> bool:
        """Whether a background collector should go on; False while the limiter makes it rest."""
        return self.limiter is None or self.limiter.may_write(self._memory.ring)

    @property
    def owed(self) -> bool:
        """Whether more rows must be sampled to meet the limiter's ratio for the rows already written."""
        return self.limiter is not None and self.limiter.behind(self._memory.ring) > 0

    @property
    def storage(self) -> Storage:
        """The storage that holds the rows."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """The sampler that draws rows."""
        return self._sampler

    @property
    def batch_size(self) -> int | None:
        """The number of rows per sample."""
        return self._batch_size

    @property
    def initialized(self) -> bool:
        """Whether the columns are known."""
        return self._memory.rows is not None

    @property
    def transforms(self) -> tuple[Any, ...]:
        """The transforms, called in this order with every sample; inverses, in reverse order, with what is written."""
        return self._transforms.all

    def append_transform(self, transform: Any) -> ReplayBuffer:
        """Add a transform after the others."""
        return self.insert_transform(len(self._transforms.all), transform)

    def insert_transform(self, index: int, transform: Any) -> ReplayBuffer:
        """Add a transform before the one at `index`."""
        self._set_transforms(self._transforms.inserted(index, transform))
        return self

    def _set_transforms(self, transforms: Transforms) -> None:
        self._transforms = transforms
        self._reader.set_multistep(transforms.multistep)

    def set_rng(self, generator: torch.Generator) -> None:
        """Set the source of random numbers."""
        self._generator = arguments.generator(generator, "generator")

    def shutdown(self) -> None:
        """End the thread that prepares samples."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None

    def __del__(self) -> None:
        if contextlib is not None:  # None while the interpreter shuts down: nothing to do then
            with contextlib.suppress(Exception):
                if self._prefetcher is not None:
                    self._prefetcher.request_stop()

    def __repr__(self) -> str:
        parts = f"storage={self._storage}, sampler={self._sampler}, batch_size={self._batch_size}"
        return f"{type(self).__name__}({parts}, rows={len(self)}, written={self.write_count})"


def made(name: str, part: Any, kind: type[Any], default: Callable[[], Any]) -> Any:
    """Return a part of a buffer: `part` itself, what `part` makes if it is a factory, or the default."""
    if isinstance(part, kind):
        return part
    part = default if part is None else part
    try:
        made = part() if callable(part) else part
    except TypeError as error:  # the factory needs arguments
        raise WrongArgument(
            f"{name} must be a {kind.__name__} or a function without arguments that returns one: {error}"
        ) from error
    if not isinstance(made, kind):
        raise WrongArgument(
            f"{name} must be a {kind.__name__} of reap.data or a function without arguments that returns one; got "
            f"{type(made).__name__}"
        )
    return made


def _array(value: Any, name: str, dtype: torch.dtype | None = None) -> np.ndarray[Any, Any]:
    try:
        tensor = torch.as_tensor(value).detach()
        if tensor.is_complex():
            raise TypeError
        found: np.ndarray[Any, Any] = tensor.to("cpu", dtype).numpy()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise WrongArgument(
            f"{name} must be a tensor, or numbers, one for each row; got {arguments.shown(value)}"
        ) from None
    return found
