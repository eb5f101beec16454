"""DistributedCollector: collects with workers over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from reap.backends.remote.gloo import GlooTransport
from reap.collectors.distributed.keywords import DEFAULTS, DistributedCollectorOptions
from reap.collectors.distributed.launching import LAUNCH_DEFAULTS, check_backend_name, node_settings
from reap.collectors.distributed.remote import FarCollector, RemotePlacement
from reap.collectors.multi import IN_PROCESS_ONLY, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from reap.collectors.options import Options, shows_options
from reap.errors import UsageError


class _GlooPlacement(RemotePlacement):
    """Places workers in processes that a launcher starts, and reaches them by gloo."""

    own = {**LAUNCH_DEFAULTS, "backend": "gloo"}

    def transport(self, plans: Sequence[Any], options: Options) -> GlooTransport:
        check_backend_name(self.given["backend"])
        nodes, one_by_one = node_settings(self.given), options.on_failure != "raise"
        return GlooTransport(nodes=nodes, one_by_one=one_by_one, start_method=options.start_method)


@FarCollector.register
@shows_options(without=IN_PROCESS_ONLY, more=DistributedCollectorOptions, defaults={**DEFAULTS, **_GlooPlacement.own})
class DistributedCollector(MultiCollector):
    """Collects with workers that are reached by torch.distributed (gloo); a rollout is sent as one tensor.

    >>> collector = DistributedCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:
    ...     collector.update_policy_weights_()

    With launcher "mp" workers read new weights from shared memory. With the others weights are broadcast, or sent to
    one worker after another if `on_failure` allows workers to be replaced or dropped.

    The collector listens only on the loopback address, unless `listen` names another. It does not touch a process group
    that the trainer has made. See `FarCollector`.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        sync: True: a batch holds a rollout of every worker. False (the default): a batch is one worker's rollout, first
            come first served.
        backend: "gloo". "nccl", "ucc" and "mpi" are accepted if this torch has them, but gloo is used all the same:
            slots and weights are in CPU memory.
        launcher: "mp": processes on this machine. "join" or None: wait for `python -m reap.join`, started on each
            machine. "submitit": submit jobs that join. "submitit_delayed": see `submitit_delayed_launcher`.
        update_interval: send weights when this many batches were delivered; another name for
            `max_weight_update_interval`. None: only when you say so.
        tcp_port: the port to listen on; any free one by default.
        listen: the address on which to listen for other machines; this machine's loopback address by default.
        secret_file: with "join": a file with the secret that the collector and the joining workers share.
        join_timeout: seconds until all workers must have joined.
        slurm_kwargs: with "submitit": parameters of its executor, over `DEFAULT_SLURM_CONF`; `folder` is where its
            files go, "reap-jobs" by default.
        **options: see `FarCollector`.
    """

    pause = FarCollector.pause

    def __init__(self, create_env_fn: Any, policy: Any = None, **keywords: Unpack[DistributedCollectorOptions]) -> None:
        options: dict[str, Any] = {**keywords}
        interval = options.pop("update_interval", None)
        if interval is not None:
            if options.get("max_weight_update_interval", -1) != -1:
                raise UsageError("update_interval and max_weight_update_interval are the same option; give one")
            options["max_weight_update_interval"] = interval
        self._placement = _GlooPlacement(options)
        super().__init__(create_env_fn, policy, **self._placement.options_left)


@MultiSyncCollector.register
class DistributedSyncCollector(DistributedCollector):
    """Collects with workers over torch.distributed in step: a batch holds a rollout of each, made by the same weights.

    See `DistributedCollector`.
    """

    _sync = True


@MultiAsyncCollector.register
class DistributedAsyncCollector(DistributedCollector):
    """Collects with workers over torch.distributed that continue while you learn: a batch is one worker's rollout.

    See `DistributedCollector`.
    """

    _sync = False


DistributedCollector._sync_and_async = DistributedSyncCollector, DistributedAsyncCollector
