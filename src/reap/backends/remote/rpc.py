"""torch.distributed.rpc: workers that are called over TensorPipe. Orders are calls; messages are fetched one by one.

A process has one RPC agent: one such collector at a time, and none where you have started RPC yourself. Agents of one
machine talk through shared memory, and listen at no port; those of several listen on the loopback interface alone, and
talk through doors (see rpc_worker.py).
"""

from __future__ import annotations

import functools
import os
import selectors
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import FileStore, rpc  # type: ignore[attr-defined]

from reap._foreign import torch_internals
from reap._system.pickling import dumps
from reap._system.processes import end
from reap._system.temporary import TemporaryFolder
from reap.backends.local.process import DEADLINE
from reap.backends.network.launchers import NodePool, Nodes
from reap.backends.network.loopback_store import loopback_store
from reap.backends.network.node_registry import NodeProcess
from reap.backends.remote.base import LocalChild, RemoteBackend, RemoteHandle, Wakeup
from reap.backends.remote.remote_worker import Message, Order, RemoteJob
from reap.backends.remote.rpc_worker import (
    COLLECTOR,
    JOIN,
    GuardedStore,
    below,
    join_agent,
    message,
    name,
    order,
    parcel,
    run_rpc,
    send,
)
from reap.errors import UsageError, WorkerDied

THREADS = 2  # an agent needs at least: one waits for messages, and orders must pass
_GOODBYE = 0.3  # seconds after which one that did not go home is in the middle of a rollout nobody wants any more
_SHM_NEEDS = ("/dev/shm", "/proc/sys/kernel/random/boot_id", "/proc/self/ns/net")
_LOOK = 0.05  # seconds: how often a store is asked who is there


def _has_agent() -> bool:
    try:
        rpc.get_worker_info()
    except RuntimeError:  # it needs one
        return False
    return True


class RPCHandle(RemoteHandle):
    """A worker as it is seen here."""

    def __init__(self, index: int, child: Any, wakeup: Wakeup) -> None:
        super().__init__(index, LocalChild(child, self, lambda: None))
        self._wakeup, self.agent = wakeup, name(index)
        self.told = 0
        self.after = threading.Thread(target=self.child.see_off, name=f"reap-after-{index}", daemon=True)  # type: ignore[attr-defined]

    def listen(self) -> None:
        """Ask for its next messages; when they come, for those after."""
        future = send(self.agent, message)
        if future is None:  # it is gone, or we are about to be
            self._end()
        else:
            future.add_done_callback(self._heard)

    def _heard(self, future: Any) -> None:
        try:
            said = future.value()
        except Exception:  # whatever TensorPipe calls it: it is gone
            said = None
        if said is None:
            self._end()
            return
        header, block, more = said
        self.ear.append(Message(header.numpy(), None if block is None else block.numpy(), more))
        self._wakeup.ring()
        self.listen()

    def _end(self) -> None:
        self.over = True
        self._wakeup.ring()
        self.after.start()

    def messages(self) -> list[Any]:
        return [self.carried_in(said) for said in super().messages()]


class RPCBackend(RemoteBackend):
    """Workers over TensorPipe, on this machine or on nodes."""

    transports = ("rpc", "parcel", "none")

    def __init__(self, plans: Sequence[Any], *, agent: Mapping[str, Any], nodes: Nodes, **options: Any) -> None:
        super().__init__(plans, **options)
        self._agent, self._nodes = {"rpc_timeout": 0, **agent}, nodes
        self._company: NodePool | None = None
        self._guarded: GuardedStore | None = None
        self._store: Any = None
        self._joined = False

    def launch(self, jobs: Sequence[RemoteJob]) -> None:
        if _has_agent():
            raise UsageError("this process has an RPC agent already, and can have one; shut that down first")
        packed = [dumps(job, f"what worker {job.index} needs") for job in jobs]
        if self._nodes.launcher == "mp":
            self._meet_here(packed)
        else:
            self._children = self._invite(packed)
        for index, child in enumerate(self._children):
            self.workers.append(RPCHandle(index, child, self.wakeup))
            self._selector.register(child.sentinel, selectors.EVENT_READ)
        self._see_all()
        join_agent(self._guarded or self._store, COLLECTOR, 0, len(jobs) + 1, self._agent)
        self._joined = True
        for remote in self.workers:
            remote.listen()  # type: ignore[attr-defined]

    def _meet_here(self, packed: Sequence[bytes]) -> None:
        self._meeting = TemporaryFolder("rpc")
        file, count = f"{self._meeting.path}/agents", len(packed)
        self._store = FileStore(file, -1)
        self._store.set_timeout(JOIN)
        if all(os.path.exists(path) for path in _SHM_NEEDS):
            self._agent = {**torch_internals.ON_ONE_MACHINE, **self._agent}
        run = functools.partial(run_rpc, workers=count, file=file, options=self._agent)
        self.start_children([functools.partial(run, job=job, index=i) for i, job in enumerate(packed)])

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

    def _see_all(self) -> None:
        """Agents wait for all others, dead or alive. So first see that they live."""
        keys = [f"here/{remote.index}" for remote in self.workers]
        while not all(self._store.check([key]) for key in keys):
            self.linger(_LOOK)
            for remote, child in zip(self.workers, self._children):
                if child.gone():
                    raise WorkerDied(str(child.death())).at(worker=remote.name)

    def send(self, remote: Any, what: Order | None) -> None:
        number, remote.told = remote.told, remote.told + 1
        send(remote.agent, order, number, what)

    def broadcast(self, weights: Tensor) -> None:
        for index in below(-1, len(self.workers)):
            send(name(index), parcel, weights)

    def part(self, workers: Sequence[Any]) -> None:
        for remote in workers:
            if self._joined and not remote.child.gone():
                self.send(remote, None)
        end(self._children, patience=_GOODBYE, deadline=DEADLINE)
        if self._joined:
            rpc.shutdown(graceful=False)
        for remote in workers:
            if remote.after.is_alive():
                remote.after.join()
        if self._guarded is not None:
            self._guarded.close()
        if self._company is not None:
            self._company.close(DEADLINE)
        if hasattr(self, "_meeting"):
            self._meeting.close()
