"""NodeRegistry: where nodes connect to a collector, and what the collector knows of the workers they run.

listener ──► "node"   a connection: workers are started, watched, ended        (see node_connection.py)
         └─► "store"  the collector's store, which listens on the loopback address

A worker is started in a free place, on a node that has connected or whose worker has ended. A replacement may have to
wait for a node to connect.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

from reap._system.listener import Visitor
from reap._system.silence import silent_error
from reap.backends.network.authenticated_listener import AuthenticatedListener
from reap.backends.network.node_agent import run_secret
from reap.backends.network.node_connection import CLOSED, NodeConnection
from reap.errors import WorkerDied, WorkerSilent

_STACK = 1.5  # seconds to wait for a stack
_log = logging.getLogger("reap")


class _RegisteredNode:
    """A node as the collector sees it."""

    def __init__(self, visitor: Visitor, registry: NodeRegistry) -> None:
        self._registry = registry
        self.host, self.listen, self.free = visitor.host, visitor.host, 0
        self.node_processes: dict[int, NodeProcess] = {}  # by number
        self.connection = NodeConnection(visitor, self._on_message, self._end)

    def _on_message(self, message: Mapping[str, Any], data: bytes) -> None:
        match message:
            case {"workers": workers, "listen": listen}:
                self.free, self.listen = workers, listen
                self._registry.node_ready(self)
            case {"born": number, "pid": pid}:
                self.node_processes[number].started(pid)
            case {"gone": number, "how": how, "stack": stack}:
                self.node_processes.pop(number).ended(how, stack)
                self._registry.place_freed(self)
            case {"stack": number, "text": text} if number in self.node_processes:
                self.node_processes[number].stack_received(text)

    def _end(self, why: str) -> None:
        self._registry.node_gone(self)
        for node_process in list(self.node_processes.values()):
            node_process.ended(f"is out of reach: {why} (node {self.host})", "", lost=True)
        self.connection.close()
        self._registry.wake()


class NodeProcess:
    """A worker on a node, with the methods that `Child` has for one on this machine. `number`: its id on the node."""

    def __init__(self, index: int, number: int, on_end: Callable[[NodeProcess], None]) -> None:
        self.index, self.number, self._on_end = index, number, on_end
        self._node: _RegisteredNode | None = None  # once it has a place
        self.placed = threading.Event()  # set when it has a node, or does not need one any more
        self.sentinel, self._sentinel_writer = os.pipe()
        self._end_reason, self._stack = "", ""  # how it ended, and its last stack trace
        self._stack_reply, self._stack_replied = "", threading.Event()  # the reply to `ask_stack`
        self._pid, self._pid_known = 0, threading.Event()
        self._ending = threading.Lock()
        self.silent = False  # set when it was found silent: it is ended sooner
        self.lost = False  # its node is lost: its connections do not close on their own

    @property
    def where(self) -> str:
        """Its machine, as error messages show it."""
        return f" at {self._node.host}" if self._node is not None else ""

    @property
    def pid(self) -> int:
        """Its process id on its machine; 0 if it was never started."""
        if self._node is not None:
            self._pid_known.wait()
        return self._pid

    def placed_on(self, node: _RegisteredNode) -> None:
        """Note that a node has a place for it."""
        self._node = node
        self.placed.set()

    def started(self, pid: int) -> None:
        """Note that its node has started it, with this process id."""
        self._pid = pid
        self._pid_known.set()

    def ended(self, how: str, stack: str, *, lost: bool = False) -> None:
        """Note that it has ended, and how."""
        with self._ending:
            if self._end_reason:
                return
            self._end_reason, self._stack, self.lost = how, stack, lost
            self._pid_known.set()
            self._stack_replied.set()
            self.placed.set()
            os.close(self._sentinel_writer)
        self._on_end(self)

    def stack_received(self, text: str) -> None:
        """Note its stack, which its node has sent."""
        self._stack_reply = text
        self._stack_replied.set()

    def gone(self, timeout: float = 0.0) -> bool:
        """Return whether it has ended, waiting up to `timeout` seconds for it."""
        return self.sentinel < 0 or bool(wait([self.sentinel], timeout))

    def death(self) -> WorkerDied:
        """Return the error that says how it ended, with its last stack if there is one."""
        return WorkerDied(self._end_reason + (f"; its last stack:\n{self._stack}" if self._stack else ""))

    def ask_stack(self) -> str:
        """Return the current stacks of its threads; empty if it does not even handle signals."""
        if self._node is None:
            return "(it waits for a node)"
        self._stack_reply = ""
        self._stack_replied.clear()
        self._node.connection.send(ask=self.number)
        self._stack_replied.wait(_STACK)
        return self._stack_reply

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        """Return the error for a silent worker, with its stack; a worker that does not send its stack is killed."""
        return silent_error(self, seconds, timeout)

    def signal(self, number: int) -> None:
        """Send it a signal. A worker that waits for a node is ended; if a node is just starting it, it is killed."""
        if self._node is None:
            self.ended("was ended while waiting for a node", "")
        elif not self.gone():
            self._node.connection.send(signal=self.number, which=int(number))

    def release(self) -> None:
        """Close the descriptors."""
        self.ended("was abandoned when the collector closed", "")
        if self.sentinel >= 0:
            os.close(self.sentinel)
        self.sentinel = -1


class NodeRegistry:
    """Accepts nodes, and starts workers on them."""

    def __init__(self, host: str, port: int, secret: bytes, store: int, wake: Callable[[], None]) -> None:
        self.wake = wake  # called when a node connects or is lost
        self.run = secrets.token_hex(8)
        self.secret = run_secret(secret, self.run)
        self._nodes: list[_RegisteredNode] = []
        self._waiting: deque[tuple[NodeProcess, bytes, Mapping[str, Any]]] = deque()  # workers that wait for a place
        self._started = 0
        self.no_node_came = ""  # why a worker found no node within `join_timeout`; empty: this has not happened
        self._changing = threading.Lock()
        services: dict[str, Any] = {"node": self._receive}
        self._listener = AuthenticatedListener(host, port, secret, services)
        services["store"] = self._listener.forward_to(store)
        self.host, self.port = host, self._listener.port

    def _receive(self, visitor: Visitor) -> None:
        node = _RegisteredNode(visitor, self)
        with self._changing:
            self._nodes.append(node)
        node.connection.start()

    def node_ready(self, node: _RegisteredNode) -> None:
        """Note that a node has said how many workers it offers."""
        _log.info("%s offers %d workers", node.host, node.free)
        self._assign_places()
        self.wake()

    def node_gone(self, node: _RegisteredNode) -> None:
        """Note that a node has disconnected or is lost."""
        with self._changing:
            node.free = 0
            self._nodes = [one for one in self._nodes if one is not node]

    def place_freed(self, node: _RegisteredNode) -> None:
        """Note that a worker of a node has ended, so that its place is free."""
        with self._changing:
            node.free += 1
        self._assign_places()

    @property
    def places(self) -> int:
        """How many free places the nodes offer."""
        return sum(node.free for node in self._nodes)

    def start(
        self,
        index: int,
        transport: str,
        job: bytes,
        more: Any,
        on_end: Callable[[NodeProcess], None],
        patience: float = 0.0,
    ) -> NodeProcess:
        """Start a worker in the first free place. If there is none, wait `patience` seconds for a node to connect."""
        self._started += 1
        node_process = NodeProcess(index, self._started, on_end)
        message = {"start": self._started, "index": index, "transport": transport, "run": self.run, "more": more}
        with self._changing:
            self._waiting.append((node_process, job, message))
        self._assign_places()
        if not node_process.placed.is_set():
            waiting = (node_process, patience)
            threading.Thread(target=self._wait_for_node, args=waiting, name="reap-waits-for-node", daemon=True).start()
        return node_process

    def _wait_for_node(self, node_process: NodeProcess, patience: float) -> None:
        """End a worker that has no place after `patience` seconds."""
        if not node_process.placed.wait(patience):
            self.no_node_came = f"no node connected to {self.host}:{self.port} within {patience:g} s (join_timeout)"
            node_process.ended(f"could not be started: {self.no_node_came}", "")

    def _assign_places(self) -> None:
        """Assign free places to the workers that wait for one, in order."""
        while True:
            with self._changing:
                node = next((node for node in self._nodes if node.free), None)
                if node is None or not self._waiting:
                    return
                node_process, job, message = self._waiting.popleft()
                if node_process.gone():
                    continue
                node.free -= 1
                node.node_processes[node_process.number] = node_process
                node_process.placed_on(node)
            node.connection.send(job, **message)
            if node_process.gone():  # it is not wanted any more
                node.connection.send(signal=node_process.number, which=int(signal.SIGKILL))

    @property
    def wanted(self) -> bool:
        """Whether a worker waits for a place."""
        return bool(self._waiting)

    def dismiss_rest(self) -> None:
        """Send away the nodes that run no worker."""
        with self._changing:
            idle = [node for node in self._nodes if not node.node_processes]
            self._nodes = [node for node in self._nodes if node.node_processes]
        for node in idle:
            node.connection.send(end="all places are taken")
            node.connection.close()

    def close(self, patience: float) -> None:
        """End all nodes; those that have not ended after `patience` seconds are abandoned."""
        until = time.monotonic() + patience
        self._listener.close()  # first: a node that has ended may connect again at once
        for node in self._nodes:
            node.connection.send(end=CLOSED)
        for node in self._nodes:
            node.connection.wait(max(0.0, until - time.monotonic()))
            node.connection.close()
