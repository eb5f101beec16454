"""RayCollector: workers that are Ray actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Self

from reap.backends.far import FarBackend
from reap.backends.ray import RayBackend
from reap.collectors.distributed.far import FarCollector
from reap.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from reap.errors import SpecMismatch, UsageError, WrongArgument

_USUAL = {"num_cpus": 1}


class RayCollector(FarCollector):
    """Collects with Ray actors: in the cluster this process is connected to, or else in one that is started here.

    >>> collector = RayCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:
    ...     collector.update_policy_weights_()

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per actor; or one, with `num_collectors`.
        policy: as for `Collector`. Actors get copies; `update_policy_weights_` puts new weights once for all.
        sync: True: a batch holds a rollout of every actor. False (the default): of one, first come first served.
        **options: `num_collectors`; `ray_init_config`, a mapping for `ray.init` (`{"address": "auto"}`: a cluster that
            runs); `remote_configs`, resources and placement of an actor, or a list with those of each; `restart`, True
            to replace actors that die (`stats()["restarts"]` counts them); further see `FarCollector`.
    """

    _own = {"num_collectors": None, "ray_init_config": None, "remote_configs": None, "restart": False}

    def __new__(
        cls, create_env_fn: Any = None, policy: Any = None, *, sync: bool | None = None, **options: Any
    ) -> Self:
        if cls is RayCollector:
            return object.__new__(RaySyncCollector if sync else RayAsyncCollector)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        self._why_closed = "it was never built"
        count = options.get("num_collectors")
        if isinstance(create_env_fn, (list, tuple)) and count not in (None, len(create_env_fn)):
            raise UsageError(f"num_collectors is {count}, but there are {len(create_env_fn)} envs")
        if count is not None:
            options["num_workers"] = count
        super().__init__(create_env_fn, policy, **options)

    def _make_far(self, plans: Sequence[Any], **options: Any) -> FarBackend:
        cluster, configs = self._given["ray_init_config"] or {}, self._given["remote_configs"] or _USUAL
        if not isinstance(cluster, Mapping):
            raise WrongArgument(f"ray_init_config must be a mapping for ray.init, got {type(cluster).__name__}")
        each = [configs] * len(plans) if isinstance(configs, Mapping) else list(configs)
        if len(each) != len(plans):
            raise SpecMismatch(f"remote_configs holds {len(each)} values for {len(plans)} actors")
        self._ray = RayBackend(plans, cluster=cluster, resources=each, restart=self._given["restart"], **options)
        return self._ray

    def stats(self, workers: str = "aggregate") -> dict[str, Any]:
        return {**super().stats(workers), "restarts": self._ray.restarts}


class RaySyncCollector(RayCollector, MultiSyncCollector):
    """Every batch holds a rollout of each actor, all made by the same weights. See `RayCollector`."""


class RayAsyncCollector(RayCollector, MultiAsyncCollector):
    """Every batch is one actor's rollout; actors go on while the consumer works. See `RayCollector`."""
