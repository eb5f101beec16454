"""Ray: workers are actors. A rollout is one object, read from Ray's store; weights are put there once per version.

    actor.order ──►  remote worker  ──► actor.message: one object per rollout ──► slot
    put ──► actor.take_weights: a reference, from which each actor pulls

Single actors can be launched later, to add a worker or to replace one that died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap._system.interrupts import Wakeup
from reap._system.messages.framed import until_ready
from reap._system.messages.pickling import dumps
from reap._system.processes import BOOT, DEADLINE
from reap.backends.remote.message_transport import MessageConnection, MessageTransport, PublicationCount, connection_of
from reap.backends.remote.ordered_mailbox import MailboxWorker
from reap.backends.remote.remote_worker import Message, Order
from reap.backends.worker_handle import WorkerHandle
from reap.backends.worker_server import Job
from reap.errors import UsageError, WorkerDied, WorkerSilent, missing

_log = logging.getLogger("reap")
_PENDING_CALLS = 2  # pending calls of `message`: one is fetched while another is read
# Calls of one group run one after another, groups run in parallel.
_GROUPS = {"orders": 1, "messages": 1, "weights": 1, "stack": 1}
_POLL = 0.5  # seconds between checks for Ctrl-C while actors start
_STACK = 1.0  # seconds to wait for a stack
_RAY_IDS = tuple(f"\t{name}: " for name in ("class_name", "actor_id", "pid", "name", "namespace", "ip"))
_LONGEST_TEXT = 900  # characters of Ray's error text that are shown
_SLOW = 60.0  # extra seconds for actors on a busy machine, if the cluster has room for them


def import_ray() -> Any:
    """Return the ray module, or raise an error that says how to install it."""
    try:
        import ray
    except ImportError:
        raise missing("ray", "ray") from None
    return ray


class _Cluster:
    """The cluster this process is connected to. A connection made here is closed with its last user in this process."""

    def __init__(self) -> None:
        self._users, self._ours, self._lock = 0, False, threading.Lock()

    def enter(self, config: Mapping[str, Any]) -> Any:
        """Return the ray module, connected: to its present cluster, or else to the one that `config` describes."""
        ray = import_ray()
        with self._lock:
            if not ray.is_initialized():
                self._connect(ray, config)
                self._ours, self._users = True, 0
            elif not self._users:
                self._ours = False
            self._users += 1
        return ray

    def _connect(self, ray: Any, config: Mapping[str, Any]) -> None:
        try:
            starts = _starts_cluster(ray, config)
            named = config.get("_node_ip_address") is not None
            with _on_loopback(ray) if starts and not named else contextlib.nullcontext():
                ray.init(**{"include_dashboard": False, **(_with_normal_priority(config) if starts else config)})
        except ConnectionError as cause:
            raise UsageError(
                f"ray_init_config: no cluster found at {config.get('address')!r}: {cause}; start one with "
                f"`ray start --head`, or leave the address out to start one here"
            ) from cause

    def leave(self, *, end: bool | None = None) -> None:
        """Remove one user, and disconnect: always (`end` True), never (False), or with our last user (None)."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if end is False:
                self._ours = False  # from now on it belongs to the caller
            elif end or (self._ours and not self._users):
                self._ours, self._users = False, 0
                import_ray().shutdown()


def _starts_cluster(ray: Any, config: Mapping[str, Any]) -> bool:
    """Return whether `ray.init` will start a new cluster here instead of connecting to one."""
    address = config.get("address") or os.environ.get("RAY_ADDRESS")
    if address is None:
        with contextlib.suppress(ImportError, AttributeError, TypeError):  # a private name, which may be removed
            address = ray._private.services.get_ray_address_from_environment(None, config.get("_temp_dir")) or "local"
    return bool(address == "local")


