"""Ray: workers are actors. A batch is one object, read where it lies; weights are put once per version, and pulled.

    actor.order ──►  station  ──► actor.news: one object per batch ──► slot
    put ──► actor.parcel: a reference, pulled by each

An actor that dies is named; or replaced, if `restart` is True: what it was asked for is asked of the new one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from reap.backends.far import Bell, FarBackend, FarRemote
from reap.backends.far_worker import FarJob, News, Order
from reap.backends.mail import MailStation
from reap.backends.process import DEADLINE, FIRST
from reap.backends.remote import Remote
from reap.children import BOOT, dumps
from reap.errors import UsageError, WorkerDied, WorkerSilent, missing

_ASKED = 2  # news asked for at a time: one is fetched while another is read
_GROUPS = {"orders": 1, "news": 1, "weights": 1}  # calls of a group follow one another, groups run side by side
_FRESH_IDS = 2**32  # trajectories of a worker before it is replaced, at most


def engine() -> Any:
    """The library."""
    try:
        import ray
    except ImportError:
        raise missing("ray", "ray") from None
    return ray


class _Actor:
    """Whether an actor lives, and how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid, self._how = pid, ""

    def end(self, how: str) -> None:
        self._how = self._how or how

    def gone(self) -> bool:
        return bool(self._how)

    def death(self) -> WorkerDied:
        return WorkerDied(self._how)

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        return WorkerSilent(f"its actor sent nothing for {seconds:.1f} s (timeout={timeout})")


class RayRemote(FarRemote):
    """An actor as it is seen here."""

    def __init__(self, index: int, actor: Any, pid: int, bell: Bell) -> None:
        super().__init__(index, _Actor(pid))
        self._ring = lambda _: bell.ring()  # holds on to nothing else: Ray may keep it for a while
        self.move(actor, pid)

    def move(self, actor: Any, pid: int) -> None:
        """From now on it is this actor."""
        self.actor, self.child = actor, _Actor(pid)  # type: ignore[assignment]
        self.told = 0
        self._futures: deque[Any] = deque()
        for _ in range(_ASKED):
            self._ask_news()

    def _ask_news(self) -> None:
        future = self.actor.news.options(concurrency_group="news").remote().future()
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
            news = None if error is not None else future.result()
            if news is None:
                self.child.end("its actor ended" if error is None else _short(error))  # type: ignore[attr-defined]
                self._futures.clear()
                break
            found.append(self.carried_in(News(*news)))
            self._ask_news()
        return found


class RayBackend(FarBackend):
    """Workers that are Ray actors, in the cluster this process is connected to, or in one of its own."""

    roads = ("ray", "parcel", "none")

    def __init__(
        self,
        plans: Sequence[Any],
        *,
        cluster: Mapping[str, Any],
        resources: Sequence[Mapping[str, Any]],
        restart: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(plans, **options)
        self._ray, self._cluster, self._resources, self._restart = engine(), dict(cluster), resources, restart
        self._ours = False  # whether the cluster is ours to end
        self.restarts = 0
        self._parcel: Any = None

    def launch(self, jobs: Sequence[FarJob]) -> None:
        if not self._ray.is_initialized():
            self._ray.init(**{"include_dashboard": False, **self._cluster})
            self._ours = True
        self._jobs = list(jobs)
        actors = [self._actor(job) for job in jobs]
        for job, actor, pid in zip(jobs, actors, self._pids(actors)):
            self.workers.append(RayRemote(job.index, actor, pid, self.bell))

    def _actor(self, job: FarJob) -> Any:
        kind = self._ray.remote(concurrency_groups=_GROUPS)(MailStation)
        actor = kind.options(**self._resources[job.index])
        return actor.remote(dumps(job, f"what worker {job.index} needs"), list(sys.path))

    def _pids(self, actors: Sequence[Any]) -> list[int]:
        try:
            pids: list[int] = self._ray.get([actor.pid.remote() for actor in actors], timeout=BOOT)
        except self._ray.exceptions.GetTimeoutError:
            for actor in actors:
                self._ray.kill(actor)
            raise UsageError(
                f"the cluster has no room for {len(actors)} actors with {dict(self._resources[0])}; it has "
                f"{self._ray.available_resources()} left"
            ) from None
        return pids

    def send(self, remote: Any, order: Order | None) -> None:
        remote.actor.order.options(concurrency_group="orders").remote(remote.told, order)
        remote.told += 1

    def broadcast(self, parcel: Tensor) -> None:
        self._parcel = self._ray.put(parcel.numpy())
        for remote in self.workers:
            self._send_parcel(remote)

    def _send_parcel(self, remote: Any) -> None:
        remote.actor.parcel.options(concurrency_group="weights").remote(self._parcel)

    def part(self, workers: Sequence[Any]) -> None:
        living = [remote for remote in workers if not remote.child.gone()]
        left = [remote.actor.leave.remote(remote.told, 0.2 * DEADLINE) for remote in living]
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=0.4 * DEADLINE)
        for remote in workers:
            self._ray.kill(remote.actor)
        if self._ours:
            self._ray.shutdown()

    # ---- one for another ------------------------------------------------------------------------------------------

    def _hear(self, remote: Remote) -> None:
        super()._hear(remote)
        if self._restart and self._failure is None and remote.child.gone() and remote.asked is None:
            self._replace(remote)
        elif remote.child.gone():
            self._failure = self._failure or self._death(remote)

    def _replace(self, remote: Any) -> None:
        """Another actor in its place: with the latest weights, new episodes, and ids nobody has seen."""
        if self._shared is None and self.version > 0 and remote.about.weighs:
            self._failure = self._death(remote)  # what it acted with went with it
            return
        slots = sorted(remote.working)
        remote.working.clear()
        remote.free.close()
        (entropy,) = np.random.SeedSequence().generate_state(1, np.uint32)
        actor = self._actor(replace(self._jobs[remote.index], entropy=int(entropy)))
        remote.move(actor, *self._pids([actor]))
        (remote.about,) = self._answers([remote], FIRST, grace=BOOT)
        self.restarts += 1
        self.call("begin", {remote.index: (None if self._shared is None else self._shared.packing,)})
        if self._parcel is not None:
            self._send_parcel(remote)
        self.call("load_state", {remote.index: ({}, self.restarts * _FRESH_IDS, self.version)})
        for slot in slots:
            remote.give(slot)


def _short(error: BaseException) -> str:
    """What Ray says, on one line."""
    return f"its actor died: {' '.join(str(error).split())[:400]}"
