"""The worker's side of torch.distributed.rpc: what workers are called for, and how agents find each other.

    collector ── weights ┬─► worker 0 ─┬─► worker 2 …       weights go down a tree: everybody sends to two
                         └─► worker 1  └─► worker 3 …      (of nodes; those of this machine read shared memory)

Where workers may be replaced, or left out, no agent may need another: each is a world of its own, the collector's is
told of each as it comes, and sends weights to all of them itself.

An agent knows no secrets and does what it is told. So on one machine it listens at no port, and else on the loopback
interface alone; to other machines it is reached through a listener, and reaches their agents through tunnels.
"""

from __future__ import annotations

import functools
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore, rpc  # type: ignore[attr-defined]

from reap._foreign import torch_internals
from reap.backends.network.authenticated_listener import LOOPBACK, AuthenticatedListener, Tunnel
from reap.backends.remote.ordered_mailbox import MailboxWorker
from reap.backends.remote.remote_worker import LocalWeights, Order
from reap.core.shared_slots import SharedFile
from reap.errors import UsageError

COLLECTOR = "collector"
JOIN = timedelta(seconds=60)  # for all agents to be there, once all processes are
_INTERFACE = "TP_SOCKET_IFNAME"  # where agents listen
_BRANCHES = 2  # to how many everybody sends weights
_ADDRESSES = "addrs/"  # how torch calls them in the store
_NOWHERE = b"uv://127.0.0.1:1"  # of an agent we never call

_workers: list[MailboxWorker] = []  # of this process: what is called finds it here
_below: list[str] = []  # agents to which this one sends weights on
_built = threading.Event()  # once there is a remote worker


def name(index: int, restarts: int = 0) -> str:
    """Of a worker's agent: another in its place has another."""
    return f"worker-{index}-{restarts}"


def address_key(agent: str, world: str | None = None) -> str:
    """Where the address of an agent is for those of a `world` (its own), in the store that all have in common."""
    return f"{world or agent}/{_ADDRESSES}{agent}"


def below(index: int, workers: int) -> list[int]:
    """To whom a worker sends weights on; the collector is number -1."""
    first = _BRANCHES * (index + 1)
    return [i for i in range(first, first + _BRANCHES) if i < workers]


class GuardedStore(Store):
    """A store in which agents of other machines are found at the ends of tunnels.

    Torch puts the address of an agent into it, and asks for those of all others.
    """

    def __init__(self, store: Store, secret: bytes, listen: str, peers: Sequence[str]) -> None:
        super().__init__()
        self._store, self._secret, self._listen, self._peers = store, secret, listen, peers
        self._own = (b"", b"")
        self._listener: AuthenticatedListener | None = None
        self._tunnels: dict[str, Tunnel] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value; an address is that of a listener here."""
        if _ADDRESSES in key:
            self._own = (key.encode(), bytes(value))
            port = int(bytes(value).rsplit(b":", 1)[1])
            services: dict[str, Any] = {}
            self._listener = AuthenticatedListener(self._listen, 0, self._secret, services)
            services["agent"] = self._listener.lead_to(port)
            value = f"{self._listen} {self._listener.port} {port}"
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value; an address is that of a tunnel here."""
        if key.encode() == self._own[0]:
            return self._own[1]
        value = bytes(self._store.get(key))
        if _ADDRESSES not in key:
            return value
        peer = key.rsplit("/", 1)[1]
        if peer not in self._peers:
            return _NOWHERE
        host, listener, port = value.decode().split()
        if host != self._listen:  # another machine. The same port here: agents tell each other which they have
            try:
                self._tunnels[peer] = Tunnel(host, int(listener), self._secret, "agent", at=int(port))
            except UsageError as error:
                raise UsageError(
                    f"{error}. The agent of {peer} has this port on {host}, and needs it on every machine; agents that "
                    f"are started again get other ports"
                ) from None
        return f"uv://{LOOPBACK}:{port}".encode()

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        """Set a key if it has the expected value, as the store itself does; returns what it has now."""
        return bytes(self._store.compare_set(key, expected, wanted))

    def check(self, keys: list[str]) -> bool:
        """Return whether the store has these keys."""
        return bool(self._store.check(keys))

    def cut(self, peer: str) -> None:
        """Close the tunnel to a peer that is out of reach, so that nobody waits for it."""
        if peer in self._tunnels:
            self._tunnels.pop(peer).close()

    def close(self) -> None:
        """Close the listener and all tunnels."""
        for way in (*self._tunnels.values(), *filter(None, [self._listener])):
            way.close()
        self._tunnels.clear()


