"""RayReplayBuffer: a replay buffer in a Ray actor; any process in the cluster can write to it and sample from it.

    extend ──► columns, one object ──► actor: ReplayBuffer ──► columns, one object ──► sample
    (actors of a RayCollector, or this process)                                         (this process)

Calls are synchronous: rows of an `extend` that has returned can be sampled.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from reap._system.forks import guard, refuse_use
from reap._system.messages.pickling import dumps
from reap.backends.remote.ray import CLUSTER, import_ray
from reap.buffers.replay import ReplayBuffer
from reap.buffers.row_source import Feed, sample_while
from reap.errors import Starved, UsageError, WorkerDied, WrongArgument, WrongState

_THREADS = 4  # of the actor, so that samplers do not wait for writers


class _Columns:
    """A TensorDict or a tensor as NumPy arrays, whose memory Ray transfers unchanged."""

    def __init__(self, data: TensorDictBase | Tensor) -> None:
        whole = {(): data} if isinstance(data, Tensor) else dict(data.items(True, True))
        self._size = None if isinstance(data, Tensor) else data.batch_size
        self._columns = {key: _array(value) for key, value in whole.items()}

    def unpack(self, *, copy: bool) -> Any:
        """Return the TensorDict or tensor. Without a copy it is read-only: other processes may share its memory."""
        found = {
            key: torch.from_numpy(np.array(value) if copy else value) if isinstance(value, np.ndarray) else value
            for key, value in self._columns.items()
        }
        return found[()] if self._size is None else TensorDict(found, self._size)


def _array(value: Any) -> Any:
    plain = isinstance(value, Tensor) and value.dtype is not torch.bfloat16
    return np.ascontiguousarray(value.detach().cpu().numpy()) if plain else value


def _packed(value: Any) -> Any:
    if isinstance(value, (TensorDictBase, Tensor)):
        return _Columns(value)
    return tuple(map(_packed, value)) if isinstance(value, tuple) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Columns):
        return value.unpack(copy=True)
    return tuple(map(_unpacked, value)) if isinstance(value, tuple) else value


class _BufferActor:
    """The actor class: holds the buffer and forwards calls to it."""

    def begin(self, make: bytes, path: Sequence[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._buffer = pickle.loads(make)()

    def call(self, name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        given = [one.unpack(copy=False) if isinstance(one, _Columns) else one for one in arguments]
        return _packed(getattr(self._buffer, name)(*given, **options))

    def sample_now(self, batch_size: int | None, return_info: bool, limited: bool) -> Any:
        """Return a sample, or raise `Starved` at once: the caller knows better whether waiting is worthwhile."""
        count = self._buffer.batch_size if batch_size is None else batch_size
        sample, info, _ = self._buffer._sample_now(count, limited)
        return _packed((sample, info) if return_info else sample)

    def attribute(self, name: str) -> Any:
        return len(self._buffer) if name == "len" else getattr(self._buffer, name)


class _Client:
    """A handle of the buffer, which can be sent to other processes of the cluster."""

    service_backend = "ray"
    _actor: Any

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return _unpacked(self._remote_call(self._actor.call, name, tuple(map(_packed, arguments)), options))

    def _remote_call(self, method: Any, *arguments: Any) -> Any:
        ray = import_ray()
        try:
            return ray.get(method.remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # what the buffer raised, as if it were local
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"the replay buffer's actor is gone: {' '.join(str(error).split())[:400]}") from None

    def extend(self, data: Any) -> Any:
        """Write one row per frame of a batch and return the row numbers."""
        return self._call("extend", data)

    def add(self, data: Any) -> Any:
        """Write one frame and return its row number."""
        return self._call("add", data)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return frames drawn by the buffer's sampler."""
        return self._call("sample", batch_size, return_info)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of these rows."""
        self._call("update_priority", index, priority)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's rows to those in the sample."""
        self._call("update_tensordict_priority", data)

    def __getitem__(self, index: Any) -> Any:
        return self._call("__getitem__", index)

    def __len__(self) -> int:
        return int(self._remote_call(self._actor.attribute, "len"))

    @property
    def write_count(self) -> int:
        """The number of rows ever written."""
        return int(self._remote_call(self._actor.attribute, "write_count"))

    @property
    def may_write(self) -> bool:
        """Whether the buffer's limiter wants more rows now."""
        return bool(self._remote_call(self._actor.attribute, "may_write"))

    def client(self) -> _Client:
        """Return a handle for another process."""
        return _Client(self._actor)

    def clients(self, num_clients: int) -> list[_Client]:
        """Return this many handles for other processes."""
        return [self.client() for _ in range(num_clients)]


