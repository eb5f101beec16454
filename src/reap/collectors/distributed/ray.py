"""RayCollector: collects with workers that are Ray actors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import Unpack

from reap.arguments import mapping, whole
from reap.backends.remote.message_transport import connection_of
from reap.backends.remote.ray import RayActorTransport, RayConnection
from reap.collectors.buffer_writers import Sink, WriteOptions, Writer
from reap.collectors.distributed.keywords import DEFAULTS, RayCollectorOptions
from reap.collectors.distributed.remote import FarCollector, RemotePlacement
from reap.collectors.multi import IN_PROCESS_ONLY, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from reap.collectors.options import Options, is_list, shows_options
from reap.errors import SpecMismatch, UsageError, WrongArgument
from reap.failures import FailurePolicy

_GPU_SHARE = 0.2  # the share of a GPU for an actor whose policy runs on one
_NOT_FOR_RAY = {
    "use_env_creator": "env factories are sent to the actors unchanged",
    "weight_recv_schemes": "this collector sends weights and receives none; use weight_sync_schemes",
}


class _RayPlacement(RemotePlacement):
    """Places workers in actors of a Ray cluster, which are asked for each rollout."""

    workers_run_free = False
    own = {
        "num_collectors": None,
        "ray_init_config": None,
        "remote_configs": None,
        "restart": False,
        "use_env_creator": None,
        "weight_recv_schemes": None,
    }

    def transport(self, plans: Sequence[Any], options: Options) -> RayActorTransport:
        mapping("ray_init_config", self.given["ray_init_config"])
        cluster = self.given["ray_init_config"] or {}
        return RayActorTransport(cluster=cluster, resources=_resources(self.given["remote_configs"], plans))

    def workers_write(self, buffer: Any) -> bool:
        """Return whether actors write to the buffer themselves: whether the buffer is an actor too."""
        return getattr(buffer, "service_backend", None) == "ray"

    def _writer_maker(self, writing: WriteOptions, options: Options) -> tuple[Any, Mapping[str, Any]]:
        return functools.partial(Writer, writing, options.replay_buffer.client()), {}


@FarCollector.register
@shows_options(without=IN_PROCESS_ONLY, more=RayCollectorOptions, defaults={**DEFAULTS, **_RayPlacement.own})
class RayCollector(MultiCollector):
    """Collects with Ray actors: in the cluster this process is connected to, or else in one that is started here.

    >>> collector = RayCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:
    ...     collector.update_policy_weights_()

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per actor; or one, with `num_collectors`.
        policy: as for `Collector`. Actors get copies; `update_policy_weights_` puts new weights once for all.
        sync: True: a batch holds a rollout of every actor. False (the default): a batch is one actor's rollout, first
            come first served.
        **options: `num_collectors`; `ray_init_config`, a mapping for `ray.init` (`{"address": "auto"}` connects to a
            running cluster); `remote_configs`, resources and placement of an actor, or a list with those of each;
            `restart`, True to replace actors that die (`stats()["restarts"]` counts them); `replay_buffer`, of this
            process, or a `reap.data.RayReplayBuffer`, to which actors write themselves; for others see `FarCollector`.
    """

    _placement: _RayPlacement
    pause = FarCollector.pause

    def __init__(self, create_env_fn: Any, policy: Any = None, **keywords: Unpack[RayCollectorOptions]) -> None:
        options: dict[str, Any] = {**keywords}
        count = whole("num_collectors", options.get("num_collectors"), none=True)
        if is_list(create_env_fn) and count not in (None, len(create_env_fn)):
            raise UsageError(f"num_collectors is {count}, but there are {len(create_env_fn)} envs")
        if count is not None:
            options["num_workers"] = count
        for name, why in _NOT_FOR_RAY.items():
            value = options.get(name)
            if value is not None and value is not False:
                raise UsageError(f"{name} is not for {type(self).__name__}: {why}")
        if not isinstance(restart := options.get("restart", False), bool):
            raise WrongArgument(f"restart must be True or False, got {restart!r}")
        self._placement = _RayPlacement(options)
        super().__init__(create_env_fn, policy, **self._placement.options_left)

    def _backend_options(self, settings: Options) -> dict[str, Any]:
        running = super()._backend_options(settings)
        if not self._placement.given["restart"]:
            return running
        if settings.on_failure != "raise":
            raise UsageError("restart=True and on_failure both decide what happens when an actor dies; give one")
        return {**running, "on_failure": FailurePolicy("restart", None, deaths_only=True)}

    @property
    def _ray(self) -> RayActorTransport:
        transport = self._backend.transport
        if not isinstance(transport, RayActorTransport):
            raise UsageError("with workers='inline' there are no actors")
        return transport

    # ---- the buffer -----------------------------------------------------------------------------------------------

    def _make_sink(self) -> Sink | None:
        sink = super()._make_sink()
        if hasattr(self.replay_buffer, "feed"):
            self.replay_buffer.feed.attach(self)
        return sink

    # ---- more and fewer actors ------------------------------------------------------------------------------------

    @property
    def remote_collectors(self) -> list[Any]:
        """The Ray handles of the actors."""
        return [connection_of(worker, RayConnection).actor for worker in self._backend.workers]

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Any = None,
        remote_configs: Any = None,
    ) -> None:
        """Add actors, one for each env factory, with the options and the latest weights of the existing ones.

        >>> collector.add_collectors([make_env] * 2)

        A synchronous collector delivers their lanes from the next batch on.

        Args:
            create_env_fn: a list with one env factory per new actor.
            num_envs: must be the collector's `num_workers_per_collector`, if given.
            policy: must be the collector's own policy, if given: another one would need other weights.
            collector_kwargs: must be empty: new actors have the options of the existing ones.
            remote_configs: resources and placement of a new actor, or a list with those of each.
        """
        makers = list(create_env_fn) if is_list(create_env_fn) else [create_env_fn]
        inside = 1 if self._placement.nested is None else self._placement.nested.workers
        if num_envs not in (None, inside):
            raise UsageError(f"num_envs={num_envs}, but num_workers_per_collector is {inside} for all actors")
        if policy is not None and policy is not self._policy:
            raise UsageError(
                "policy: all actors use the collector's policy; make a second collector for another policy"
            )
        if collector_kwargs and any(collector_kwargs if isinstance(collector_kwargs, list) else [collector_kwargs]):
            raise UsageError("collector_kwargs: new actors have the options of the existing ones; leave it out")
        own, size = self.options, self._backend.workers[0].size
        plans = self._plans([own] * len(makers), makers, self._policy, [size] * len(makers))
        resources = _resources(remote_configs or self._placement.given["remote_configs"], plans, extend=True)
        self._ray.expect(resources)

        def add() -> None:  # all of it between two batches: the next one holds the new lanes
            self._backend.add(plans)
            self.num_workers += len(makers)
            self.create_env_fn = [*self.create_env_fn, *makers]
            if self._sync:
                frames = sum(worker.size for worker in self._backend.workers)
                self.options = dataclasses.replace(own, frames_per_batch=frames)
            self._learn_sizes()

        self._ask(add)

    def stop_remote_collectors(self) -> None:
        """End all actors, and close the collector."""
        self.shutdown()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
        *,
        shutdown_ray: bool | None = None,
    ) -> None:
        """End the actors and close the collector, like every collector's `shutdown`; see there.

        A Ray cluster that reap started ends with the last collector that uses it. `shutdown_ray`: True: disconnect from
        the cluster now, even if others in this process use it. False: stay connected, even if none does.
        """
        if hasattr(self, "_backend") and isinstance(self._backend.transport, RayActorTransport):
            self._ray.end_cluster = shutdown_ray
        super().shutdown(timeout, close_env, raise_on_error)

    def stats(
        self,
        workers: Literal["aggregate", "per_worker", "both"] = "aggregate",
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Return statistics, like every collector's `stats`. `timeout` is ignored: no actor has to answer."""
        return super().stats(workers)