def join_agent(store: Store, own: str, rank: int, size: int | None, options: Mapping[str, Any]) -> Any:
    """Start this process's agent, and return it when all are there. `size` None: whoever comes is introduced to it."""
    with torch_internals.on_loopback(_INTERFACE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what torch itself does there
        return torch_internals.start_rpc_agent(store, own, rank, size, options)


@dataclass(frozen=True)
class RPCWorld:
    """Which agents there are. `alone`: each knows itself only, and the collector all."""

    workers: int
    options: Mapping[str, Any]
    alone: bool = False
    restarts: int = 0  # of the worker that is told

    def join(self, index: int, common: Store, guard: Callable[[Store], Store] = lambda store: store) -> None:
        """Start a worker's agent; returns when it can be called."""
        own = name(index, self.restarts)
        if self.alone:
            join_agent(guard(PrefixStore(own, common)), own, 0, 1, self.options)
            common.set(f"here/{own}", "here")
        else:
            common.set(f"here/{own}", "here")
            join_agent(guard(common), own, index + 1, self.workers + 1, self.options)
            _below.extend(self.below(index))

    def below(self, index: int) -> list[str]:
        """To whom a worker sends weights on."""
        return [] if self.alone else [name(i) for i in below(index, self.workers)]


def _live(job: bytes, shared: LocalWeights | None = None) -> None:
    remote_worker = MailboxWorker(shared)
    _workers.append(remote_worker)
    _built.set()
    remote_worker.run(job)  # in this thread, the main one: it is the one that hears when it is told to go
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything is closed: no more clean-up that this could interrupt
    threading.Event().wait()  # what it said last is still to be fetched; whoever has it ends this process


def run_rpc(connection: Any, fds: Any, *, job: bytes, index: int, file: str, world: RPCWorld) -> None:
    """The life of a worker of this machine: agents meet in a file that only this user can open.

    `fds`: of the memory weights are in.
    """
    store = FileStore(file, -1)
    store.set_timeout(JOIN)
    world.join(index, store)
    _live(job, LocalWeights(SharedFile(fd=fds[0])))


def run_rpc_on_node(
    connection: Any, fds: Any, *, job: bytes, index: int, address: Mapping[str, Any], more: Any
) -> None:
    """The life of a worker of a node."""
    store = TCPStore(LOOPBACK, address["port"], is_master=False, wait_for_workers=False, timeout=JOIN)
    world = RPCWorld(**more)
    guard = functools.partial(
        GuardedStore, secret=address["secret"], listen=address["listen"], peers=world.below(index)
    )
    world.join(index, store, guard)
    _live(job)


# ---- what is called --------------------------------------------------------------------------------------------------


def _worker() -> MailboxWorker:
    _built.wait()
    return _workers[0]


def order(number: int, what: Order | None) -> None:
    """Deliver the order with this number."""
    _worker().order(number, what)


def message() -> tuple[Tensor, Tensor | None, bytes] | None:
    """Wait for the next message and return it; None: there will be no more."""
    found = _worker().message()
    if found is None:
        return None
    header, block, more = found
    return torch.from_numpy(header), None if block is None else torch.from_numpy(block), more


def take_weights(packed: Tensor) -> None:
    """Take new weights, and send them on to the workers below this one."""
    for agent in _below:
        send(agent, take_weights, packed)
    _worker().take_weights(packed.numpy())


def send(agent: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call an agent and return the future; None if it is gone, which whoever listens finds out."""
    try:
        return rpc.rpc_async(agent, call, args=arguments, timeout=0)
    except RuntimeError:
        return None
