"""RPCCollector: collects with workers over torch.distributed.rpc."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.rpc import TensorPipeRpcBackendOptions
from typing_extensions import Unpack

from reap.arguments import mapping
from reap.backends.remote.rpc import THREADS, TensorPipeTransport
from reap.collectors.distributed.keywords import DEFAULTS, RPCCollectorOptions
from reap.collectors.distributed.launching import LAUNCH_DEFAULTS, check_backend_name, node_settings
from reap.collectors.distributed.remote import FarCollector, RemotePlacement
from reap.collectors.multi import IN_PROCESS_ONLY, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from reap.collectors.options import Options, shows_options
from reap.errors import UsageError, WrongArgument


class _TensorPipePlacement(RemotePlacement):
    """Places workers in processes that a launcher starts, and reaches them over TensorPipe."""

    own = {**LAUNCH_DEFAULTS, "tensorpipe_options": None, "backend": "gloo", "visible_devices": None}

    def transport(self, plans: Sequence[Any], options: Options) -> TensorPipeTransport:
        mapping("tensorpipe_options", self.given["tensorpipe_options"])
        agent = self.given["tensorpipe_options"] or {}
        try:
            threads = TensorPipeRpcBackendOptions(**agent).num_worker_threads
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"tensorpipe_options: torch rejected {dict(agent)}: {error}") from error
        if threads < THREADS:
            raise UsageError(
                f"tensorpipe_options: num_worker_threads must be at least {THREADS}, got {threads}: one of them waits"
            )
        check_backend_name(self.given["backend"])
        _check_devices(self.given["visible_devices"])
        nodes, one_by_one = node_settings(self.given), options.on_failure != "raise"
        if nodes.launcher != "mp":
            try:
                json.dumps(dict(agent))
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"tensorpipe_options: only numbers, text, lists and mappings can be sent to nodes: {error}"
                ) from error
        return TensorPipeTransport(agent=agent, nodes=nodes, one_by_one=one_by_one, start_method=options.start_method)


@FarCollector.register
@shows_options(without=IN_PROCESS_ONLY, more=RPCCollectorOptions, defaults={**DEFAULTS, **_TensorPipePlacement.own})
class RPCCollector(MultiCollector):
    """Collects with workers that are reached by torch.distributed.rpc (TensorPipe).

    >>> collector = RPCCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:
    ...     collector.update_policy_weights_()

    A process has one RPC agent, so it can have only one such collector at a time. See `FarCollector`.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        sync: True: a batch holds a rollout of every worker. False (the default): a batch is one worker's rollout, first
            come first served.
        **options: `launcher`, `tcp_port`, `slurm_kwargs`, `listen`, `secret_file`, `join_timeout`, as for
            `DistributedCollector`; `tensorpipe_options`, a mapping for `TensorPipeRpcBackendOptions`; `backend` and
            `visible_devices` are checked, but have no effect; for others see `FarCollector`.
    """

    pause = FarCollector.pause

    def __init__(self, create_env_fn: Any, policy: Any = None, **keywords: Unpack[RPCCollectorOptions]) -> None:
        options: dict[str, Any] = {**keywords}
        self._placement = _TensorPipePlacement(options)
        super().__init__(create_env_fn, policy, **self._placement.options_left)


@MultiSyncCollector.register
class RPCSyncCollector(RPCCollector):
    """Collects with RPC workers in step: a batch holds a rollout of each, all made by the same weights.

    See `RPCCollector`.
    """

    _sync = True


@MultiAsyncCollector.register
class RPCAsyncCollector(RPCCollector):
    """Collects with RPC workers that continue while you learn: a batch is one worker's rollout. See `RPCCollector`."""

    _sync = False


RPCCollector._sync_and_async = RPCSyncCollector, RPCAsyncCollector


def _check_devices(devices: Any) -> None:
    if devices is not None and not isinstance(devices, (list, tuple)):
        raise WrongArgument(f"visible_devices must be a list of devices, got {devices!r}")
    for device in devices or ():
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError):
            raise WrongArgument(f"visible_devices must hold devices, like 'cpu', got {device!r}") from None
        if kind != "cpu":
            raise UsageError(
                f"visible_devices: {device} is not used for sending: slots travel through CPU memory; "
                "storing_device says where batches are delivered"
            )
