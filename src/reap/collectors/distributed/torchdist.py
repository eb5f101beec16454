"""DistributedCollector: workers over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Self, Unpack

from reap.backends.remote.gloo import GlooTransport
from reap.collectors.distributed.keywords import DEFAULTS, DistributedCollectorOptions
from reap.collectors.distributed.launching import LAUNCH_DEFAULTS, check_backend_name, nodes_of
from reap.collectors.distributed.remote import FarCollector, RemotePlacement
from reap.collectors.multi import WITHOUT, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from reap.collectors.options import Options, shows_options
from reap.errors import UsageError


class _GlooPlacement(RemotePlacement):
    """Workers are reached by gloo, and started by a launcher."""

    own = {**LAUNCH_DEFAULTS, "backend": "gloo"}

    def transport(self, plans: Sequence[Any], options: Options) -> GlooTransport:
        check_backend_name(self.given["backend"])
        nodes, one_by_one = nodes_of(self.given), options.on_failure != "raise"
        return GlooTransport(nodes=nodes, one_by_one=one_by_one, start_method=options.start_method)


@FarCollector.register
@shows_options(without=WITHOUT, more=DistributedCollectorOptions, defaults={**DEFAULTS, **_GlooPlacement.own})
class DistributedCollector(MultiCollector):
    """Collects with workers that are reached by torch.distributed (gloo); a rollout is sent as one tensor.

    >>> collector = DistributedCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:
    ...     collector.update_policy_weights_()

    Workers of this machine read new weights from shared memory. To nodes they are broadcast; or sent one by one, where
    `on_failure` lets workers be replaced or dropped.

    Nothing listens but on the loopback address, unless `listen` names another. A trainer's own process group is left
    alone. See `FarCollector`.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        sync: True: a batch holds a rollout of every worker. False (the default): of one, first come first served.
        backend: "gloo". "nccl", "ucc" and "mpi" are accepted where torch has them: they carry what is on devices, slots
            and weights are in the memory of the CPU, so these go by gloo all the same.
        launcher: "mp": processes of this machine. "join" or None: wait for `python -m reap.join`, started on each
            machine. "submitit": submit jobs that join. "submitit_delayed": see `submitit_delayed_launcher`.
        update_interval: send weights when this many batches were delivered; another name for
            `max_weight_update_interval`. None: only when you say so.
        tcp_port: where to listen; any, by default.
        listen: the address on which to listen for other machines; this machine's loopback address by default.
        secret_file: with "join": a file that holds what both sides know.
        join_timeout: seconds until all workers must have joined.
        slurm_kwargs: with "submitit": parameters of its executor, over `DEFAULT_SLURM_CONF`; `folder` is where its
            files go, "reap-jobs" by default.
        **options: see `FarCollector`.
    """

    pause = FarCollector.pause

    def __new__(
        cls, create_env_fn: Any = None, policy: Any = None, *, sync: bool | None = None, **options: Any
    ) -> Self:
        if cls is DistributedCollector:
            return object.__new__(DistributedSyncCollector if sync is True else DistributedAsyncCollector)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(self, create_env_fn: Any, policy: Any = None, **keywords: Unpack[DistributedCollectorOptions]) -> None:
        options: dict[str, Any] = {**keywords}
        interval = options.pop("update_interval", None)
        if interval is not None:
            if options.get("max_weight_update_interval", -1) != -1:
                raise UsageError("update_interval and max_weight_update_interval say the same; give one of them")
            options["max_weight_update_interval"] = interval
        self._placement = _GlooPlacement(options)
        super().__init__(create_env_fn, policy, **self._placement.options_left)


@MultiSyncCollector.register
class DistributedSyncCollector(DistributedCollector):
    """Every batch holds a rollout of each worker, all made by the same weights. See `DistributedCollector`."""

    _sync = True


@MultiAsyncCollector.register
class DistributedAsyncCollector(DistributedCollector):
    """Every batch is one worker's rollout; workers go on while the consumer works. See `DistributedCollector`."""

    _sync = False
