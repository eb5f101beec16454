"""torch.distributed.rpc: workers reached by calls over TensorPipe. Orders are calls; messages are fetched one by one.

A process has one RPC agent, so it can have one such collector at a time, and none if you have started RPC yourself.
Agents on one machine communicate through shared memory and, where the system has that, listen at no port; agents on
several machines listen on the loopback interface alone and communicate through tunnels (see rpc_worker.py).

Agents that join one RPC group depend on each other for good, and none can join later. So where workers may be replaced
or dropped, each agent is a group of its own, and the collector's agent is introduced to each worker's as it starts.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, rpc  # type: ignore[attr-defined]

from reap._foreign import torch_internals
from reap._system.interrupts import Wakeup
from reap._system.messages.pickling import dumps
from reap._system.processes import DEADLINE, GOODBYE, StartMethod
from reap._system.processes import end as end_children
from reap._system.temporary import TemporaryFolder
from reap.backends.network.launchers import NodeSettings
from reap.backends.network.loopback_store import loopback_store
from reap.backends.remote.launched_transport import LaunchedTransport
from reap.backends.remote.message_transport import MessageConnection, NetworkChild, PublicationCount, connection_of
from reap.backends.remote.remote_worker import Message, Order
from reap.backends.remote.rpc_worker import (
    COLLECTOR,
    JOIN,
    GuardedStore,
    RPCWorld,
    address_key,
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
from reap.errors import UsageError

THREADS = 2  # least threads of an agent: one waits for messages, another passes orders
_SHM_NEEDS = ("/dev/shm", "/proc/sys/kernel/random/boot_id", "/proc/self/ns/net")
_POLL = 0.05  # seconds between two checks of the store for agents that have started
_SPARE_DESCRIPTORS = 96  # file descriptors that must be free to start another agent


def _has_agent() -> bool:
    try:
        rpc.get_worker_info()
    except RuntimeError:  # raised where there is no agent
        return False
    return True


def _check_descriptors() -> None:
    """Raise if another agent might use up the file descriptors, which would fail inside torch."""
    most, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    if most - used < _SPARE_DESCRIPTORS:
        raise ConnectionError(
            f"torch keeps the descriptors of every agent that died (24, for one of this machine), and {used} of {most} "
            f"are open (`ulimit -n`); DistributedCollector and MultiCollector need none of them"
        )


class _Members:
    """The agents that this process's agent can call. They are introduced one at a time, without calls meanwhile."""

    def __init__(self, common: Store) -> None:
        self._common, self._lock = common, threading.Lock()
        self._agent: Any = None
        self._introduced: dict[str, int] = {}
        self._count = 0
        self.peers: list[str] = []  # agents whose addresses may be looked up

    def join(self, options: Mapping[str, Any], guard: Callable[[Store], Store]) -> None:
        """Start this process's agent, which knows no others yet."""
        self._agent = join_agent(guard(PrefixStore(COLLECTOR, self._common)), COLLECTOR, 0, None, options)

    def introduce(self, agent: str) -> bool:
        """Introduce another agent to this process's, and return True; False if it has not started yet."""
        if not self._common.check([f"here/{agent}"]):
            return False
        with self._lock:
            self._count += 1
            self.peers.append(agent)
            address = bytes(self._common.get(address_key(agent))).decode()
            self._common.set(address_key(agent, COLLECTOR), address)
            torch_internals.introduce_rpc_agent(self._agent, agent, self._count)
            self._introduced[agent] = self._count
        return True

    def forget(self, agent: str) -> None:
        """Remove an agent that is gone."""
        with self._lock:
            if (number := self._introduced.pop(agent, None)) is not None and self._agent is not None:
                torch_internals.introduce_rpc_agent(self._agent, agent, number, gone=True)

    def call(self, agent: str, what: Callable[..., Any], *arguments: Any) -> Any:
        """Call an agent and return the future; None if the agent is gone."""
        with self._lock:
            return send(agent, what, *arguments)


