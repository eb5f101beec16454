"""torch.distributed.rpc: workers that are called over TensorPipe. Orders are calls; news are fetched, one at a time.

A process has one RPC agent: one such collector at a time, and none where you have started RPC yourself. The agents meet
through a file that only this user can open, and listen on the loopback interface alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from reap.backends.far import Bell, FarBackend, FarRemote, LocalChild
from reap.backends.far_worker import FarJob, News, Order
from reap.backends.mail import MailStation
from reap.backends.process import DEADLINE
from reap.children import Child, dumps, end
from reap.errors import UsageError

_GOODBYE = 0.3  # seconds after which one that did not go home is in the middle of a rollout nobody wants any more
_INTERFACE = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # where agents listen

# ---- the worker's side ----------------------------------------------------------------------------------------------

_stations: list[MailStation] = []  # of this process: what is called finds it here
_built = threading.Event()  # once there is one


def _station() -> MailStation:
    _built.wait()
    return _stations[0]


def run_rpc(
    connection: Any, fds: Any, job: bytes, index: int, workers: int, options: Mapping[str, Any], agents: int, team: str
) -> None:
    """The life of a worker. Its parent has had so many agents before: torch has both sides count them."""
    rpc._init_counter = agents
    _join(_name(team, index), index + 1, workers + 1, options)  # first: agents wait for all others, dead or alive
    station = MailStation(job, ())
    _stations.append(station)
    _built.set()
    station.wait()
    threading.Event().wait()  # what it said last is still to be fetched; whoever has it ends this process


def _order(number: int, order: Order | None) -> None:
    _station().order(number, order)


def _news() -> tuple[Tensor, Tensor | None, bytes] | None:
    news = _station().news()
    if news is None:
        return None
    header, block, more = news
    return torch.from_numpy(header), None if block is None else torch.from_numpy(block), more


def _parcel(parcel: Tensor) -> None:
    _station().parcel(parcel.numpy())


# ---- the parent's side ----------------------------------------------------------------------------------------------


def _name(team: str, index: int) -> str:
    """Torch counts what agents of the same names have gathered, in each process by itself: so no name comes twice."""
    return f"{team}-{index}"


def _join(name: str, rank: int, size: int, options: Mapping[str, Any]) -> None:
    with _on_loopback(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what torch itself does there
        made = rpc.TensorPipeRpcBackendOptions(**options)
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=made)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Agents choose where to listen by these words; those the user has set stay."""
    usual = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    ours = [word for word in _INTERFACE if word not in os.environ]
    os.environ.update(dict.fromkeys(ours, usual))
    try:
        yield
    finally:
        for word in ours:
            del os.environ[word]


class RPCRemote(FarRemote):
    """A worker as it is seen here."""

    def __init__(self, index: int, child: Child, bell: Bell, agent: str) -> None:
        super().__init__(index, LocalChild(child, self, lambda: None))
        self._bell, self.agent = bell, agent
        self.told = 0

    def listen(self) -> None:
        """Ask for its next news; when they come, for those after."""
        try:
            rpc.rpc_async(self.agent, _news, timeout=0).add_done_callback(self._heard)
        except RuntimeError:  # it is gone, or we are about to be
            self._end()

    def _heard(self, future: Any) -> None:
        try:
            news = future.value()
        except Exception:  # whatever TensorPipe calls it: it is gone
            news = None
        if news is None:
            self._end()
            return
        header, block, more = news
        self.ear.append(News(header.numpy(), None if block is None else block.numpy(), more))
        self._bell.ring()
        self.listen()

    def _end(self) -> None:
        self.over = True
        self._bell.ring()

    def messages(self) -> list[Any]:
        return [self.carried_in(news) for news in super().messages()]


class RPCBackend(FarBackend):
    """Workers over TensorPipe, started on this machine."""

    roads = ("rpc", "parcel", "none")

    def __init__(self, plans: Sequence[Any], *, agent: Mapping[str, Any], **options: Any) -> None:
        super().__init__(plans, **options)
        self._agent, self._children = dict(agent), list[Child]()
        self._joined = False

    def launch(self, jobs: Sequence[FarJob]) -> None:
        if rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
            raise UsageError("this process has an RPC agent already, and can have one; shut that down first")
        self._meeting = tempfile.mkdtemp(prefix="reap-rpc-")
        options = {"rpc_timeout": 0, "init_method": f"file://{self._meeting}/agents", **self._agent}
        team, agents = f"reap-{secrets.token_hex(8)}", rpc._init_counter
        for job in jobs:
            packed = dumps(job, f"what worker {job.index} needs")
            run = functools.partial(
                run_rpc, job=packed, index=job.index, workers=len(jobs), options=options, agents=agents, team=team
            )
            child = Child(dumps(run, "a worker"), start=self._start_method, name=f"reap-worker-{job.index}")
            self._children.append(child)
            self.workers.append(RPCRemote(job.index, child, self.bell, _name(team, job.index)))
            self._selector.register(child.sentinel, selectors.EVENT_READ)
        _join(team, 0, len(jobs) + 1, options)
        self._joined = True
        for remote in self.workers:
            remote.listen()  # type: ignore[attr-defined]

    def send(self, remote: Any, order: Order | None) -> None:
        number, remote.told = remote.told, remote.told + 1
        with contextlib.suppress(RuntimeError):  # it is gone: whoever listens finds out
            rpc.rpc_async(remote.agent, _order, args=(number, order), timeout=0)

    def broadcast(self, parcel: Tensor) -> None:
        for remote in self.workers:
            agent = remote.agent  # type: ignore[attr-defined]
            rpc.rpc_async(agent, _parcel, args=(parcel,), timeout=0)

    def part(self, workers: Sequence[Any]) -> None:
        for remote in workers:
            if self._joined and not remote.child.gone():
                self.send(remote, None)
        end(self._children, patience=_GOODBYE, deadline=DEADLINE)
        if self._joined:
            rpc.shutdown(graceful=False)
        if hasattr(self, "_meeting"):
            shutil.rmtree(self._meeting, ignore_errors=True)
