"""The worker's side of torch.distributed.rpc: the functions called in workers, and how agents find each other.

    collector ── weights ┬─► worker 0 ─┬─► worker 2 …       weights go down a tree: each agent sends to two
                         └─► worker 1  └─► worker 3 …      (of nodes; launcher "mp": shared memory)

Where workers may be replaced or dropped, no agent may depend on another: each is an RPC group (world) of its own. The
collector's agent is introduced to each as it starts, and sends weights to all of them itself.

An agent checks no secret and executes any call. So on one machine it listens at no port, if the system has shared
memory for that, and otherwise on the loopback interface alone: other machines reach it through a listener, and it
reaches their agents through tunnels.
"""

from __future__ import annotations

import functools
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
JOIN = timedelta(seconds=60)  # for all agents to start, once all processes have
_INTERFACE = "TP_SOCKET_IFNAME"  # where agents listen
_BRANCHES = 2  # number of agents to which each one sends weights
_ADDRESSES = "addrs/"  # torch's key prefix in the store
_NOWHERE = b"uv://127.0.0.1:1"  # the address given for an agent we never call

_mailbox: Future[MailboxWorker] = Future()  # the worker of this process, for the functions called in it
_below: list[str] = []  # agents to which this one forwards weights


def name(index: int, restarts: int = 0) -> str:
    """Return the name of a worker's agent; a replacement has a new one."""
    return f"worker-{index}-{restarts}"


def address_key(agent: str, world: str | None = None) -> str:
    """Return the key under which the members of a world find an agent's address in the common store.

    Default: the agent's own world.
    """
    return f"{world or agent}/{_ADDRESSES}{agent}"


def below(index: int, workers: int) -> list[int]:
    """Return the workers to which a worker forwards weights; the collector is number -1."""
    first = _BRANCHES * (index + 1)
    return [i for i in range(first, first + _BRANCHES) if i < workers]


class GuardedStore(Store):
    """A store that replaces addresses of agents on other machines by those of tunnels to them.

    Torch sets the address of its own agent, and gets those of all others.
    """

    def __init__(self, store: Store, secret: bytes, listen: str, peers: Sequence[str]) -> None:
        super().__init__()
        self._store, self._secret, self._listen, self._peers = store, secret, listen, peers
        self._own = (b"", b"")
        self._listener: AuthenticatedListener | None = None
        self._tunnels: dict[str, Tunnel] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value; in place of our own agent's address, set that of a listener for it."""
        if _ADDRESSES in key:
            self._own = (key.encode(), bytes(value))
            port = int(bytes(value).rsplit(b":", 1)[1])
            services: dict[str, Any] = {}
            self._listener = AuthenticatedListener(self._listen, 0, self._secret, services)
            services["agent"] = self._listener.forward_to(port)
            value = f"{self._listen} {self._listener.port} {port}"
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value; in place of another agent's address, return that of a tunnel to it."""
        if key.encode() == self._own[0]:
            return self._own[1]
        value = bytes(self._store.get(key))
        if _ADDRESSES not in key:
            return value
        peer = key.rsplit("/", 1)[1]
        if peer not in self._peers:
            return _NOWHERE
        host, listener, port = value.decode().split()
        if host != self._listen:  # another machine. Same port as there: agents tell each other their ports
            try:
                self._tunnels[peer] = Tunnel(host, int(listener), self._secret, "agent", at=int(port))
            except UsageError as error:
                raise UsageError(
                    f"{error}. The agent of {peer} has this port on {host}, and needs it on every machine; "
                    f"restarted agents get other ports"
                ) from None
        return f"uv://{LOOPBACK}:{port}".encode()

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        """Set a key if it has the expected value, as the store itself does; return its value now."""
        return bytes(self._store.compare_set(key, expected, wanted))

    def check(self, keys: list[str]) -> bool:
        """Return whether the store has these keys."""
        return bool(self._store.check(keys))

    def cut(self, peer: str) -> None:
        """Close the tunnel to a peer that is out of reach, so that no call waits for it."""
        if peer in self._tunnels:
            self._tunnels.pop(peer).close()

    def close(self) -> None:
        """Close the listener and all tunnels."""
        for way in (*self._tunnels.values(), *filter(None, [self._listener])):
            way.close()
        self._tunnels.clear()


