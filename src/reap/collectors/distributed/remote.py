"""What collectors with remote workers have in common: how often weights are sent, and where rollouts go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from reap._system.pickling import pack_bytes
from reap.backends.local.pauses import Paused
from reap.backends.remote.message_transport import MessageTransport
from reap.backends.worker_backend import WorkerBackend
from reap.collectors.distributed.collector_kwargs import merged
from reap.collectors.distributed.teams import team_for
from reap.collectors.multi import MultiCollector
from reap.collectors.options import Options
from reap.errors import UsageError, WrongArgument


class FarCollector(MultiCollector):
    """A `MultiCollector` whose workers share no memory with this process.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        sync: True: a batch holds a rollout of every worker. False: of one, first come first served.
        update_after_each_batch: send the policy's weights after each batch.
        max_weight_update_interval: send them when this many batches were delivered since they were last sent.
        collector_class: what runs in a worker: "single" or `Collector` (the default), a loop; "sync" or
            `MultiSyncCollector`, "async" or `MultiAsyncCollector`: `num_workers_per_collector` processes.
        collector_kwargs: further options, as a mapping; or a list of them, one for each worker.
        **options: see `reap.collectors.options.Options`.
    """

    _pack = staticmethod(pack_bytes)  # descriptors stay on this machine
    _own: ClassVar[Mapping[str, Any]] = {}  # options of this transport, and what they are by default

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        sync: bool | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        **options: Any,
    ) -> None:
        self._why_closed = "it was never built"
        if sync is not None and not isinstance(sync, bool):
            raise WrongArgument(f"sync must be True or False, got {sync!r}")
        if isinstance(max_weight_update_interval, bool) or not isinstance(max_weight_update_interval, int):
            raise WrongArgument(
                f"max_weight_update_interval must be a whole number, got {max_weight_update_interval!r}"
            )
        if update_after_each_batch and max_weight_update_interval > -1:
            raise UsageError("update_after_each_batch sends weights already; leave max_weight_update_interval out")
        if max_weight_update_interval == 0 or max_weight_update_interval < -1:
            raise UsageError(f"max_weight_update_interval must be at least 1, got {max_weight_update_interval}")
        self._interval = 1 if update_after_each_batch else max_weight_update_interval
        self._sent_at = 0
        self._given = {name: options.pop(name, usual) for name, usual in self._own.items()}
        self._nested = team_for(options.pop("collector_class", None), options.pop("num_workers_per_collector", 1))
        options, self._each = merged(options, options.pop("collector_kwargs", None), ("sync", *self._given))
        super().__init__(create_env_fn, policy, sync=sync, **options)
        if self._interval > 0:
            self._watch = None  # weights are sent by themselves

    def _make_backend(self, plans: Sequence[Any], settings: Options) -> WorkerBackend:
        if self._sync and settings.preemptive_threshold is not None:
            raise UsageError("preemptive_threshold stops workers in the middle of a rollout; these are too far away")
        nested = (
            None if self._nested is None else replace(self._nested, random_frames=settings.random_frames // len(plans))
        )
        return WorkerBackend(
            plans,
            transport=self._make_transport(plans, settings),
            delivery=self._make_delivery(settings),
            nested=nested,
            **self._running(settings),
        )

    _make_transport: Callable[[Sequence[Any], Options], MessageTransport]  # how workers are reached

    def _workers_write(self) -> bool:
        return False  # rollouts come here first, and go into the buffer from here

    def pause(self, timeout: float | None = None, *, resume: bool = True) -> Paused:
        """Stop collecting in the background; returns when nothing is under way any more, in any worker.

        >>> with collector.pause():
        ...     buffer.dumps("somewhere")

        Args:
            timeout: seconds to wait for what workers are making; NotReady (a TimeoutError) after that.
            resume: False: stay paused after the block, until `resume()`.
        """

        def settle() -> None:
            if self._direct:
                self._count(*self._backend.settle(timeout))  # it is in the buffer, and nobody has counted it yet
            else:
                self._backend.drain(timeout)

        return self._pause(settle, kept=not resume)

    def _publish(self, weights: Any, worker_ids: int | Sequence[int] | None) -> int:
        self._sent_at = self._batches
        return super()._publish(weights, worker_ids)

    def _before_batch(self) -> None:
        super()._before_batch()
        if self._interval > 0 and self._batches - self._sent_at >= self._interval:
            self.update_policy_weights_()