class RayReplayBuffer(_Client):
    """A replay buffer that lives in a Ray actor.

    >>> buffer = RayReplayBuffer(storage=lambda: LazyTensorStorage(100_000), batch_size=256)
    >>> collector = RayCollector([make_env] * 2, policy, frames_per_batch=200, replay_buffer=buffer)
    >>> collector.start()                       # the actors write to it directly
    >>> sample = buffer.sample()

    Args:
        replay_buffer_cls: the class of the buffer in the actor; `ReplayBuffer` by default.
        ray_init_config: arguments for `ray.init`, used if this process is not connected to a cluster yet.
        remote_config: resources and placement of the actor.
        **options: arguments of the buffer. Storage and sampler may be factories, which are called in the actor.
    """

    def __init__(
        self,
        *,
        replay_buffer_cls: Callable[..., Any] = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._open = False
        for name in ("transport", "transport_options"):
            if options.pop(name, None) not in (None, "auto", "ray", {}):
                raise UsageError(f"{name}: rows travel through Ray's object store; leave it out")
        if not callable(replay_buffer_cls):
            raise WrongArgument(f"replay_buffer_cls must be a class, got {replay_buffer_cls!r}")
        self.batch_size, self.feed, self._limiter = options.get("batch_size"), Feed(), options.get("limiter")
        ray = CLUSTER.enter(ray_init_config or {})
        self._open = True
        guard(self)
        settings = {"num_cpus": 0, **(remote_config or {}), "max_concurrency": _THREADS}
        try:
            made = dumps(functools.partial(replay_buffer_cls, **options), "what the replay buffer is made of")
            super().__init__(ray.remote(_BufferActor).options(**settings).remote())
            self._remote_call(self._actor.begin, made, list(sys.path))
        except BaseException:
            self.shutdown()
            raise

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.sample()

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return frames drawn by the buffer's sampler. Wait for missing rows while a collector brings them."""
        patience = None if self._limiter is None else self._limiter.timeout

        def sample_now(limited: bool = True) -> Any:
            if patience is None or (batch_size or self.batch_size) is None:
                return super(RayReplayBuffer, self).sample(batch_size, return_info)
            return _unpacked(self._remote_call(self._actor.sample_now, batch_size, return_info, limited))

        try:
            return sample_now()
        except Starved as why:
            return self.feed.retry(why, sample_now, lambda: self.write_count, patience)

    def sample_while(self, collector: Any, batch_size: int | None = None, return_info: bool = False) -> Iterator[Any]:
        """Yield samples for as long as a collector fills this buffer. See `ReplayBuffer.sample_while`."""
        self.feed.check(collector)
        sample = functools.partial(self.sample, batch_size, return_info)
        return sample_while(collector, sample, lambda: bool(self._remote_call(self._actor.attribute, "owed")))

    def empty(self) -> None:
        """Remove all rows."""
        self._call("empty")

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and everything else that is needed to resume."""
        state: dict[str, Any] = self._call("state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by a state from `state_dict`."""
        self._call("load_state_dict", state)

    @property
    def is_alive(self) -> bool:
        """Whether the actor answers."""
        with contextlib.suppress(WorkerDied, WrongState):
            return self._open and len(self) >= 0
        return False

    def _remote_call(self, method: Any, *arguments: Any) -> Any:
        if not self._open:
            raise WrongState("this RayReplayBuffer is closed; make a new one")
        return super()._remote_call(method, *arguments)

    def in_fork(self, why: str) -> None:
        """Called in a fork: refuse all use. Only the parent process ends the actor."""
        self._open = False
        refuse_use(self, why)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the actor, which deletes the rows. May be called twice."""
        if self._open:
            self._open = False
            ray = import_ray()
            if ray.is_initialized() and hasattr(self, "_actor"):
                ray.kill(self._actor)
            CLUSTER.leave()

    close = shutdown

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.shutdown()
