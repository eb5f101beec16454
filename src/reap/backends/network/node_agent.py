"""NodeAgent: runs workers on this machine for a collector on another. It ends them when the collector is gone.

    collector's listener ◄── connection ── node ── child: worker 0
               its store ◄── tunnel ────────┘ └─── child: worker 1

It reports to the collector how a worker ends, and where it hangs, as for a child process of the collector.
"""

from __future__ import annotations

import functools
import hmac
import importlib
import queue
import signal
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

from reap._system.fork_server.client import get_ready
from reap._system.listener import Refused, dial
from reap._system.messages.pickling import pack_bytes
from reap._system.processes import DEADLINE, Child, end
from reap.backends.network.authenticated_listener import Tunnel
from reap.backends.network.node_connection import NodeConnection
from reap.errors import ReapError, UsageError

_TRANSPORTS = {  # entry points of workers, imported only in the worker, so that a node stays small
    "gloo": "reap.backends.remote.gloo_worker:run_gloo_on_node",
    "rpc": "reap.backends.remote.rpc_worker:run_rpc_on_node",
}


def run_secret(secret: bytes, run: str) -> bytes:
    """Return the secret of one run, so that messages signed in another run are refused."""
    return hmac.digest(secret, f"run|{run}".encode(), "sha256")


class NodeAgent:
    """Runs `workers` workers for the collector at an address."""

    def __init__(self, host: str, port: int, secret: bytes, *, workers: int, listen: str | None, patience: float):
        if workers < 1:
            raise UsageError(f"workers must be at least 1, got {workers}")
        self._secret, self._workers = secret, workers
        self._messages: queue.SimpleQueue[tuple[Mapping[str, Any], bytes]] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        get_ready()  # starts the fork server while we wait
        visitor = _dial_patiently(host, port, secret, patience)
        self.listen = listen or visitor.socket.getsockname()[0]  # this machine's address on the collector's network
        self._tunnel = Tunnel(host, port, secret, "store")
        self._connection = NodeConnection(
            visitor, self._queue_message, lambda why: self._queue_message({"end": why}, b"")
        )
        self._children: dict[int, Child] = {}  # by the number that the collector has given each

    def _queue_message(self, message: Mapping[str, Any], data: bytes) -> None:
        self._messages.put((message, data))
        self._waker.send(b"!")

    def run(self) -> str:
        """Run workers until the collector ends or does not need this node; return the reason."""
        self._connection.start()
        self._connection.send(workers=self._workers, listen=self.listen)
        why = None
        try:
            while why is None:
                wait([self._wake, *(child.sentinel for child in self._children.values())])
                for number in [number for number, child in self._children.items() if child.gone()]:
                    child = self._children.pop(number)
                    self._connection.send(gone=number, how=child.how_it_ended(), stack=child.stack())
                    child.release()
                while why is None and not self._messages.empty():
                    self._wake.recv(1)
                    why = self._execute(*self._messages.get())
        finally:
            self._tunnel.close()  # first: workers that wait for the store are in native code and handle no signals
            for child in self._children.values():
                child.signal(signal.SIGTERM)
            end(self._children.values(), patience=0.6 * DEADLINE, deadline=DEADLINE)
            self._connection.close()
            self._wake.close()
            self._waker.close()
        return why

    def _execute(self, message: Mapping[str, Any], data: bytes) -> str | None:
        match message:
            case {"start": number, "index": index, "transport": transport, "run": run, "more": more}:
                address = {"port": self._tunnel.port, "secret": run_secret(self._secret, run), "listen": self.listen}
                target = functools.partial(
                    _run, transport=_TRANSPORTS[transport], job=data, index=index, address=address, more=more
                )
                try:
                    child = Child(pack_bytes(target, "a worker"), name=f"reap-worker-{index}")
                except ReapError as error:  # it could not be started; the other workers continue
                    self._connection.send(gone=number, how=str(error), stack="")
                    return None
                self._children[number] = child
                child.socket.finish()
                self._connection.send(born=number, pid=child.pid)
            case {"signal": number, "which": which}:
                if number in self._children:
                    self._children[number].signal(which)
            case {"ask": number}:
                stack = self._children[number].ask_stack() if number in self._children else ""
                self._connection.send(stack=number, text=stack)
            case {"end": why}:
                return str(why)
        return None


def _run(connection: Any, fds: Any, *, transport: str, **job: Any) -> None:
    """Run a worker process with the entry point of its transport."""
    module, name = transport.split(":")
    getattr(importlib.import_module(module), name)(connection, fds, **job)


def _dial_patiently(host: str, port: int, secret: bytes, patience: float) -> Any:
    """Connect to the collector, which may start later than its nodes."""
    until = time.monotonic() + patience
    while True:
        try:
            return dial((host, port), secret, "node")
        except Refused:
            raise
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"no collector listens at {host}:{port} ({error}); waited {patience:.0f} s"
                ) from None
            time.sleep(0.2)
