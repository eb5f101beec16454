"""Ray: workers are actors. A batch is one object, read where it lies; weights are put once per version, and pulled.

    actor.order ──►  remote worker  ──► actor.message: one object per batch ──► slot
    put ──► actor.parcel: a reference, pulled by each

An actor that dies is named; or replaced, if `restart` is True: what it was asked for is asked of the new one.
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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap._system.messages import until_ready
from reap._system.pickling import dumps
from reap._system.processes import BOOT
from reap.backends.local.process import DEADLINE, FIRST, OWN_SLOTS
from reap.backends.remote.base import RemoteBackend, RemoteHandle, Wakeup
from reap.backends.remote.ordered_mailbox import MailboxWorker
from reap.backends.remote.remote_worker import Message, Order, RemoteJob
from reap.backends.worker_handle import WorkerHandle
from reap.core.shared_slots import SharedSlots
from reap.errors import SpecMismatch, UsageError, WorkerDied, WorkerSilent, WrongState, missing

_log = logging.getLogger("reap")
_ASKED = 2  # messages asked for at a time: one is fetched while another is read
# Calls of a group follow one another, groups run side by side.
_GROUPS = {"orders": 1, "messages": 1, "weights": 1, "stack": 1}
_FRESH_IDS = 2**32  # trajectories of a worker before another comes in its place, at most
_LOOK = 0.5  # seconds between looks at Ctrl-C, while actors start
_STACK = 1.0  # seconds for a stack to come
_SLOW = 60.0  # seconds more for actors that there is room for, on a busy machine


def engine() -> Any:
    """The library."""
    try:
        import ray
    except ImportError:
        raise missing("ray", "ray") from None
    return ray


class _Cluster:
    """The cluster this process is connected to. What was connected here is left with the last who uses it here."""

    def __init__(self) -> None:
        self._users, self._ours, self._lock = 0, False, threading.Lock()

    def enter(self, config: Mapping[str, Any]) -> Any:
        """The library, connected: to what it is connected to already, or else as `config` says."""
        ray = engine()
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
            begins = _begins_one(ray, config)
            named = config.get("_node_ip_address") is not None
            with _on_loopback(ray) if begins and not named else contextlib.nullcontext():
                ray.init(**{"include_dashboard": False, **(_not_yielding(config) if begins else config)})
        except ConnectionError as cause:
            raise UsageError(
                f"ray_init_config: no cluster found at {config.get('address')!r}: {cause}; begin one with "
                f"`ray start --head`, or leave the address out to have one started here"
            ) from cause

    def leave(self, *, end: bool | None = None) -> None:
        """One user less. `end`: True: for all of them; False: for none; None: with the last one, if it is ours."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if end is False:
                self._ours = False  # it is the caller's from now on
            elif end or (self._ours and not self._users):
                self._ours, self._users = False, 0
                engine().shutdown()


def _begins_one(ray: Any, config: Mapping[str, Any]) -> bool:
    """Whether `ray.init` will start a cluster here, rather than find one."""
    address = config.get("address") or os.environ.get("RAY_ADDRESS")
    if address is None:
        with contextlib.suppress(ImportError, AttributeError, TypeError):  # a private name, which may go
            address = ray._private.services.get_ray_address_from_environment(None, config.get("_temp_dir")) or "local"
    return bool(address == "local")


