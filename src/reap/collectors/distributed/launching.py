"""Launching: what starts the workers of `DistributedCollector` and `RPCCollector`, and where the collectors listen."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reap.arguments import LONGEST, mapping, one_of
from reap.backends.network.authenticated_listener import LOOPBACK
from reap.backends.network.launchers import (
    DEFAULT_SLURM_CONF,
    LAUNCHERS,
    PATIENCE,
    NodeSettings,
    join_later,
    make_executor,
    new_secret,
    run_at_meeting,
    write_json,
)
from reap.errors import UsageError, WrongArgument, nearest

LAUNCH_DEFAULTS: Mapping[str, Any] = {
    "launcher": "mp",
    "tcp_port": None,
    "slurm_kwargs": None,
    "listen": None,
    "secret_file": None,
    "join_timeout": PATIENCE,
}
DEFAULT_SLURM_CONF_MAIN = {**DEFAULT_SLURM_CONF, "slurm_gpus_per_node": 1}
_FRAMEWORKS = ("distributed", "rpc")


def node_settings(given: Mapping[str, Any]) -> NodeSettings:
    """Return where a collector listens for workers and what starts them, from the options in `LAUNCH_DEFAULTS`."""
    launcher = "join" if given["launcher"] is None else given["launcher"]
    slurm, patience = given["slurm_kwargs"], given["join_timeout"]
    one_of("launcher", launcher, LAUNCHERS)
    mapping("slurm_kwargs", slurm)
    if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience <= LONGEST:
        raise WrongArgument(f"join_timeout must be a number of seconds, {LONGEST:,.0f} at most, got {patience!r}")
    for name, which in (
        ("slurm_kwargs", ("submitit",)),
        ("secret_file", ("join",)),
        ("listen", LAUNCHERS[1:]),
    ):
        if given[name] is not None and launcher not in which:
            raise UsageError(f"{name} is for launcher {' or '.join(map(repr, which))}, not for {launcher!r}")
    if not isinstance(secret := given["secret_file"], (str, os.PathLike, type(None))):
        raise WrongArgument(f"secret_file must be a path, got {secret!r}")
    if launcher == "join" and secret is None:
        raise UsageError("launcher 'join' needs secret_file: python -m reap.join --new-secret FILE creates one")
    return NodeSettings(
        launcher=launcher,
        listen=_address(given["listen"]),
        port=_port(given["tcp_port"]),
        secret_file=None if secret is None else os.fspath(secret),
        slurm=slurm or {},
        patience=float(patience),
    )


def check_backend_name(name: Any) -> None:
    """Raise unless this is a backend of torch.distributed that is available here; gloo is used in any case."""
    there = {
        "gloo": True,
        "nccl": dist.is_nccl_available(),
        "ucc": dist.is_ucc_available(),
        "mpi": dist.is_mpi_available(),
    }
    if not isinstance(name, str) or name not in there:
        raise UsageError(f"backend must be one of {', '.join(there)}, got {name!r}{nearest(str(name), there)}")
    if not there[name]:
        raise UsageError(f"backend {name!r} is not built into this torch; 'gloo' is, and carries slots and weights")


def _port(port: Any) -> int:
    if port is None:
        return 0
    if isinstance(port, bool) or not isinstance(port, (int, str)) or not str(port).isdigit() or int(port) >= 2**16:
        raise UsageError(f"tcp_port must be a port number, got {port!r}")
    return int(port)


def _address(listen: Any) -> str:
    """Return the IP address to listen on; the loopback address if none was given."""
    if listen is None:
        return LOOPBACK
    try:
        found: str = socket.gethostbyname(listen)
    except (OSError, TypeError) as error:
        raise UsageError(f"listen must be an address of this machine, got {listen!r} ({error})") from None
    if found == "0.0.0.0":
        raise UsageError("listen='0.0.0.0' is not an address that nodes can connect to; give one like '10.0.0.1'")
    return found


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int | str | None = None,
    submitit_main_conf: Mapping[str, Any] = DEFAULT_SLURM_CONF_MAIN,
    submitit_collection_conf: Mapping[str, Any] = DEFAULT_SLURM_CONF,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Decorate a function: run it as a job, together with jobs that become the workers of the collector it makes.

    >>> @submitit_delayed_launcher(num_jobs=2)
    ... def main():
    ...     collector = DistributedCollector([make_env] * 2, policy, launcher="submitit_delayed", ...)

    `main()` submits, waits, and returns what the function returns. The jobs meet in a folder (`folder` of the main
    conf, "reap-jobs" by default) that all machines must see.

    Args:
        num_jobs: the number of workers.
        framework: "distributed" or "rpc", for the collector that the function makes; the jobs work with either.
        backend: accepted and ignored; the collector decides how workers are reached.
        tcpport: the port the collector listens on, unless it is given a `tcp_port`; any free one by default.
        submitit_main_conf: parameters of the job that runs the function.
        submitit_collection_conf: parameters of the workers' jobs.
    """
    if framework not in _FRAMEWORKS:
        raise UsageError(f"framework must be one of {_FRAMEWORKS}, got {framework!r}{nearest(framework, _FRAMEWORKS)}")
    if isinstance(num_jobs, bool) or not isinstance(num_jobs, int) or num_jobs < 1:
        raise UsageError(f"num_jobs must be at least 1, got {num_jobs!r}")
    port = _port(tcpport)

    def decorate(main: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(main)
        def launch() -> Any:
            main_conf, conf = dict(submitit_main_conf), dict(submitit_collection_conf)
            folder = Path(main_conf.pop("folder", "reap-jobs")).absolute()
            conf.pop("folder", None)
            meeting = folder / f"meeting-{secrets.token_hex(8)}"
            meeting.mkdir(parents=True)
            try:
                executor = make_executor(folder, main_conf)
                new_secret(meeting / "secret")
                write_json(meeting / "jobs", {"cluster": executor.cluster, "port": port})
                first = executor.submit(run_at_meeting, str(meeting), sys.path, main)
                executor = make_executor(folder, conf)
                with executor.batch():
                    jobs = [executor.submit(join_later, str(meeting)) for _ in range(num_jobs)]
                try:
                    return first.result()
                finally:
                    for job in (first, *jobs):
                        job.cancel()
            finally:
                shutil.rmtree(meeting)

        return launch

    return decorate
