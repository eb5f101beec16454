"""torch.distributed: workers that are reached over the network by gloo; one tensor per slot, received where it stays.

    store (loopback, unless you name an address)   ── orders, sealed ──►  station
    group of two, for each worker                  ◄── header, slot ────  station
    group of all                                   ── weights, broadcast ► stations

A thread for each worker receives. It ends when its worker's connection does.
"""

from __future__ import annotations

import functools
import pickle
import secrets
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reap.backends.far import Bell, FarBackend, FarRemote, LocalChild
from reap.backends.far_worker import FarJob, Header, Order, header
from reap.backends.process import DEADLINE
from reap.backends.seal import Seal
from reap.backends.torchdist_worker import HERE, Address, join_broadcast, receive, run_gloo, wait
from reap.children import Child, dumps, end
from reap.errors import WorkerDied
from reap.weights.shared import Packing

_LOOPBACK = "127.0.0.1"
_GOODBYE = 0.3  # seconds after which one that did not go home is in the middle of a rollout nobody wants any more
_UNDER_WAY = 2  # parcels of weights that may be on their way at a time


class GlooRemote(FarRemote):
    """A worker and the thread that receives from it."""

    def __init__(self, index: int, child: Child, address: Address, bell: Bell, give_up: Callable[[], None]) -> None:
        super().__init__(index, LocalChild(child, self, give_up))
        self._address, self._bell, self._seal = address, bell, Seal(address.secret)
        self.told = self._heard = 0  # orders and news so far
        self.thread = threading.Thread(target=self._receive_all, name=f"reap-receiver-{index}", daemon=True)
        self.thread.start()

    def _receive_all(self) -> None:
        try:
            if self._comes():
                group = self._address.group(f"data/{self.index}", 0, 2)
                words = header()
                while True:
                    wait(group.recv([torch.from_numpy(words)], 1, 0))
                    self.ear.append(self._receive(group, Header(words)))
                    self._bell.ring()
        except (ConnectionError, RuntimeError):
            pass  # it is gone, or about to be: whoever listens finds out how
        finally:
            self.over = True
            self._bell.ring()

    def _comes(self) -> bool:
        """Wait for its first sign; or until somebody who knows that there will be none calls it off."""
        return bytes(self._address.store().get(f"here/{self.index}")) == HERE

    def _receive(self, group: Any, head: Header) -> Any:
        if head.rollout and (block := self.slots.block(head.slot)).size:
            wait(group.recv([torch.from_numpy(block)], 1, 0))
        place = f"from/{self.index}/{self._heard}"
        more = self._seal.open(receive(group, 1, head.more), place) if head.more else b""
        self._heard += 1
        return head.full(more) if head.rollout else pickle.loads(more)


class GlooBackend(FarBackend):
    """Workers over torch.distributed, started on this machine."""

    roads = ("distributed", "parcel", "none")

    def __init__(
        self, plans: Sequence[Any], *, port: int | None = None, start_method: Any = "forkserver", **options: Any
    ) -> None:
        super().__init__(plans, start_method=start_method, **options)
        self._port = port or 0
        self._children: list[Child] = []
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._group: Any = None
        self._store: Any = None

    def launch(self, jobs: Sequence[FarJob]) -> None:
        listening = socket.create_server((_LOOPBACK, self._port), backlog=1024)
        port = listening.getsockname()[1]
        self._store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._address = Address(_LOOPBACK, port, secrets.token_bytes(32), _LOOPBACK)
        self._seal = Seal(self._address.secret)
        targets = [
            dumps(functools.partial(run_gloo, job=job, address=self._address), f"what worker {job.index} needs")
            for job in jobs
        ]
        for job, target in zip(jobs, targets):
            child = Child(target, start=self._start_method, name=f"reap-worker-{job.index}")
            self._children.append(child)
            give_up = functools.partial(self._give_up, job.index)
            self.workers.append(GlooRemote(job.index, child, self._address, self.bell, give_up))
            self._selector.register(child.sentinel, selectors.EVENT_READ)

    def _give_up(self, index: int) -> None:
        """It ended; whoever waits for its first sign need not any more."""
        if self._store is not None:
            self._store.compare_set(f"here/{index}", "", "never")

    def send(self, remote: Any, order: Order | None) -> None:
        key = f"to/{remote.index}/{remote.told}"
        remote.told += 1
        self._store.set(key, self._seal.close(pickle.dumps(order), key))

    def meet(self, packing: Packing) -> None:
        self._group = self._address.group("weights", 0, len(self.workers) + 1)

    def broadcast(self, parcel: Tensor) -> None:
        try:
            while len(self._under_way) >= _UNDER_WAY:
                wait(self._under_way.popleft()[0])
            self._under_way.append((join_broadcast(self._group, parcel), parcel))
        except (ConnectionError, RuntimeError) as error:
            for remote in self.workers:
                if self._children[remote.index].gone(1.0):
                    raise self._death(remote) from None
            raise WorkerDied(f"weights could not be sent: {error}") from None

    def part(self, workers: Sequence[FarRemote]) -> None:
        for remote in workers:
            self.send(remote, None)
        end(self._children, patience=_GOODBYE, deadline=DEADLINE)
        for remote in workers:
            remote.thread.join(DEADLINE)  # type: ignore[attr-defined]
        self._under_way.clear()
        self._group = self._store = None