class RPCConnection(MessageConnection):
    """The connection to one worker, by calls to its agent."""

    def __init__(
        self, worker: WorkerHandle, sent: PublicationCount, child: Any, wakeup: Wakeup, members: _Members
    ) -> None:
        super().__init__(worker, sent)
        self.agent, self._wakeup, self._members = name(worker.index, worker.restarts), wakeup, members
        self.child = NetworkChild(child, self, lambda: None)
        self._introducer = threading.Thread(target=self._introduce, name=f"reap-meets-{worker.index}", daemon=True)
        self.after = threading.Thread(
            target=self.child.end_with_connection, name=f"reap-after-{worker.index}", daemon=True
        )

    def send(self, what: Order | None) -> None:
        number, self.orders_sent = self.orders_sent, self.orders_sent + 1
        self._members.call(self.agent, order, number, what)

    def send_weights(self, packed: Tensor) -> None:
        self._members.call(self.agent, take_weights, packed)

    def introduce(self) -> None:
        """Start to receive messages as soon as the agent has started."""
        self._introducer.start()

    def _introduce(self) -> None:
        try:
            while not self._members.introduce(self.agent):
                if self.child.process.gone():
                    raise ConnectionError
                time.sleep(_POLL)
            self.listen()
        except Exception:  # it ended before it had started, or its address is unusable, and it is ended
            self._end()

    def listen(self) -> None:
        """Request the next message; its arrival requests the one after it."""
        future = self._members.call(self.agent, message)
        if future is None:  # the worker is gone, or this process is about to end
            self._end()
        else:
            future.add_done_callback(self._on_message)

    def _on_message(self, future: Any) -> None:
        try:
            said = future.value()
            if said is None:  # it has closed its env, and only waits until we know that
                self.child.signal(signal.SIGTERM)
        except Exception:  # whatever TensorPipe raises, the worker is gone
            said = None
        if said is None:
            self._end()
            return
        header, block, more = said
        self.inbox.append(Message(header.numpy(), None if block is None else block.numpy(), more))
        self._wakeup.wake()
        self.listen()

    def _end(self) -> None:
        self.ended = True
        self._wakeup.wake()
        self.after.start()

    def join_introducer(self) -> None:
        """Wait until the thread that introduces the worker has ended, as it does when the worker's process has."""
        if self._introducer.ident is not None:
            self._introducer.join(DEADLINE)

    def join_threads(self) -> None:
        self.join_introducer()
        if self.after.ident is not None:
            self.after.join(DEADLINE)
        self._members.forget(self.agent)

    def receive(self) -> tuple[list[Any], bool]:
        messages, gone = super().receive()
        return [self.unpacked(said) for said in messages], gone


