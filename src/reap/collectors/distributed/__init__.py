"""Collectors over several machines: the same workers and slots as elsewhere, with other transports."""

from reap.backends.network.launchers import DEFAULT_SLURM_CONF
from reap.collectors.distributed.launching import submitit_delayed_launcher
from reap.collectors.distributed.ray import RayAsyncCollector, RayCollector, RaySyncCollector
from reap.collectors.distributed.ray_eval import RayEvalWorker
from reap.collectors.distributed.remote import FarCollector
from reap.collectors.distributed.rpc import RPCAsyncCollector, RPCCollector, RPCSyncCollector
from reap.collectors.distributed.torchdist import (
    DistributedAsyncCollector,
    DistributedCollector,
    DistributedSyncCollector,
)

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DistributedAsyncCollector",
    "DistributedCollector",
    "DistributedSyncCollector",
    "FarCollector",
    "RPCAsyncCollector",
    "RPCCollector",
    "RPCSyncCollector",
    "RayAsyncCollector",
    "RayCollector",
    "RayEvalWorker",
    "RaySyncCollector",
    "submitit_delayed_launcher",
]
