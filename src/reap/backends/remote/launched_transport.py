"""LaunchedTransport: base of the gloo and TensorPipe transports, whose workers are started by a launcher.

launcher "mp"      processes of this machine, which share memory for weights with this one
other launchers    processes of nodes, which connect to the collector (see network/launchers.py)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from reap._system.processes import BOOT, StartMethod
from reap.backends.network.launchers import NodePool, NodeSettings
from reap.backends.network.node_registry import NodeProcess
from reap.backends.remote.message_transport import MessageConnection, MessageTransport
from reap.backends.worker_handle import WorkerHandle


class LaunchedTransport(MessageTransport):
    """Runs workers as processes of this machine or of nodes.

    `one_by_one`: workers may be replaced or dropped, so none may depend on another: weights are not broadcast, and
    there is no RPC group of all.
    """

    network: ClassVar[str]  # tells a node which kind of worker to run

    def __init__(
        self, *, nodes: NodeSettings, one_by_one: bool = False, start_method: StartMethod = "forkserver"
    ) -> None:
        super().__init__(start_method=start_method)
        self._nodes, self._one_by_one = nodes, one_by_one
        self._local = nodes.launcher == "mp"
        self.startup_grace = BOOT if self._local else BOOT + nodes.patience
        self._node_pool: NodePool | None = None

    @abstractmethod
    def cut_off(self, connection: MessageConnection) -> None:
        """End all waits for a worker whose node is lost. Called from another thread."""

    def start_on_nodes(
        self, workers: Sequence[WorkerHandle], jobs: Mapping[int, bytes], more: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Start workers on nodes, each with its own job and `more` arguments, both given by worker number."""
        pool = self._node_pool
        assert pool is not None
        if all(worker.connection is None for worker in workers):
            gathered = pool.gather(
                list(jobs.values()),
                self.network,
                list(more.values()),
                self._ended,
                self.wait_for_wakeup,
                spares=self._one_by_one,
            )
            self._children.update(zip(jobs, gathered))
        else:
            for i, job in jobs.items():
                self._children[i] = pool.replace(i, job, self.network, more[i], self._ended)

    def _ended(self, process: NodeProcess) -> None:
        """End the waits for a process whose node is lost. Called from a thread of the registry."""
        if process.lost:
            connection = self._workers[process.index].connection
            if isinstance(connection, MessageConnection) and connection.child.process is process:
                self.cut_off(connection)
