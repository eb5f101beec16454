"""Launchers: how workers on other machines are started. Their nodes connect to the collector, which waits for them.

    "join"              the user starts `python -m reap.join` on each machine: by hand, torchrun, srun
    "submitit"          the collector submits jobs that join it
    "submitit_delayed"  jobs that join were submitted together with the job in which the collector runs

Each node knows the address at which the collector listens, and the secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reap.backends.network.authenticated_listener import LOOPBACK
from reap.backends.network.node_agent import NodeAgent
from reap.backends.network.node_registry import NodeProcess, NodeRegistry
from reap.errors import UsageError, WorkerDied, missing

DEFAULT_SLURM_CONF = {
    "timeout_min": 10,
    "slurm_partition": "train",
    "slurm_cpus_per_task": 32,
    "slurm_gpus_per_node": 0,
}
LAUNCHERS = ("mp", "join", "submitit", "submitit_delayed")
PATIENCE = 600.0  # seconds within which all nodes must have connected
_MIN_BYTES = 16  # least bytes of a secret
# In a job of `submitit_delayed_launcher`: the folder in which nodes look for the address.
_meeting_folder: Path | None = None


def new_secret(path: Path) -> None:
    """Create a file with a new secret that only this user can read. It serves any number of runs."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} already exists; it was not changed") from None
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read_secret(path: str | os.PathLike[str] | None) -> bytes:
    """Return the secret in a file, which only this user may be able to read."""
    if path is None:
        raise UsageError("secret_file is missing: create one with python -m reap.join --new-secret FILE")
    try:
        mode, secret = os.stat(path).st_mode, Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"secret_file {path} cannot be read ({error.strerror})") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"secret_file {path} is open to other users; chmod 600 {path}")
    if len(secret) < _MIN_BYTES:
        raise UsageError(f"secret_file {path} holds {len(secret)} bytes; a secret has at least {_MIN_BYTES}")
    return secret


@dataclass(frozen=True)
class NodeSettings:
    """Where a collector listens for nodes, and which launcher starts them."""

    launcher: str
    listen: str = LOOPBACK
    port: int = 0
    secret_file: str | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)
    patience: float = PATIENCE

    def open(self, count: int, store: int, wake: Callable[[], None]) -> NodePool:
        """Listen for nodes; with submitit, also submit `count` jobs, one for each worker."""
        if self.launcher == "submitit":
            return _Submitted(self, count, store, wake)
        if self.launcher == "submitit_delayed":
            return _Delayed(self, store, wake)
        return NodePool(self, read_secret(self.secret_file), store, wake)


class NodePool:
    """The nodes of one collector."""

    def __init__(self, nodes: NodeSettings, secret: bytes, store: int, wake: Callable[[], None]) -> None:
        self._nodes = nodes
        self.registry = NodeRegistry(nodes.listen, nodes.port, secret, store, wake)

    def gather(
        self,
        jobs: Sequence[bytes],
        transport: str,
        more: Sequence[Any],
        on_end: Callable[[NodeProcess], None],
        wait: Callable[[float], None],
        *,
        spares: bool = False,
    ) -> list[NodeProcess]:
        """Wait until nodes offer as many places as there are jobs, then start all; `wait(seconds)` sleeps meanwhile.

        `spares`: keep nodes that are not needed now for replacements.
        """
        registry, until = self.registry, time.monotonic() + self._nodes.patience
        while (found := registry.places) < len(jobs):
            self.check()
            if time.monotonic() > until:
                raise WorkerDied(
                    f"only {found} of {len(jobs)} workers connected to {registry.host}:{registry.port} within "
                    f"{self._nodes.patience:.0f} s (join_timeout)"
                )
            wait(min(1.0, max(0.0, until - time.monotonic())))
        node_processes = []
        for i, job in enumerate(jobs):  # a node may have left after it was counted
            left = max(0.0, until - time.monotonic())
            node_processes.append(registry.start(i, transport, job, more[i], on_end, left))
        if not spares and not registry.wanted:
            registry.dismiss_rest()
        return node_processes

    def replace(
        self, index: int, job: bytes, transport: str, more: Any, on_end: Callable[[NodeProcess], None]
    ) -> NodeProcess:
        """Start a replacement for a worker that has ended: at once in a free place, else when a node connects."""
        if self.registry.no_node_came:
            raise ConnectionError("no node is available to start a replacement")
        found = self.registry.start(index, transport, job, more, on_end, self._nodes.patience)
        if self.registry.wanted:
            self.request_node()
        return found

    def request_node(self) -> None:
        """Submit a job for one more node, if this launcher submits jobs; else the user has to start a node."""

    def check(self) -> None:
        """Raise if some nodes will never connect."""

    def close(self, patience: float) -> None:
        """End all nodes."""
        self.registry.close(patience)