def _not_yielding(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, with actors that have the same right to a processor as this process.

    Ray starts its workers with niceness 15. Beside a learner that computes, such an actor gets 3% of a core: to import
    torch took one of them 194 s, where it takes 8 s otherwise.
    """
    if "RAY_worker_niceness" in os.environ:
        return dict(config)
    return {**config, "_system_config": {"worker_niceness": 0, **(config.get("_system_config") or {})}}


@contextlib.contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Inside, a cluster that is started listens on the loopback address and nowhere else.

    Ray puts the machine's own address in the place of 127.0.0.1, and listens on all interfaces then; only where it is
    told that there are no clusters of several machines it does not.
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
    """What the cluster knows as an actor. It works in a thread of its own: the actor's are for calls."""

    def __init__(self, job: bytes, path: Sequence[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        super().__init__()
        self._thread = threading.Thread(target=self.run, args=(job,), name="reap-worker", daemon=True)
        self._thread.start()

    def parcel(self, parcel: np.ndarray[Any, Any]) -> None:
        """New weights: read where they lie, when they are acted with."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it must not be written to; nobody does
            self._parcels.put(torch.from_numpy(parcel))

    def where(self) -> tuple[int, str]:
        """Process and node."""
        return os.getpid(), engine().get_runtime_context().get_node_id()

    def stack(self) -> str:
        """Where its thread is right now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else ""

    def leave(self, number: int, patience: float, closing: float) -> None:
        """Go home after the last order; returns when it has.

        Or after so many seconds: `patience` until what it is doing is done, `closing` until its env is closed.
        """
        self.order(number, None)
        if self._inbox.home.wait(patience):
            self._thread.join(closing)


class _Actor:
    """Whether an actor lives, and how it ended."""

    def __init__(self, handle: Any, pid: int, node: str) -> None:
        self._handle, self.pid, self.node, self._how = handle, pid, node, ""
        self.silent = False  # whether it was found to be: it is not asked to leave

    def end(self, how: str) -> None:
        self._how = self._how or how

    def end_more(self, also: str) -> None:
        self._how += f"; {also}"

    def gone(self) -> bool:
        return bool(self._how)

    def death(self) -> WorkerDied:
        return WorkerDied(self._how)

    def ask_stack(self) -> str:
        """Where its thread is right now; empty if it does not answer at all."""
        ray = engine()
        asked = self._handle.stack.options(concurrency_group="stack").remote()
        try:
            return str(ray.get(asked, timeout=_STACK))
        except ray.exceptions.RayError:
            return ""

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        self.silent, stack = True, self.ask_stack() or "(its process does not answer)"
        return WorkerSilent(f"its actor sent nothing for {seconds:.1f} s (timeout={timeout}); its stack:\n{stack}")


class RayHandle(RemoteHandle):
    """An actor as it is seen here."""

    def __init__(self, index: int, actor: Any, where: tuple[int, str], wakeup: Wakeup) -> None:
        super().__init__(index, None)
        self._ring = lambda _: wakeup.ring()  # holds on to nothing else: Ray may keep it for a while
        self.move(actor, where)

    def move(self, actor: Any, where: tuple[int, str]) -> None:
        """From now on it is this actor."""
        self._futures: deque[Any] = deque()
        self.actor, self.child = actor, _Actor(actor, *where)  # type: ignore[assignment]
        self.told = 0
        for _ in range(_ASKED):
            self._ask_message()

    def _ask_message(self) -> None:
        future = self.actor.message.options(concurrency_group="messages").remote().future()
        self._futures.append(future)
        future.add_done_callback(self._ring)

    @property
    def speaks(self) -> bool:
        return bool(self._futures) and self._futures[0].done()

    def messages(self) -> list[Any]:
        found = []
        while self.speaks:
            future = self._futures.popleft()
            error = future.exception()
            message = None if error is not None else future.result()
            if message is None:
                self.child.end("its actor ended" if error is None else _short(error))  # type: ignore[attr-defined]
                self._futures.clear()
                break
            found.append(self.carried_in(Message(*message)))
            self._ask_message()
        return found


class RayBackend(RemoteBackend):
    """Workers that are Ray actors, in the cluster this process is connected to, or in one of its own."""

    transports = ("ray", "parcel", "none")

    def __init__(
        self,
        plans: Sequence[Any],
        *,
        cluster: Mapping[str, Any],
        resources: Sequence[Mapping[str, Any]],
        restart: bool = False,
        **options: Any,
    ) -> None:
        engine()  # is it there?
        super().__init__(plans, **options)
        self._config, self._resources, self._restart = dict(cluster), list(resources), restart
        self._ray: Any = None  # when connected
        self.restarts = 0
        self.end_cluster: bool | None = None  # with `close`: whoever else uses it, or not at all
        self._starts = 0  # of workers that came later
        self._latest: Any = None  # weights, as Ray knows them
        self._own: dict[int, Sequence[Any]] = {}  # weights a worker was given by itself since, and their version
        self._loaded: Sequence[Any] | None = None  # those a new worker begins with, of a state that was loaded since

    def launch(self, jobs: Sequence[RemoteJob]) -> None:
        self._ray = CLUSTER.enter(self._config)
        self._jobs: list[RemoteJob] = []
        self._hire(jobs)

    def _hire(self, jobs: Sequence[RemoteJob]) -> list[RayHandle]:
        """An actor for each; they are among the workers then."""
        actors = [self._actor(job) for job in jobs]
        places = self._places(jobs, actors)
        new = [RayHandle(job.index, actor, where, self.wakeup) for job, actor, where in zip(jobs, actors, places)]
        self.workers.extend(new)
        self._jobs.extend(jobs)
        return new

    def _actor(self, job: RemoteJob) -> Any:
        kind = self._ray.remote(concurrency_groups=_GROUPS)(ReapWorker)
        actor = kind.options(**self._resources[job.index])
        return actor.remote(dumps(job, f"what worker {job.index} needs"), list(sys.path))

    def _places(self, jobs: Sequence[RemoteJob], actors: Sequence[Any]) -> list[tuple[int, str]]:
        """Where they are, when all of them are there. If one cannot be, none is."""
        asked = [actor.where.remote() for actor in actors]
        try:
            until, coming = time.monotonic() + BOOT, asked
            while coming:
                _, coming = self._ray.wait(asked, num_returns=len(asked), timeout=_LOOK)
                self._interrupts.let_in()
                if coming and time.monotonic() > until:
                    waiting = [jobs[asked.index(ref)] for ref in coming]
                    self._refuse_for_room(waiting, self._ray.cluster_resources())
                    if time.monotonic() > until + _SLOW:  # of what is left, actors that are being started have theirs
                        self._refuse_for_room(waiting, self._ray.available_resources())
                        raise WorkerSilent(
                            f"{len(coming)} actors did not start within {BOOT + _SLOW:.0f} s; if the machine is "
                            f"busy: Ray gives them what others leave, unless it was started with RAY_worker_niceness=0"
                        )
            return [self._answer(job, ref) for job, ref in zip(jobs, asked)]
        except BaseException:
            for actor in actors:
                self._ray.kill(actor)
            raise

    def _refuse_for_room(self, jobs: Sequence[RemoteJob], left: Mapping[str, float]) -> None:
        """Raise if these would take more than there is."""
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

    def _answer(self, job: RemoteJob, ref: Any) -> tuple[int, str]:
        try:
            where: tuple[int, str] = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(_short(error)).at(worker=f"{job.index} (not started yet)") from None
        return where

    def send(self, remote: Any, order: Order | None) -> None:
        remote.actor.order.options(concurrency_group="orders").remote(remote.told, order)
        remote.told += 1

    def broadcast(self, parcel: Tensor) -> None:
        self._latest = self._ray.put(parcel.numpy())
        self._own, self._loaded = {}, None
        for remote in self.workers:
            self._send_parcel(remote)

    def _send_parcel(self, remote: Any) -> None:
        remote.actor.parcel.options(concurrency_group="weights").remote(self._latest)

    def part(self, workers: Sequence[Any]) -> None:
        if self._ray is None:
            return
        if self._ray.is_initialized():  # else somebody has ended the cluster, and all that was in it
            here = [p for remote in workers if (p := self._process_of(remote.child)) is not None]
            living = [remote for remote in workers if not (remote.child.gone() or remote.child.silent)]
            left = [remote.actor.leave.remote(remote.told, 0.2 * DEADLINE, 0.4 * DEADLINE) for remote in living]
            if left:
                self._ray.wait(left, num_returns=len(left), timeout=0.7 * DEADLINE)
            for remote in workers:
                self._ray.kill(remote.actor)
            _wait_for_ends(here, 0.3 * DEADLINE)
        CLUSTER.leave(end=self.end_cluster)

    def _process_of(self, actor: _Actor) -> int | None:
        """A descriptor of its process, if that is on this node and lives.

        One that was silent is killed here; one that is stopped is woken, to hear that it is to leave.
        """
        if actor.node != self._ray.get_runtime_context().get_node_id() or not hasattr(os, "pidfd_open"):
            return None
        try:
            process = os.pidfd_open(actor.pid)
        except OSError:
            return None
        with contextlib.suppress(OSError):  # one that is frozen would not do it for Ray
            signal.pidfd_send_signal(process, signal.SIGKILL if actor.silent else signal.SIGCONT)
        return process

    # ---- more of them, and one for another ------------------------------------------------------------------------

    def add(self, plans: Sequence[Any], resources: Sequence[Mapping[str, Any]]) -> None:
        """More workers, from here on."""
        with self._talking, self._interrupts.held():
            if self._pending is not None:
                raise WrongState("a batch is half made: take it before more actors come")
            count = len(self.workers)
            self._plans.extend(plans)
            self._resources.extend(resources)
            self._make_words(count + len(plans))
            jobs = [self._job(count + i, plan, self._jobs[0].workers) for i, plan in enumerate(plans)]
            new = self._hire(jobs)
            for remote, about in zip(new, self._answers(new, FIRST, grace=BOOT)):
                remote.about = about
                if self._shared is not None and about.packing != self._shared.packing:
                    raise SpecMismatch(f"worker {remote.index}: its policy's weights are not those of the others")
                if self._writer is None and not self._sync:
                    remote.slots = SharedSlots(self._file("slots"), about.layout, OWN_SLOTS)
                self._begin(remote)
            if self._sync:
                self._make_room()
            elif self._begun and self._writer is None:
                for remote in new:
                    for slot in range(OWN_SLOTS):
                        remote.give(slot)

    def _begin(self, remote: RayHandle) -> None:
        """With the latest weights, new episodes, and ids nobody has seen."""
        self._starts += 1
        self.call("begin", {remote.index: (None if self._shared is None else self._shared.packing,)})
        if self._latest is not None:
            self._send_parcel(remote)
        self.call("load_state", {remote.index: (remote.frames, {}, self._starts * _FRESH_IDS, self.version)})
        own = self._own.get(remote.index, self._loaded)
        if own is not None:
            self.call("load_weights", {remote.index: own})

    def call(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        answers = super().call(name, arguments)
        if name == "load_weights":
            self._own.update(arguments)
        elif name == "load_state":
            for w, (_, state, _, version) in arguments.items():
                if state.get("policy_state_dict"):
                    self._own[w] = dumps(state["policy_state_dict"], "weights"), version
        return answers

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = self._own.get(0)

    def publish(self, weights: Any = None, worker_ids: Sequence[int] | None = None) -> int:
        self.look()  # who has died meanwhile is reported, or there is another in its place
        return super().publish(weights, worker_ids)

    def _hear(self, remote: WorkerHandle) -> None:
        super()._hear(remote)
        if self._restart and self._failure is None and remote.child.gone() and remote.asked is None:
            self._replace(remote)
        elif remote.child.gone():
            self._failure = self._failure or self._death(remote)

    def _cluster_answers(self) -> bool:
        """In a thread: with nobody to answer, Ray waits for a minute and longer."""
        asking = threading.Thread(target=self._ray.nodes, daemon=True, name="reap-asks-cluster")
        asking.start()
        asking.join(DEADLINE)
        return not asking.is_alive()

    def _replace(self, remote: Any) -> None:
        """Another actor in its place."""
        if not self._cluster_answers():
            remote.child.end_more("the cluster does not answer any more")
            self._failure = self._death(remote)
            return
        slots = sorted(remote.working)
        remote.working.clear()
        remote.free.close()
        (entropy,) = np.random.SeedSequence().generate_state(1, np.uint32)
        job = replace(self._jobs[remote.index], entropy=int(entropy), hooks=self._hooks)
        actor = self._actor(job)
        remote.move(actor, *self._places([job], [actor]))
        (remote.about,) = self._answers([remote], FIRST, grace=BOOT)
        self.restarts += 1
        self._begin(remote)
        for slot in slots:
            remote.give(slot)


def _wait_for_ends(processes: Sequence[int], patience: float) -> None:
    """Until these have ended; those that have not after so many seconds are killed."""
    deadline = time.monotonic() + patience
    for fd in processes:
        if not until_ready([fd], within=deadline - time.monotonic()):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _short(error: BaseException) -> str:
    """What Ray says, on one line."""
    return f"its actor died: {' '.join(str(error).split())[:400]}"
