"""torch.distributed: workers that are reached over the network by gloo; one tensor per slot, received where it stays.

    store (loopback; other machines come through a listener)   ── orders, sealed ──►  remote worker
    group of two, for each worker                          ◄── header, slot ────  remote worker
    group of all                                           ── weights, broadcast ► remote workers (of nodes; those of
                                                                                   this machine read shared memory)

A thread for each worker receives. It ends when its worker's connection does, or when its node is lost.
"""

from __future__ import annotations

import functools
import pickle
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from reap._system import silence
from reap._system.pickling import dumps
from reap._system.processes import end
from reap.backends.local.process import DEADLINE
from reap.backends.network.authenticated_listener import LOOPBACK
from reap.backends.network.launchers import NodePool, Nodes
from reap.backends.network.loopback_store import loopback_store
from reap.backends.network.node_registry import NodeProcess
from reap.backends.network.signed_messages import MessageSigner
from reap.backends.remote.base import LocalChild, RemoteBackend, RemoteHandle, Wakeup
from reap.backends.remote.gloo_worker import EVER, HERE, Address, abandon, join_broadcast, receive, run_gloo, wait
from reap.backends.remote.remote_worker import Header, Order, RemoteJob, header
from reap.backends.worker_handle import WorkerHandle
from reap.errors import WorkerDied
from reap.weights.shared import Packing

_GOODBYE = 0.3  # seconds after which one that did not go home is in the middle of a rollout nobody wants any more
_UNDER_WAY = 2  # parcels of weights that may be on their way at a time
_LOOK = 0.001  # seconds between looks at one that is: gloo wakes nobody who waits for other things too


class GlooHandle(RemoteHandle):
    """A worker and the thread that receives from it."""

    def __init__(self, index: int, child: Any, address: Address, wakeup: Wakeup, give_up: Callable[[], None]) -> None:
        super().__init__(index, LocalChild(child, self, give_up))
        self._address, self._wakeup, self._seal = address, wakeup, MessageSigner(address.secret)
        self._group: Any = None
        self.told = self._heard = 0  # orders and messages so far
        self.thread = threading.Thread(target=self._receive_all, name=f"reap-receiver-{index}", daemon=True)
        self.thread.start()

    def _receive_all(self) -> None:
        try:
            if self._comes():
                self._group = group = self._address.group(f"data/{self.index}", 0, 2)
                words = header()
                while True:
                    wait(group.recv([torch.from_numpy(words)], 1, 0))
                    self.ear.append(self._receive(group, Header(words)))
                    self._wakeup.ring()
        except (ConnectionError, RuntimeError):
            pass  # it is gone, or about to be: whoever listens finds out how
        finally:
            self._group = None
            self.over = True
            self._wakeup.ring()
            self.child.see_off()  # type: ignore[attr-defined]

    def abandon(self) -> None:
        """Its machine is lost: its connection would stay open for ever."""
        if (group := self._group) is not None:
            abandon(group, 1)

    def _comes(self) -> bool:
        """Wait for its first sign; or until somebody who knows that there will be none calls it off."""
        return bytes(self._address.store().get(f"here/{self.index}")) == HERE

    def _receive(self, group: Any, head: Header) -> Any:
        if head.rollout and (block := self.slots.bytes_of(head.slot)).size:
            wait(group.recv([torch.from_numpy(block)], 1, 0))
        place = f"from/{self.index}/{self._heard}"
        more = self._seal.open(receive(group, 1, head.more), place) if head.more else b""
        self._heard += 1
        return head.full(more) if head.rollout else pickle.loads(more)