@MultiSyncCollector.register
class RaySyncCollector(RayCollector):
    """Collects with Ray actors in step: a batch holds a rollout of each, all made by the same weights.

    See `RayCollector`.
    """

    _sync = True


@MultiAsyncCollector.register
class RayAsyncCollector(RayCollector):
    """Collects with Ray actors that continue while you learn: a batch is one actor's rollout. See `RayCollector`."""

    _sync = False


RayCollector._by_sync = RaySyncCollector, RayAsyncCollector


def _resources(configs: Any, plans: Sequence[Any], *, extend: bool = False) -> list[Mapping[str, Any]]:
    """Return the Ray options of each actor. With `extend`, new actors get the last entry of a list for earlier ones."""
    if configs is None or isinstance(configs, Mapping):
        each = [configs] * len(plans)
    elif not is_list(configs):
        raise WrongArgument(f"remote_configs must be a mapping for Ray's options(), or a list of them, got {configs!r}")
    else:
        each = list(configs)
        if extend and len(each) != len(plans):
            each = each[-1:] * len(plans)
    if len(each) != len(plans):
        raise SpecMismatch(f"remote_configs holds {len(each)} values for {len(plans)} actors")
    for one in each:
        if one is not None and not isinstance(one, Mapping):
            raise WrongArgument(f"remote_configs must hold mappings for Ray's options(), got {type(one).__name__}")
    return [_default_resources(plan) if one is None else dict(one) for one, plan in zip(each, plans)]


def _default_resources(plan: Any) -> dict[str, Any]:
    on_gpu = plan.policy_device is not None and plan.policy_device.type == "cuda"
    return {"num_cpus": 1, "num_gpus": _GPU_SHARE} if on_gpu else {"num_cpus": 1}