def join_agent(store: Store, own: str, rank: int, size: int | None, options: Mapping[str, Any]) -> Any:
    """Start this process's agent, and return it when all have joined. `size` None: others are introduced later."""
    with torch_internals.on_loopback(_INTERFACE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what torch itself does in there
        return torch_internals.start_rpc_agent(store, own, rank, size, options)


@dataclass(frozen=True)
class RPCWorld:
    """The agents of a collector. `alone`: each worker's agent knows itself only, and the collector's knows all."""

    workers: int
    options: Mapping[str, Any]
    alone: bool = False
    restarts: int = 0  # of the worker that receives this object

    def join(self, index: int, common: Store, guard: Callable[[Store], Store] = lambda store: store) -> None:
        """Start a worker's agent, and return when it can be called."""
        own = name(index, self.restarts)
        if self.alone:
            join_agent(guard(PrefixStore(own, common)), own, 0, 1, self.options)
            common.set(f"here/{own}", "here")
        else:
            common.set(f"here/{own}", "here")
            join_agent(guard(common), own, index + 1, self.workers + 1, self.options)
            _below.extend(self.below(index))

    def below(self, index: int) -> list[str]:
        """Return the agents to which a worker forwards weights."""
        return [] if self.alone else [name(i) for i in below(index, self.workers)]


def _run_worker(job: bytes, shared: LocalWeights | None = None) -> None:
    remote_worker = MailboxWorker(shared)
    _mailbox.set_result(remote_worker)
    remote_worker.run(job)  # in this thread, the main one: it is the one that handles signals
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all is closed: a signal can interrupt no clean-up
    threading.Event().wait()  # the collector fetches the last message, then ends this process


def run_rpc(connection: Any, fds: Any, *, job: bytes, index: int, file: str, world: RPCWorld) -> None:
    """Run a worker on this machine: agents find each other in a file that only this user can open.

    `fds`: the descriptor of the memory of the weights.
    """
    store = FileStore(file, -1)
    store.set_timeout(JOIN)
    world.join(index, store)
    _run_worker(job, LocalWeights(SharedFile(fd=fds[0])))


def run_rpc_on_node(
    connection: Any, fds: Any, *, job: bytes, index: int, address: Mapping[str, Any], more: Any
) -> None:
    """Run a worker on a node."""
    store = TCPStore(LOOPBACK, address["port"], is_master=False, wait_for_workers=False, timeout=JOIN)
    world = RPCWorld(**more)
    guard = functools.partial(
        GuardedStore, secret=address["secret"], listen=address["listen"], peers=world.below(index)
    )
    world.join(index, store, guard)
    _run_worker(job)


# ---- functions called over RPC ---------------------------------------------------------------------------------------


def order(number: int, what: Order | None) -> None:
    """Deliver the order with this number."""
    _mailbox.result().order(number, what)


def message() -> tuple[Tensor, Tensor | None, bytes] | None:
    """Wait for the next message and return it; None: there are no more."""
    found = _mailbox.result().message()
    if found is None:
        return None
    header, block, more = found
    return torch.from_numpy(header), None if block is None else torch.from_numpy(block), more


def take_weights(packed: Tensor) -> None:
    """Store new weights, and forward them to the workers below this one."""
    for agent in _below:
        send(agent, take_weights, packed)
    _mailbox.result().take_weights(packed.numpy())


def send(agent: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call an agent and return the future; None if it is gone, which the receiving side finds out."""
    try:
        return rpc.rpc_async(agent, call, args=arguments, timeout=0)
    except RuntimeError:
        return None
