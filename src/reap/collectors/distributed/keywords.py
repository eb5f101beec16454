"""Keywords: further options of collectors over several machines, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from reap.collectors.keywords import MultiCollectorOptions

DEFAULTS = {"update_after_each_batch": False, "max_weight_update_interval": -1, "num_workers_per_collector": 1}


class RemoteCollectorOptions(MultiCollectorOptions, total=False):
    """Options of every collector with remote workers."""

    sync: bool | None
    """True: a batch holds a rollout of every worker. False (the default): a batch is one worker's rollout, first come
    first served."""
    num_workers: int | None
    """How many workers, where `create_env_fn` is one factory for all."""
    update_after_each_batch: bool
    """Send the policy's weights after each batch."""
    max_weight_update_interval: int
    """Send the policy's weights after this many batches without an update; -1: only when you say so."""
    collector_class: Any
    """What runs in a worker: "single" (the default): one loop; "sync" or "async": `num_workers_per_collector`
    processes."""
    num_workers_per_collector: int
    """The number of processes inside each worker, with `collector_class`."""
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    """Further options, as a mapping; or a list of them, one for each worker."""


class RayCollectorOptions(RemoteCollectorOptions, total=False):
    """Options of `RayCollector`."""

    num_collectors: int | None
    """How many actors, where `create_env_fn` is one factory for all."""
    ray_init_config: Mapping[str, Any] | None
    """Arguments for `ray.init`; `{"address": "auto"}` connects to a running cluster."""
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    """Resources and placement of an actor, or a list with those of each one."""
    restart: bool
    """True: replace actors that die; `stats()["restarts"]` counts them."""


class LaunchedCollectorOptions(RemoteCollectorOptions, total=False):
    """Options of collectors whose workers are started by a launcher, or join."""

    launcher: Literal["mp", "join", "submitit", "submitit_delayed"] | None
    """"mp": processes on this machine. "join" or None: wait for `python -m reap.join`, started on each machine.
    "submitit": submit jobs that join. "submitit_delayed": see `submitit_delayed_launcher`."""
    tcp_port: int | None
    """The port to listen on; any free one by default."""
    listen: str | None
    """The address on which to listen for other machines; this machine's loopback address by default."""
    secret_file: Any
    """With "join": a file with the secret that the collector and the joining workers share."""
    join_timeout: float
    """Seconds until all workers must have joined."""
    slurm_kwargs: Mapping[str, Any] | None
    """With "submitit": parameters of its executor, over `DEFAULT_SLURM_CONF`."""
    backend: str
    """"gloo"; other backends that this torch has are accepted, but have no effect."""


class DistributedCollectorOptions(LaunchedCollectorOptions, total=False):
    """Options of `DistributedCollector`."""

    update_interval: int | None
    """Another name for `max_weight_update_interval`."""


class RPCCollectorOptions(LaunchedCollectorOptions, total=False):
    """Options of `RPCCollector`."""

    tensorpipe_options: Mapping[str, Any] | None
    """Arguments for torch's `TensorPipeRpcBackendOptions`."""
    visible_devices: Sequence[torch.device | str] | None
    """Checked, but without effect: slots travel through CPU memory."""