class GlooBackend(RemoteBackend):
    """Workers over torch.distributed, on this machine or on nodes."""

    transports = ("distributed", "parcel", "none")

    def __init__(self, plans: Sequence[Any], *, nodes: Nodes, **options: Any) -> None:
        super().__init__(plans, **options)
        self._nodes = nodes
        self._company: NodePool | None = None
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._spare: list[Tensor] = []
        self._group: Any = None
        self._store: Any = None

    def launch(self, jobs: Sequence[RemoteJob]) -> None:
        local = self._nodes.launcher == "mp"
        self._store = loopback_store(self._nodes.port if local else 0, EVER)
        port = self._store.port
        packed = [dumps(job, f"what worker {job.index} needs") for job in jobs]
        if local:
            self._address = Address(LOOPBACK, port, secrets.token_bytes(32), LOOPBACK)
            run = functools.partial(run_gloo, address=self._address)
            self.start_children([functools.partial(run, job=job, index=i) for i, job in enumerate(packed)])
        else:
            self._company = self._nodes.open(len(jobs), port, self.wakeup.ring)
            self._address = Address(LOOPBACK, port, self._company.registry.secret, self._nodes.listen)
            self._children = self._company.gather(packed, "gloo", None, self._lost, self.linger)
        self._seal = MessageSigner(self._address.secret)
        for index, child in enumerate(self._children):
            give_up = functools.partial(self._give_up, index)
            self.workers.append(GlooHandle(index, child, self._address, self.wakeup, give_up))
            self._selector.register(child.sentinel, selectors.EVENT_READ)

    def _lost(self, node_process: NodeProcess) -> None:
        """Called from a thread of the registry."""
        if node_process.lost and node_process.index < len(self.workers):
            self.workers[node_process.index].abandon()  # type: ignore[attr-defined]
            if (group := self._group) is not None:
                abandon(group, node_process.index + 1)

    def _give_up(self, index: int) -> None:
        """It ended; whoever waits for its first sign need not any more."""
        if (store := self._store) is not None:
            store.compare_set(f"here/{index}", "", "never")

    def send(self, remote: Any, order: Order | None) -> None:
        key = f"to/{remote.index}/{remote.told}"
        remote.told += 1
        self._store.set(key, self._seal.close(pickle.dumps(order), key))

    def bind_policy(self, packing: Packing) -> None:
        self._group = self._address.group("weights", 0, len(self.workers) + 1)

    def broadcast(self, parcel: Tensor) -> None:
        try:
            self._under_way.append((join_broadcast(self._group, parcel), parcel))
        except (ConnectionError, RuntimeError) as error:
            raise self._unsent(error) from None

    def spare(self) -> Tensor | None:
        """Waits while too many are on their way: before anything is counted, so that Ctrl-C leaves all as it was."""
        began, logged = time.monotonic(), False
        while len(self._under_way) >= _UNDER_WAY:
            work, sent = self._under_way[0]
            if work.is_completed():
                try:
                    wait(work)
                except ConnectionError as error:
                    raise self._unsent(error) from None
                self._under_way.popleft()
                self._spare.append(sent)
                continue
            time.sleep(_LOOK)
            if threading.current_thread() is threading.main_thread():
                self._interrupts.let_in()
            waited = time.monotonic() - began
            if waited > self._silence.limit and not logged:
                remote, logged = self._no_taker(), True
                if self.timeout is not None:
                    raise remote.child.silence(waited, self.timeout).at(worker=remote.name)
                silence.log(f"worker {remote.name}, which is to take new weights,", waited, remote.child.ask_stack())
        return self._spare.pop() if self._spare else None

    def _unsent(self, error: Exception) -> WorkerDied:
        for remote in self.workers:
            if self._children[remote.index].gone(1.0):
                return self._death(remote)
        return WorkerDied(f"weights could not be sent: {error}")

    def _no_taker(self) -> WorkerHandle:
        """Gloo does not say who takes none: it is who does not answer, or has nothing to say for the longest time."""
        deaf = [remote for remote in self.workers if not remote.child.ask_stack()]
        quiet = deaf or [remote for remote in self.workers if not remote.speaks] or self.workers  # type: ignore[attr-defined]
        return min(quiet, key=lambda one: one.busy_since)

    def part(self, workers: Sequence[RemoteHandle]) -> None:
        for remote in workers:
            self.send(remote, None)
        end(self._children, patience=_GOODBYE, deadline=DEADLINE)
        for remote in workers:
            remote.thread.join(DEADLINE)  # type: ignore[attr-defined]
        if self._company is not None:
            self._company.close(DEADLINE)
        self._under_way.clear()
        self._group = self._store = None
