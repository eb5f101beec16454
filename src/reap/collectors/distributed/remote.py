"""Remote collectors: what they have in common, such as how often weights are sent and what runs in a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from reap._system.messages.pickling import pack_bytes
from reap.arguments import flag
from reap.backends.local.pauses import Paused
from reap.backends.nested_workers import NestedWorkers
from reap.backends.remote.message_transport import MessageTransport
from reap.collectors.distributed.collector_class import nested_workers_for
from reap.collectors.distributed.collector_kwargs import merge_options
from reap.collectors.multi import MultiCollector
from reap.collectors.options import Options
from reap.collectors.placement import Placement
from reap.errors import UsageError, WrongArgument


class RemotePlacement(Placement):
    """Places workers that send their rollouts as messages; takes its own options out of a collector's."""

    pack = staticmethod(pack_bytes)  # without file descriptors, which mean nothing on another machine
    preempts = False
    own: ClassVar[Mapping[str, Any]] = {}  # the options of this transport, with their defaults

    def __init__(self, options: Mapping[str, Any]) -> None:
        left = dict(options)
        sync = left.get("sync")
        if sync is not None and not isinstance(sync, bool):
            raise WrongArgument(f"sync must be True or False, got {sync!r}")
        self.update_interval = _interval(
            left.pop("update_after_each_batch", False), left.pop("max_weight_update_interval", -1)
        )
        self.given = {name: left.pop(name, usual) for name, usual in self.own.items()}
        self.nested = nested_workers_for(left.pop("collector_class", None), left.pop("num_workers_per_collector", 1))
        further = left.pop("collector_kwargs", None)
        self.options_left, self.options_by_worker = merge_options(left, further, ("sync", *self.given))

    def workers_write(self, buffer: Any) -> bool:
        return False  # rollouts come to this process, which writes them to the buffer

    def transport(self, plans: Sequence[Any], options: Options) -> MessageTransport:
        raise NotImplementedError

    def nested_workers(self, options: Options, workers: int) -> NestedWorkers | None:
        if self.nested is None:
            return None
        if options.deterministic and options.on_failure == "restart":
            raise UsageError(
                "deterministic=True with on_failure='restart' resumes exactly where a worker failed, which is not "
                "possible if the worker has processes of its own (collector_class='sync' or 'async'); leave one of the "
                "three out"
            )
        return replace(self.nested, random_frames=options.random_frames // workers)


# Collectors are registered as its subclasses, not derived from it, because at most three of our classes may lie between
# a public collector and `object` (tests/test_house.py). So they inherit nothing from it, and each copies `pause`.
class FarCollector(MultiCollector):
    """The common type, for `isinstance`, of the collectors whose workers send their rollouts as messages.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        sync: True: a batch holds a rollout of every worker. False: a batch is one worker's rollout, first come first
            served.
        update_after_each_batch: send the policy's weights after each batch.
        max_weight_update_interval: send them after this many batches without an update; -1: only when you say so.
        collector_class: what runs in a worker: "single" or `Collector` (the default): one loop; "sync" or
            `MultiSyncCollector`, "async" or `MultiAsyncCollector`: `num_workers_per_collector` processes.
        collector_kwargs: further options, as a mapping; or a list of them, one for each worker.
        **options: see `reap.collectors.options.Options`.
    """

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
        raise UsageError(
            "FarCollector cannot be instantiated; make a RayCollector, RPCCollector or DistributedCollector"
        )

    def pause(self: MultiCollector, timeout: float | None = None, *, resume: bool = True) -> Paused:
        """Pause background collection, and wait until no worker is collecting any more.

        >>> with collector.pause():
        ...     buffer.dumps("somewhere")

        Args:
            timeout: seconds to wait for the workers' current rollouts; after that NotReady (a TimeoutError) is raised
                and collection continues.
            resume: False: stay paused after the block, until `resume()`.
        """
        until = None if timeout is None else time.monotonic() + timeout

        def settle() -> None:
            self._settle(None if until is None else max(0.0, until - time.monotonic()))

        return self._pause(settle, kept=not resume, timeout=timeout)


def _interval(each: Any, interval: Any) -> int:
    """Return after how many batches weights are sent; -1: only when the user says so."""
    flag("update_after_each_batch", each, none=True)
    if isinstance(interval, bool) or not isinstance(interval, int):
        raise WrongArgument(f"max_weight_update_interval must be a whole number, got {interval!r}")
    if each and interval > -1:
        raise UsageError("update_after_each_batch already sends weights; leave max_weight_update_interval out")
    if interval == 0 or interval < -1:
        raise UsageError(f"max_weight_update_interval must be at least 1, got {interval}")
    return 1 if each else interval
