"""Placement: where the workers of a collector live, how they are reached, and which process writes to a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from reap._system.messages.pickling import pack
from reap.backends.base import Transport
from reap.backends.local.inline_workers import InlineTransport
from reap.backends.local.shared_memory import SharedMemoryTransport
from reap.backends.nested_workers import NestedWorkers
from reap.buffers.replay import ReplayBuffer
from reap.collectors.buffer_writers import WriteOptions, Writer, WriterMaker
from reap.collectors.options import Options
from reap.errors import UsageError


class Placement:
    """Places workers in processes of this machine that share memory with this one; subclasses place them elsewhere."""

    pack: ClassVar[Callable[..., Any]] = staticmethod(pack)  # pickles users' objects for the workers
    preempts: ClassVar[bool] = True  # whether rollouts can be cut short
    workers_run_free: ClassVar[bool] = True  # whether workers that write to a buffer collect without being asked
    options_by_worker: Sequence[Mapping[str, Any]] | None = None  # the options of each worker, if they differ
    update_interval = -1  # the collector sends weights after this many batches; -1: only when the user says so

    def workers_write(self, buffer: Any) -> bool:
        """Return whether workers write to this buffer themselves: any process can write to reap's own."""
        return isinstance(buffer, ReplayBuffer)

    def transport(self, plans: Sequence[Any], options: Options) -> Transport:
        """Return the transport that reaches workers with these plans."""
        buffer = options.replay_buffer
        fds = buffer.handle()[0] if isinstance(buffer, ReplayBuffer) else ()
        return SharedMemoryTransport(start_method=options.start_method, buffer=fds)

    def writer(self, options: Options) -> Any:
        """Return the factory of the workers' buffer writers; None if workers do not write to the buffer themselves."""
        if not self.workers_write(options.replay_buffer):
            return None
        writing = WriteOptions.of(options)
        maker, parts = self._writer_maker(writing, options)
        # Packed only to fail early: the job carries it.
        self.pack(maker, "what writes to the replay buffer", {**writing.user_code, **parts})
        return maker

    def _writer_maker(self, writing: WriteOptions, options: Options) -> tuple[Any, Mapping[str, Any]]:
        """Return the factory of the workers' buffer writers, and the user's objects in it that errors can name."""
        buffer = options.replay_buffer
        maker = WriterMaker(writing, buffer.handle()[1], buffer.transforms, options.timeout)
        return maker, {"a transform of the replay buffer": buffer.transforms}

    def nested_workers(self, options: Options, workers: int) -> NestedWorkers | None:
        """Return the processes inside each of this many workers; None if a worker is a single loop."""
        return None


class InlinePlacement(Placement):
    """Places workers in this process, for debugging, in place of another placement."""

    workers_run_free = False  # in the background, a thread of this process takes their rollouts one after another

    def __init__(self, instead_of: Placement) -> None:
        self._replaced = instead_of
        self.pack, self.preempts = instead_of.pack, instead_of.preempts  # type: ignore[misc, method-assign]
        self.options_by_worker, self.update_interval = instead_of.options_by_worker, instead_of.update_interval

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the replaced placement's class has."""
        return getattr(self._replaced, name)

    def workers_write(self, buffer: Any) -> bool:
        # The second half excludes buffers in Ray actors: only Ray's workers write to those themselves.
        return self._replaced.workers_write(buffer) and super().workers_write(buffer)

    def transport(self, plans: Sequence[Any], options: Options) -> Transport:
        return InlineTransport()

    def writer(self, options: Options) -> Any:
        if super().writer(options) is None:
            return None
        packed = pack(WriteOptions.of(options), "postproc")  # each worker has copies of hooks and postproc
        return lambda fds, worker: Writer(packed.unpack(), options.replay_buffer)

    def nested_workers(self, options: Options, workers: int) -> NestedWorkers | None:
        if self._replaced.nested_workers(options, workers) is not None:
            raise UsageError("workers='inline' has one loop in each worker; leave collector_class out while you debug")
        return None
