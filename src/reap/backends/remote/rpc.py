"""torch.distributed.rpc: workers that are called over TensorPipe. Orders are calls; messages are fetched one by one.

A process has one RPC agent: one such collector at a time, and none where you have started RPC yourself. Agents of one
machine talk through shared memory, and listen at no port; those of several listen on the loopback interface alone, and
talk through tunnels (see rpc_worker.py).
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import FileStore, rpc  # type: ignore[attr-defined]

from reap._foreign import torch_internals
from reap._system.pickling import dumps
from reap._system.processes import DEADLINE, GOODBYE, StartMethod
from reap._system.processes import end as end_children
from reap._system.temporary import TemporaryFolder
from reap.backends.network.launchers import NodePool, Nodes
from reap.backends.network.loopback_store import loopback_store
from reap.backends.network.node_registry import NodeProcess
from reap.backends.remote.message_transport import (
    MessageConnection,
    MessageTransport,
    NetworkChild,
    SentWeights,
    Wakeup,
)
from reap.backends.remote.remote_worker import Message, Order
from reap.backends.remote.rpc_worker import (
    COLLECTOR,
    JOIN,
    GuardedStore,
    below,
    join_agent,
    message,
    name,
    order,
    run_rpc,
    send,
    take_weights,
)
from reap.backends.worker_handle import WorkerHandle
from reap.errors import UsageError, WorkerDied

THREADS = 2  # an agent needs at least: one waits for messages, and orders must pass
_SHM_NEEDS = ("/dev/shm", "/proc/sys/kernel/random/boot_id", "/proc/self/ns/net")
_LOOK = 0.05  # seconds: how often a store is asked who is there


def _has_agent() -> bool:
    try:
        rpc.get_worker_info()
    except RuntimeError:  # it needs one
        return False
    return True


class RPCConnection(MessageConnection):
    """A worker as it is reached by calls of its agent."""

    def __init__(self, worker: WorkerHandle, sent: SentWeights, child: Any, wakeup: Wakeup) -> None:
        super().__init__(worker, sent)
        self._agent, self._wakeup = name(worker.index), wakeup
        self.child = NetworkChild(child, self, lambda: None)
        self.after = threading.Thread(
            target=self.child.end_with_connection, name=f"reap-after-{worker.index}", daemon=True
        )

    def send(self, what: Order | None) -> None:
        number, self.orders = self.orders, self.orders + 1
        send(self._agent, order, number, what)

    def listen(self) -> None:
        """Ask for its next messages; when they come, for those after."""
        future = send(self._agent, message)
        if future is None:  # it is gone, or we are about to be
            self._end()
        else:
            future.add_done_callback(self._heard)

    def _heard(self, future: Any) -> None:
        try:
            said = future.value()
            if said is None:  # it has closed its env, and only waits for us to have heard so
                self.child.signal(signal.SIGTERM)
        except Exception:  # whatever TensorPipe calls it: it is gone
            said = None
        if said is None:
            self._end()
            return
        header, block, more = said
        self.inbox.append(Message(header.numpy(), None if block is None else block.numpy(), more))
        self._wakeup.ring()
        self.listen()

    def _end(self) -> None:
        self.over = True
        self._wakeup.ring()
        self.after.start()

    def let_end(self) -> None:
        if self.after.ident is not None:
            self.after.join(DEADLINE)

    def hear(self) -> tuple[list[Any], bool]:
        messages, gone = super().hear()
        return [self.received(said) for said in messages], gone


class TensorPipeTransport(MessageTransport):
    """Reaches workers over TensorPipe, on this machine or on nodes."""

    weight_schemes = ("rpc", "per_worker", "none")

    def __init__(self, *, agent: Mapping[str, Any], nodes: Nodes, start_method: StartMethod = "forkserver") -> None:
        super().__init__(start_method=start_method)
        self._agent, self._nodes = {"rpc_timeout": 0, **agent}, nodes
        self._company: NodePool | None = None
        self._guarded: GuardedStore | None = None
        self._store: Any = None
        self._joined = False

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        if _has_agent():
            raise UsageError("this process has an RPC agent already, and can have one; shut that down first")
        packed = [dumps(worker.job, f"what worker {worker.index} needs") for worker in workers]
        if self._nodes.launcher == "mp":
            self._meet_here(packed)
        else:
            self._children = dict(enumerate(self._invite(packed)))
        children = list(self._children.values())
        connections = [RPCConnection(worker, self.sent, c, self.wakeup) for worker, c in zip(workers, children)]
        for worker, connection, child in zip(workers, connections, children):
            self.connect(worker, connection, child.sentinel)
        self._see_all(workers)
        join_agent(self._guarded or self._store, COLLECTOR, 0, len(workers) + 1, self._agent)
        self._joined = True
        for connection in connections:
            connection.listen()

    def _meet_here(self, packed: Sequence[bytes]) -> None:
        self._meeting = TemporaryFolder("rpc")
        file, count = f"{self._meeting.path}/agents", len(packed)
        self._store = FileStore(file, -1)
        self._store.set_timeout(JOIN)
        if all(os.path.exists(path) for path in _SHM_NEEDS):
            self._agent = {**torch_internals.ON_ONE_MACHINE, **self._agent}
        run = functools.partial(run_rpc, workers=count, file=file, options=self._agent)
        self.start_children({i: functools.partial(run, job=job, index=i) for i, job in enumerate(packed)})

    def _invite(self, packed: Sequence[bytes]) -> list[Any]:
        self._store = loopback_store(0, JOIN)
        self._agent.update(torch_internals.BETWEEN_MACHINES)
        self._company = self._nodes.open(len(packed), self._store.port, self.wakeup.ring)
        peers = [name(index) for index in range(len(packed))]
        self._guarded = GuardedStore(self._store, self._company.registry.secret, self._nodes.listen, peers)
        more = {"workers": len(packed), "options": self._agent}
        return list(self._company.gather(packed, "rpc", more, self._lost, self.linger))

    def _lost(self, node_process: NodeProcess) -> None:
        """Called from a thread of the registry."""
        if node_process.lost and self._guarded is not None:
            self._guarded.cut(name(node_process.index))

    def _see_all(self, workers: Sequence[WorkerHandle]) -> None:
        """Agents wait for all others, dead or alive. So first see that they live."""
        keys = [f"here/{worker.index}" for worker in workers]
        while not all(self._store.check([key]) for key in keys):
            self.linger(_LOOK)
            for worker, child in zip(workers, self._children.values()):
                if child.gone():
                    raise WorkerDied(str(child.death())).at(worker=worker.name)

    def cannot_restart(self) -> str | None:
        return "torch's RPC lets no agent join in the place of one that died; use 'drop', or DistributedCollector"

    def broadcast(self, packed: Tensor) -> None:
        for index in below(-1, len(self._workers)):
            send(name(index), take_weights, packed)

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        living = [worker for worker in workers if not worker.dropped]
        connections = [one for worker in living if isinstance(one := worker.connection, RPCConnection)]
        for connection in connections:
            if self._joined and not connection.child.gone():
                connection.send(None)
        end_children(self._children.values(), patience=GOODBYE, deadline=DEADLINE)
        if self._joined:
            rpc.shutdown(graceful=False)
        for connection in connections:
            if connection.after.is_alive():
                connection.after.join()
        if self._guarded is not None:
            self._guarded.close()
        if self._company is not None:
            self._company.close(DEADLINE)
        if hasattr(self, "_meeting"):
            self._meeting.close()