class _Submitted(NodePool):
    """Nodes that run in jobs the collector submits."""

    def __init__(self, nodes: NodeSettings, count: int, store: int, wake: Callable[[], None]) -> None:
        conf = {"folder": "reap-jobs", **DEFAULT_SLURM_CONF, **nodes.slurm}
        folder = Path(conf.pop("folder")).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._executor = executor = make_executor(folder, conf)
        if executor.cluster != "local" and nodes.listen == LOOPBACK:
            raise UsageError(
                f"launcher 'submitit': give the address at which {executor.cluster} nodes reach this machine, "
                f"listen='10.…'"
            )
        self._secret_file = folder / f"secret-{secrets.token_hex(8)}"
        new_secret(self._secret_file)
        with contextlib.ExitStack() as undo:
            undo.callback(self._secret_file.unlink)
            super().__init__(nodes, read_secret(self._secret_file), store, wake)
            undo.callback(super().close, 0.0)
            with executor.batch():
                self._jobs = [self._submit() for _ in range(count)]
            undo.pop_all()

    def _submit(self) -> Any:
        return self._executor.submit(join, self.registry.host, self.registry.port, str(self._secret_file))

    def request_node(self) -> None:
        try:
            self._jobs = [job for job in self._jobs if not job.done()] + [self._submit()]
        except Exception as error:  # of any class that submitit or its scheduler raises
            raise ConnectionError(f"no other job could be submitted: {error}") from error

    def check(self) -> None:
        for job in self._jobs:
            if job.done():
                error = job.exception()
                raise WorkerDied(f"job {job.job_id} ended before its worker began: {error or job.result()}")

    def close(self, patience: float) -> None:
        super().close(patience)
        self._secret_file.unlink(missing_ok=True)
        until = time.monotonic() + patience
        while not all(job.done() for job in self._jobs) and time.monotonic() < until:
            time.sleep(0.02)  # submitit polls files: there is nothing to wait on
        for job in self._jobs:
            if not job.done():
                job.cancel()


class _Delayed(NodePool):
    """Nodes that run in jobs submitted before the collector was started."""

    def __init__(self, nodes: NodeSettings, store: int, wake: Callable[[], None]) -> None:
        if _meeting_folder is None:
            raise UsageError("launcher 'submitit_delayed' works in a function under submitit_delayed_launcher")
        meeting = json.loads((_meeting_folder / "jobs").read_text())
        if meeting["cluster"] != "local" and nodes.listen == LOOPBACK:
            raise UsageError(
                "launcher 'submitit_delayed': give the address at which nodes reach this machine, listen='10.…'"
            )
        nodes = nodes if nodes.port else replace(nodes, port=meeting["port"])
        super().__init__(nodes, read_secret(_meeting_folder / "secret"), store, wake)
        write_json(_meeting_folder / "address", {"host": self.registry.host, "port": self.registry.port})


def make_executor(folder: Path, conf: Mapping[str, Any]) -> Any:
    """Return a submitit executor: of SLURM where that is available, else of processes on this machine."""
    try:
        import submitit
    except ImportError:
        raise missing("submitit", "slurm") from None
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=conf.get("cluster"))
        executor.update_parameters(**{key: value for key, value in conf.items() if key != "cluster"})
    except (NameError, TypeError, RuntimeError) as error:
        raise UsageError(f"slurm_kwargs: {error}") from None
    return executor


def write_json(path: Path, what: Any) -> None:
    """Write a JSON file atomically: readers see it whole, or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.rename(path)


def join(
    host: str,
    port: int,
    secret_file: str,
    *,
    workers: int = 1,
    listen: str | None = None,
    patience: float = PATIENCE,
    again: bool = False,
) -> str:
    """Run a node until the collector ends, and return why it ended. `again`: wait for the next collector then."""
    secret = read_secret(secret_file)
    while True:
        why = NodeAgent(host, port, secret, workers=workers, listen=listen, patience=patience).run()
        if not again:
            return why


def join_later(folder: str) -> str:
    """Run a node for the collector that will write its address into this folder."""
    address, until = Path(folder) / "address", time.monotonic() + PATIENCE
    while not address.exists():
        if time.monotonic() > until:
            raise ConnectionError(f"no collector wrote its address to {address} within {PATIENCE:.0f} s")
        time.sleep(0.1)  # a file system shared by machines: there is nothing to wait on
    found = json.loads(address.read_text())
    return join(found["host"], found["port"], f"{folder}/secret")


def run_at_meeting(folder: str, path: Sequence[str], main: Callable[[], Any]) -> Any:
    """Run `main` in the job whose collector finds its nodes through `folder`."""
    global _meeting_folder
    sys.path.extend(entry for entry in path if entry not in sys.path)
    _meeting_folder = Path(folder)
    with contextlib.ExitStack() as after:
        after.callback(lambda: (_meeting_folder / "address").unlink(missing_ok=True))
        return main()