class TensorPipeTransport(LaunchedTransport):
    """Runs workers on this machine or on nodes, and reaches them over TensorPipe."""

    weight_schemes = ("rpc", "per_worker", "none")
    network = "rpc"

    def __init__(
        self,
        *,
        agent: Mapping[str, Any],
        nodes: NodeSettings,
        one_by_one: bool = False,
        start_method: StartMethod = "forkserver",
    ) -> None:
        super().__init__(nodes=nodes, one_by_one=one_by_one, start_method=start_method)
        self._agent = {"rpc_timeout": 0, **agent}
        self._guarded: GuardedStore | None = None
        self._store: Any = None
        self._folder: TemporaryFolder | None = None
        self._joined = False

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        packed = {worker.index: dumps(worker.job, f"what worker {worker.index} needs") for worker in workers}
        if self._store is None:
            if _has_agent():
                raise UsageError("this process already has an RPC agent, and can have only one; shut that down first")
            self._open_store(len(workers))
        elif self._local:
            _check_descriptors()
        worlds = {one.index: replace(self._world, restarts=one.restarts) for one in workers}
        if self._node_pool is None:
            run = functools.partial(run_rpc, file=self._file)
            self.start_children(
                {i: functools.partial(run, job=job, index=i, world=worlds[i]) for i, job in packed.items()}
            )
        else:
            self.start_on_nodes(workers, packed, {index: asdict(world) for index, world in worlds.items()})
        for worker in workers:
            child = self._children[worker.index]
            connection = RPCConnection(worker, self.sent, child, self.wakeup, self._members)
            self.connect(worker, connection, child.sentinel)
        if not self._one_by_one:
            self._wait_for_agents(workers)
            join_agent(self._guarded or self._store, COLLECTOR, 0, len(workers) + 1, self._agent)
        elif not self._joined:
            self._members.join(self._agent, self._guarded_by)
        self._joined = True
        for worker in workers:
            connection = connection_of(worker, RPCConnection)
            connection.introduce() if self._one_by_one else connection.listen()

    def _open_store(self, count: int) -> None:
        """Create the store in which agents find each other: a file on this machine, or one behind a listener."""
        if self._local:
            self._folder = TemporaryFolder("rpc")
            self._file = f"{self._folder.path}/agents"
            self._store = FileStore(self._file, -1)
            self._store.set_timeout(JOIN)
            if all(os.path.exists(path) for path in _SHM_NEEDS):
                self._agent = {**torch_internals.ON_ONE_MACHINE, **self._agent}
        else:
            self._store = loopback_store(0, JOIN)
            self._agent.update(torch_internals.BETWEEN_MACHINES)
            self._node_pool = self._nodes.open(count, self._store.port, self.wakeup.wake)
        self._members = _Members(self._store)
        self._world = RPCWorld(count, self._agent, alone=self._one_by_one)
        if not (self._local or self._one_by_one):
            self._members.peers.extend(name(index) for index in range(count))
            self._guarded_by(self._store)

    def _guarded_by(self, store: Store) -> Store:
        if self._node_pool is None:
            return store
        secret, peers = self._node_pool.registry.secret, self._members.peers
        self._guarded = GuardedStore(store, secret, self._nodes.listen, peers)
        return self._guarded

    def cut_off(self, connection: MessageConnection) -> None:
        assert isinstance(connection, RPCConnection)
        if self._guarded is not None:
            self._guarded.cut(connection.agent)

    def retire(self, worker: WorkerHandle) -> None:
        super().retire(worker)
        self.cut_off(connection_of(worker, RPCConnection))

    def _wait_for_agents(self, workers: Sequence[WorkerHandle]) -> None:
        """Wait until all agents are about to start: once started, they wait for all others, even for dead ones."""
        keys = [f"here/{name(worker.index)}" for worker in workers]
        while not all(self._store.check([key]) for key in keys):
            self.wait_for_wakeup(_POLL)
            for worker, child in zip(workers, self._children.values()):
                if child.gone():
                    raise child.death().at(worker=worker.name)

    def cannot_restart(self) -> str | None:
        if torch_internals.can_introduce_rpc_agents():
            return None
        return "this torch's RPC cannot replace an agent that died; use DistributedCollector"

    def broadcast(self, packed: Tensor) -> None:
        if self._one_by_one:
            self.send_to_each(packed)
            return
        for index in below(-1, len(self._workers)):
            send(name(index), take_weights, packed)

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        living = [worker for worker in workers if not worker.dropped]
        connections = [one for worker in living if isinstance(one := worker.connection, RPCConnection)]
        for connection in connections:
            if self._joined and not connection.child.gone():
                connection.send(None)
        end_children(self._children.values(), patience=GOODBYE, deadline=DEADLINE)
        for connection in connections:
            connection.join_introducer()  # it uses what is closed next
        if self._joined:
            rpc.shutdown(graceful=False)
        for connection in connections:
            if connection.after.is_alive():
                connection.after.join()
        if self._guarded is not None:
            self._guarded.close()
        if self._node_pool is not None:
            self._node_pool.close(DEADLINE)
        if self._folder is not None:
            self._folder.close()