def _with_normal_priority(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with actors that have the same scheduling priority as this process.

    Ray starts its workers with niceness 15. Beside a busy learner such an actor gets 3% of a core: importing torch took
    one of them 194 s, instead of 8 s.
    """
    if "RAY_worker_niceness" in os.environ:
        return dict(config)
    return {**config, "_system_config": {"worker_niceness": 0, **(config.get("_system_config") or {})}}


@contextlib.contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Return a context in which a cluster that is started listens on the loopback address only.

    Ray replaces 127.0.0.1 by the machine's own address and then listens on all interfaces, unless a constant says that
    clusters of several machines are disabled.
    """
    constants = getattr(getattr(ray, "_private", None), "ray_constants", None)
    usual = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if constants is None or usual is None:
        _log.warning("this version of Ray listens on all interfaces; see docs/ray.md, Whom it trusts")
        yield
        return
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = usual


CLUSTER = _Cluster()


class ReapWorker(MailboxWorker):
    """The class of the actors. The worker runs in a thread of its own, as the actor's threads serve calls."""

    def __init__(self, job: bytes, path: Sequence[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        super().__init__()
        self._thread = threading.Thread(target=self.run, args=(job,), name="reap-worker", daemon=True)
        self._thread.start()

    def take_weights(self, packed: np.ndarray[Any, Any]) -> None:
        """Store new weights without a copy; the worker reads them from Ray's store when it loads them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the array is read-only; nothing writes to it
            self._weight_inbox.put(torch.from_numpy(packed))

    def where(self) -> tuple[int, str]:
        """Return its process id and its node id."""
        return os.getpid(), import_ray().get_runtime_context().get_node_id()

    def stack(self) -> str:
        """Return the current stack of its thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else ""

    def leave(self, number: int, patience: float, closing: float) -> None:
        """End the worker after the last order, and return when it has ended.

        Return without that after `patience` seconds of the order it executes, or `closing` seconds of closing its env.
        """
        self.order(number, None)
        if self._inbox.ending.wait(patience):
            self._thread.join(closing)


class _Actor:
    """Whether an actor is alive, and how it ended."""

    def __init__(self, handle: Any, pid: int, node: str) -> None:
        self._handle, self.pid, self.node, self._how = handle, pid, node, ""
        self.silent = False  # set when it was found silent: `leave` is not called then

    @property
    def label(self) -> str:
        return f" (pid {self.pid})" if self.pid else ""

    def end(self, how: str) -> None:
        self._how = self._how or how

    def gone(self) -> bool:
        return bool(self._how)

    def death(self) -> WorkerDied:
        return WorkerDied(self._how)

    def ask_stack(self) -> str:
        """Return the current stack of its thread; empty if it does not respond at all."""
        ray = import_ray()
        asked = self._handle.stack.options(concurrency_group="stack").remote()
        try:
            return str(ray.get(asked, timeout=_STACK))
        except ray.exceptions.RayError:
            return ""

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        self.silent, stack = True, self.ask_stack() or "(its process does not answer)"
        return WorkerSilent(f"its actor sent nothing for {seconds:.1f} s (timeout={timeout}); its stack:\n{stack}")


class RayConnection(MessageConnection):
    """The connection to one actor."""

    def __init__(
        self, worker: WorkerHandle, sent: PublicationCount, actor: Any, where: tuple[int, str], wakeup: Wakeup
    ) -> None:
        super().__init__(worker, sent)
        self._ring = lambda _: wakeup.wake()  # references nothing else, as Ray may keep it for a while
        self._futures: deque[Any] = deque()
        self.actor, self.child = actor, _Actor(actor, *where)
        for _ in range(_PENDING_CALLS):
            self._ask_message()

    def send(self, order: Order | None) -> None:
        self.actor.order.options(concurrency_group="orders").remote(self.orders_sent, order)
        self.orders_sent += 1

    def send_weights(self, packed: Any) -> None:
        self.actor.take_weights.options(concurrency_group="weights").remote(packed)

    def _ask_message(self) -> None:
        future = self.actor.message.options(concurrency_group="messages").remote().future()
        self._futures.append(future)
        future.add_done_callback(self._ring)

    @property
    def has_messages(self) -> bool:
        return bool(self._futures) and self._futures[0].done()

    def receive(self) -> tuple[list[Any], bool]:
        found = []
        while self.has_messages:
            future = self._futures.popleft()
            error = future.exception()
            message = None if error is not None else future.result()
            if message is None:
                self.child.end("its actor ended" if error is None else _death_text(error))
                self._futures.clear()
                break
            found.append(self.unpacked(Message(*message)))
            self._ask_message()
        return found, self.child.gone()


class RayActorTransport(MessageTransport):
    """Runs workers as Ray actors, in the cluster this process is connected to, or in a new one."""

    weight_schemes = ("ray", "per_worker", "none")
    can_add_workers = True

    def __init__(self, *, cluster: Mapping[str, Any], resources: Sequence[Mapping[str, Any]]) -> None:
        import_ray()  # raises if it is missing
        super().__init__()
        self._config, self._resources = dict(cluster), list(resources)
        self._ray: Any = None  # the ray module, once connected
        self.end_cluster: bool | None = None  # what `close` does with the cluster; see `_Cluster.leave`

    def expect(self, resources: Sequence[Mapping[str, Any]]) -> None:
        """Set the resources of the workers that will be launched next."""
        self._resources[len(self._workers) :] = resources

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        if self._ray is None:
            self._ray = CLUSTER.enter(self._config)
        elif not self._cluster_answers():
            raise ConnectionError("the cluster does not answer any more")
        jobs = [worker.job for worker in workers if worker.job is not None]
        actors = [self._actor(job) for job in jobs]
        for worker, actor, where in zip(workers, actors, self._places(jobs, actors)):
            self.connect(worker, RayConnection(worker, self.sent, actor, where, self.wakeup))

    def _actor(self, job: Job) -> Any:
        kind = self._ray.remote(concurrency_groups=_GROUPS)(ReapWorker)
        actor = kind.options(**self._resources[job.index])
        return actor.remote(dumps(job, f"what worker {job.index} needs"), list(sys.path))

    def _places(self, jobs: Sequence[Job], actors: Sequence[Any]) -> list[tuple[int, str]]:
        """Wait until all actors have started, and return their places. If one cannot start, kill all."""
        asked = [actor.where.remote() for actor in actors]
        try:
            until, coming = time.monotonic() + BOOT, asked
            while coming:
                _, coming = self._ray.wait(asked, num_returns=len(asked), timeout=_POLL)
                self._interrupts.let_in()
                if coming and time.monotonic() > until:
                    waiting = [jobs[asked.index(ref)] for ref in coming]
                    self._check_resources(waiting, self._ray.cluster_resources())
                    if time.monotonic() > until + _SLOW:  # what is available excludes actors that are starting
                        self._check_resources(waiting, self._ray.available_resources())
                        raise WorkerSilent(
                            f"{len(coming)} actors did not start within {BOOT + _SLOW:.0f} s; if the machine "
                            f"is busy: Ray gives them only the time that others leave, unless it was started "
                            f"with RAY_worker_niceness=0"
                        )
            return [self._answer(job, ref) for job, ref in zip(jobs, asked)]
        except BaseException:
            for actor in actors:
                self._ray.kill(actor)
            raise

    def _check_resources(self, jobs: Sequence[Job], left: Mapping[str, float]) -> None:
        """Raise if these jobs need more resources than `left`."""
        wanted: dict[str, float] = {}
        for job in jobs:
            asked = self._resources[job.index]
            named = {"CPU": asked.get("num_cpus"), "GPU": asked.get("num_gpus"), **(asked.get("resources") or {})}
            for name, amount in named.items():
                wanted[name] = wanted.get(name, 0.0) + (amount or 0.0)
        if any(amount > left.get(name, 0.0) for name, amount in wanted.items()):
            raise UsageError(
                f"the cluster has no room for {len(jobs)} actors with {dict(self._resources[jobs[0].index])}; "
                f"it has {dict(left)}"
            )

    def _answer(self, job: Job, ref: Any) -> tuple[int, str]:
        try:
            where: tuple[int, str] = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(_death_text(error)).at(worker=f"{job.index} (not started yet)") from None
        return where

    def retire(self, worker: WorkerHandle) -> None:
        connection = connection_of(worker, RayConnection)
        process = self._process_of(connection.child, kill=True)
        self._ray.kill(connection.actor)  # it may have raised, and still be alive
        if process is not None:
            _wait_for_ends([process], 0.3 * DEADLINE)

    def broadcast(self, packed: Tensor) -> None:
        self.send_to_each(self._ray.put(packed.numpy()))

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        if self._ray is None:
            return
        if self._ray.is_initialized():  # else someone has ended the cluster with all its actors
            all_of_them = [connection_of(worker, RayConnection) for worker in workers if not worker.dropped]
            here = [p for one in all_of_them if (p := self._process_of(one.child)) is not None]
            living = [one for one in all_of_them if not (one.child.gone() or one.child.silent)]
            left = [one.actor.leave.remote(one.orders_sent, 0.2 * DEADLINE, 0.4 * DEADLINE) for one in living]
            if left:
                self._ray.wait(left, num_returns=len(left), timeout=0.7 * DEADLINE)
            for one in all_of_them:
                self._ray.kill(one.actor)
            _wait_for_ends(here, 0.3 * DEADLINE)
        CLUSTER.leave(end=self.end_cluster)

    def _process_of(self, actor: _Actor, *, kill: bool = False) -> int | None:
        """Return a pidfd of an actor's process, if that is alive and on this node.

        The process is killed if it was silent, or with `kill`. Otherwise it gets SIGCONT: a stopped one could not
        execute `leave`.
        """
        if actor.node != self._ray.get_runtime_context().get_node_id() or not hasattr(os, "pidfd_open"):
            return None
        try:
            process = os.pidfd_open(actor.pid)
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a stopped process does not react to Ray
            signal.pidfd_send_signal(process, signal.SIGKILL if actor.silent or kill else signal.SIGCONT)
        return process

    def _cluster_answers(self) -> bool:
        """Return whether the cluster answers. A thread asks it, because Ray waits a minute or longer for a lost one."""
        asking = threading.Thread(target=self._ray.nodes, daemon=True, name="reap-asks-cluster")
        asking.start()
        asking.join(DEADLINE)
        return not asking.is_alive()


def _wait_for_ends(processes: Sequence[int], patience: float) -> None:
    """Wait for processes to end; those that have not after `patience` seconds are killed."""
    deadline = time.monotonic() + patience
    for fd in processes:
        if not until_ready([fd], within=deadline - time.monotonic()):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _death_text(error: BaseException) -> str:
    """Return Ray's error text on one line, without the ids and addresses of the actor."""
    lines = [line for line in str(error).splitlines() if not line.startswith(_RAY_IDS)]
    said = " ".join(" ".join(lines).split()).rpartition("Worker exit detail: ")[2]
    if len(said) > _LONGEST_TEXT:  # a traceback: the call is at its start, the error at its end
        said = f"{said[: _LONGEST_TEXT // 3]} … {said[-_LONGEST_TEXT // 2 :]}"
    return f"its actor died: {said}"
