"""WorkerBackend: runs any number of workers, with a supervisor, a transport and a delivery.

    take ──► delivery ──► supervisor ──► transport ──► workers          publish ──► transport ──► workers

It has every operation a collector needs of its workers. The transport decides how these operations reach a worker.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from reap._system.fork_server.client import limits_as_worker_died
from reap._system.messages.pickling import dumps
from reap.backends.base import Backend, Delivery, Rollout, Transport, WorkerActivity, WorkerReport
from reap.backends.delivery import NO_LIMIT, IntoBuffer
from reap.backends.supervisor import OnAnswer, Supervisor
from reap.backends.weight_publisher import WeightPublisher
from reap.backends.worker_activity import activity_of, stacks_of
from reap.backends.worker_handle import WorkerHandle, is_resumable
from reap.backends.worker_server import Job
from reap.core.measuring.episode_log import EpisodeLog
from reap.core.measuring.moments import as_moments, as_tensors, merged
from reap.core.measuring.stats import Stats
from reap.core.measuring.times import WorkClock
from reap.core.resume import anew
from reap.errors import ReapError, UsageError, WrongState, as_raised
from reap.failures import FailurePolicy
from reap.seeding import chain, fresh_seed, restart_seed
from reap.weight_update import WeightTransport

_FRESH_IDS = 2**32  # the size of a block of trajectory ids; every worker that starts later begins a new block


class WorkerBackend(Backend):
    """Runs one worker per plan, wherever the transport launches them.

    Args:
        plans: what each worker is built from.
        transport: how workers are reached.
        delivery: which rollouts make a batch.
        source: the weights to publish when `publish` is called without any.
        scheme: how weights are sent; None: the transport's default.
        timeout: seconds a worker that has work may send nothing.
        on_failure: what to do about workers that fail.
        **job_fields: further fields of every worker's `Job`.
    """

    close_ends_take = True

    def __init__(
        self,
        plans: Sequence[Any],
        *,
        transport: Transport,
        delivery: Delivery,
        source: Any = None,
        scheme: WeightTransport | None = None,
        timeout: float | None = None,
        on_failure: FailurePolicy | None = None,
        **job_fields: Any,
    ) -> None:
        self._plans, self.transport, self.delivery = list(plans), transport, delivery
        self._job_fields = {"threads": 1, "preempted": delivery.preempts(len(self._plans)), **job_fields}
        if (
            on_failure is not None
            and on_failure.action == "restart"
            and (why := transport.cannot_restart()) is not None
        ):
            raise UsageError(f"on_failure='restart': {why}")
        self.supervisor = Supervisor(
            transport, timeout=timeout, on_failure=on_failure, calls_for_newcomer=self._calls_for_newcomer
        )
        self._weights = WeightPublisher(self.supervisor, scheme=scheme, source=source, in_step=delivery.in_step)
        self._count = len(self._plans)  # as each worker knows it: trajectory ids are unique among so many workers
        self._id_block = 0  # the block of new trajectory ids; earlier blocks may be used up
        self._seeds: dict[int, tuple[int, bool]] = {}  # the seed each worker was last given, if any

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers at once, receive the layout of their rollouts, and tell them where their memory is."""
        supervisor = self.supervisor
        with supervisor.uninterrupted(), limits_as_worker_died("the workers"):
            supervisor.start(self._jobs(self._plans, 0))
            del self._plans[:]  # this also closes our duplicates of the file descriptors in them
            self.delivery.prepare(supervisor)
            packing = self._weights.choose_packing()
            beginnings = {worker.index: self.transport.begin_arguments(worker, packing) for worker in self.workers}
            supervisor.call("begin", beginnings, _mark_begun)
            self._weights.open()

    def _jobs(self, plans: Sequence[Any], first: int) -> list[Job]:
        return [Job(first + i, self._count, plan, fresh_seed(), **self._job_fields) for i, plan in enumerate(plans)]

    def add(self, plans: Sequence[Any]) -> None:
        """Start more workers. They begin with the latest weights."""
        supervisor = self.supervisor
        with supervisor.listening():
            if self.delivery.unfinished:
                raise WrongState("a batch is only partly collected; call next() before adding workers")
            new = supervisor.start(self._jobs(plans, len(self.workers)))
            self.delivery.prepare(supervisor)
            for worker in new:
                for name, arguments in self._calls_for_newcomer(worker):
                    supervisor.call(name, {worker.index: arguments}, _mark_begun if name == "begin" else None)

    def _calls_for_newcomer(self, worker: WorkerHandle) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield the calls that bring a worker that starts later up to date.

        They tell it where its memory is, its state (the predecessor's, or new episodes with unused ids), the running
        statistics of the other envs, its seed, weights sent to it alone, and that its trajectories were cut. Between
        the calls this also changes the handle's counts and sends the latest weights again.
        """
        self._weights.check_packing(worker)
        self._id_block += 1
        yield "begin", self.transport.begin_arguments(worker, self._weights.packing)
        self.transport.resend_weights(worker)
        resumes, state = worker.can_resume, worker.state_after
        if not resumes:
            worker.keep_counts()
            yield from self._statistics_for(worker)  # before the reset, whose observations are normalised
        yield "load_state", (worker.frames, state if resumes else {}, self._id_block * _FRESH_IDS, self.version)
        if resumes:
            yield from self._statistics_for(worker)  # the state holds what was known when it was saved
        if worker.index in self._seeds and not resumes:
            seed, static = self._seeds[worker.index]
            again = self._job_fields.get("saves") and state is None  # it has collected nothing yet
            yield "set_seed", (worker.frames, seed if again else restart_seed(seed, worker.restarts), static)
        for own in self._weights.weights_for_newcomer(worker):
            yield "load_weights", own
        if worker.rollouts and not resumes:
            yield "mark_cut", ()

    def _statistics_for(self, worker: WorkerHandle) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield the call that sends a worker what the envs of the others have learned, if its env learns, too."""
        if worker.info.learns:
            pool = self.supervisor.statistics
            worker.statistics_sent = pool.version
            yield "hear_statistics", (pool.for_worker(worker.index),)

    def close(self, *, failed: bool = False) -> None:
        self.supervisor.close(failed=failed)

    @property
    def workers(self) -> list[WorkerHandle]:
        """The workers; empty after `close`."""
        return self.supervisor.workers

    @property
    def known_workers(self) -> list[WorkerHandle]:
        """The workers; after `close`, the workers it had."""
        return self.supervisor.workers or self.supervisor.former

    @property
    def episodes(self) -> EpisodeLog:
        return self.supervisor.episodes

    @property
    def restarts(self) -> int:
        return self.supervisor.restarts

    @property
    def failed(self) -> bool:
        return self.supervisor.failed

    def reports(self, clock: WorkClock) -> list[WorkerReport]:
        here = {*self.workers}
        return [
            WorkerReport(one.index, one in here and not one.child.gone(), one.frames, one.rollouts, one.size, one.stats)
            for one in self.known_workers
        ]

    @property
    def on_rollout(self) -> Callable[..., None] | None:
        return self.supervisor.on_rollout

    @on_rollout.setter
    def on_rollout(self, callback: Callable[..., None] | None) -> None:
        self.supervisor.on_rollout = callback

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def take(self, *, random: bool = False, most: float = NO_LIMIT) -> Rollout:
        """Return the next rollout: of all workers (in step), or of the first worker that is ready.

        `most`: how many frames may still be ordered, where workers write them to a buffer as they collect them.
        """
        supervisor = self.supervisor
        with supervisor.listening():
            return self.delivery.take(random=random, most=most)

    def rollout_lost(self) -> None:
        """Do nothing: `take` holds Ctrl-C back, so that it loses no rollout."""

    def uninterrupted(self) -> AbstractContextManager[None]:
        return self.supervisor.uninterrupted()

    def canceller(self) -> Callable[[], None]:
        return self.supervisor.halt

    def drain(self, within: float | None = None) -> None:
        """Wait up to `within` seconds until workers have finished their slots; the rollouts are kept for `take`."""
        self.supervisor.drain(within)

    def settle(self, within: float | None = None) -> tuple[int, int]:
        """Wait until workers have finished their slots; return and discard the counts of rollouts that were not taken.

        These rollouts, counted as frames and rollouts, are in the buffer already.
        """
        supervisor = self.supervisor
        with supervisor.listening():
            supervisor.drain(within)
            return self.delivery.discard_arrived()

    def activity(self) -> list[WorkerActivity]:
        return activity_of(list(self.workers), self.transport)

    def stacks(self) -> dict[str, str]:
        return stacks_of(self.supervisor.living)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Call workers (by number) all at once. They answer between two rollouts; return their answers by number."""
        return self.supervisor.call(name, arguments)

    def find(self, path: str, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]] | None = None) -> dict[int, Any]:
        """Return what is at `path` in each worker, or what it returns when called with that worker's own arguments."""
        living = [worker.index for worker in self.supervisor.living]
        packed = {w: None if calls is None else dumps(calls[w], "arguments") for w in living}
        try:
            answers = self.call("find", {w: (path, one) for w, one in packed.items()})
        except ReapError as error:
            if calls is None and isinstance(error.__cause__, AttributeError):
                raise error.__cause__ from error  # a wrong name raises as it would in this process
            raise
        return {w: self._unpickled(answer, w, path) for w, answer in answers.items()}

    def _unpickled(self, data: bytes, worker: int, path: str) -> Any:
        """Return what was found in a worker. Unpickling is the user's code: not within the call, which it could end."""
        try:
            return pickle.loads(data)
        except Exception as error:
            raised = as_raised(f"reading {path} raised", error)
        raise raised.at(worker=self.workers[worker].name)

    def apply(self, path: str, strategy: Any, weights: Any) -> None:
        """Apply `weights`, extracted by a user's own strategy, to the model at `path` in each worker."""
        self.call("apply", self.supervisor.everyone(path, dumps((strategy, weights), "weights")))

    def profile(self, settings: Mapping[int, Any]) -> None:
        self.call("profile", {worker: (one,) for worker, one in settings.items()})

    def set_hooks(self, new: Mapping[str, Any]) -> None:
        """Set hooks of all workers, also of later ones, by name: `pre_collect_hook`, `post_collect_hook`."""
        packed = dumps(dict(new), " and ".join(new))
        self._job_fields["hooks"] = {**self._job_fields.get("hooks", {}), **new}
        self.supervisor.change_jobs(hooks=self._job_fields["hooks"])  # first: a worker may be replaced in the call
        self.call("hooks", self.supervisor.everyone(packed))

    # ---- weights --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the latest weights."""
        return self._weights.version

    @version.setter
    def version(self, version: int) -> None:
        self._weights.version = version

    def publish(self, weights: Any = None, worker_ids: Sequence[int] | None = None) -> int:
        """Send new weights to all workers, or to some; return their version."""
        return self._weights.publish(weights, worker_ids)

    def set_first_weights(self, weights: Mapping[int, Any]) -> None:
        """Send workers (by number) their weights before any of them acts. These have the first version."""
        self._weights.set_first_weights(weights)

    def weights_of(self, worker: int) -> Any:
        """Return the weights that a worker's policy holds now."""
        workers = self.supervisor.check_numbers([worker])
        answers = self.call("weights", dict.fromkeys(workers, ()))
        if not answers:
            living = ", ".join(str(one.index) for one in self.supervisor.living)
            raise WrongState(f"worker {worker} has failed and was dropped; the remaining workers are {living}")
        return answers[worker]

    # ---- seeds and state ------------------------------------------------------------------------------------------

    def reset(self, lanes: Sequence[int] | None = None, *, workers: Sequence[int] | None = None) -> None:
        """Start new episodes in all workers, or in some."""
        if lanes is not None:
            raise UsageError("reset(lanes) is not supported for workers in other processes; reset() resets all lanes")
        self._start_new_episodes(
            "reset", dict.fromkeys(range(len(self.workers)) if workers is None else workers, ()), _keep_state
        )

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        """Seed all lanes from one chain of seeds: each worker's lanes continue it where the last worker's end."""
        calls: dict[int, Sequence[Any]] = {}
        for worker in self.workers:
            calls[worker.index] = self._seeds[worker.index] = (seed, static)
            _, seed = chain(seed, worker.info.lanes, static=static)
        self._start_new_episodes("set_seed", calls, _keep_seeded_state)
        return seed

    def _start_new_episodes(self, name: str, calls: Mapping[int, Sequence[Any]], on_answer: OnAnswer) -> None:
        """Make a call that ends all episodes, and discard the undelivered rollouts that were collected before it."""
        supervisor = self.supervisor
        with supervisor.listening():
            self.delivery.discard_unfinished()
            supervisor.recount_ordered(restarting=list(calls))
            taken = {worker.index: self._taken(worker)[0] for worker in self.workers}
            number = supervisor.calls + 1
            supervisor.call(name, {w: (taken[w], *arguments) for w, arguments in calls.items()}, on_answer)
            self.delivery.discard_before(list(calls), number)

    def state_dict(self) -> dict[str, Any]:
        """Return env states, trajectory ids, counts and weights of all workers."""
        each, lost = {}, np.zeros(2, np.int64)
        for w, state in self.call("state", self.supervisor.everyone()).items():
            worker = self.workers[w]
            # Rollouts that were not taken will be missing in a run that continues from this state.
            taken = self._taken(worker)
            each[f"worker{w}"] = {**worker.with_counts(state), "frames": taken[0], "iter": taken[1] - 1}
            lost += np.subtract(worker.made_at_answer, taken)
        return self._joined(max(state.pop("traj_id") for state in each.values()), each, lost)

    def _taken(self, worker: WorkerHandle) -> tuple[int, int]:
        """Return the number of frames and rollouts of a worker that were taken."""
        frames, rollouts = self.supervisor.waiting(worker)
        return worker.frames - frames, worker.rollouts - rollouts

    def last_state(self, why: str) -> dict[str, Any]:
        first, each, lost = (self._id_block + 1) * _FRESH_IDS, {}, np.zeros(2, np.int64)
        for worker in self.known_workers:
            lost += self.supervisor.waiting(worker)
            frames, rollouts = self._taken(worker)
            lanes = worker.info.lanes
            counts = Stats.counted(lanes, worker.stats, frames=frames, rollouts=rollouts).state()
            weights = self._weights.current(worker.index) if worker.info.has_weights else None
            self.supervisor.statistics.retire(worker.index)
            each[f"worker{worker.index}"] = {
                "env_state_dict": {},
                "frames": frames,
                "iter": rollouts - 1,
                "policy_version": self.version,
                "resume": anew(lanes, why, next_id=first, statistics=counts),
                **({} if weights is None else {"policy_state_dict": weights}),
            }
        return self._joined(first, each, lost)

    def _joined(self, first: int, each: Mapping[str, Any], lost: Any) -> dict[str, Any]:
        """Join workers' states into one. `lost`: frames and rollouts that were collected but not taken."""
        frames, rollouts = (0, 0) if isinstance(self.delivery, IntoBuffer) else lost.tolist()  # already in the buffer
        in_flight = {"frames": frames, "rollouts": rollouts}
        learned = self.supervisor.statistics.former()
        shared: dict[str, Any] = {"statistics": learned} if learned else {}
        shared |= {"policy_version": self.version, "episodes": self.episodes.state(), "in_flight": in_flight}
        return {"traj_pool": {"traj_id": torch.tensor(first)}, **each, **shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. A worker missing in the state starts like worker 0, with a fresh env."""
        supervisor = self.supervisor
        if "episodes" in state:
            self.episodes.load(state["episodes"])
        first = int(state.get("traj_pool", {}).get("traj_id", 0))
        self._id_block = max(self._id_block, first // _FRESH_IDS)
        self.version = int(state.get("policy_version", self.version))
        usual = {**state.get("worker0", {}), "env_state_dict": {}, "resume": None, "frames": 0, "iter": -1}
        own = {w: state.get(f"worker{w}", usual) for w in range(len(self.workers))}
        if sum(name.startswith("worker") for name in state) != len(own):
            own = {w: _with_ids_from(first, one) for w, one in own.items()}

        def loaded(worker: WorkerHandle, state_after: Any) -> None:
            _keep_state(worker, state_after)
            worker.load_counts(own[worker.index])

        with supervisor.listening():
            self.delivery.discard_unfinished()
            for w, worker in enumerate(self.workers):
                frames, rollouts = supervisor.waiting(worker)
                worker.frames = int(own[w].get("frames", 0)) + frames
                worker.rollouts = int(own[w].get("iter", -1)) + 1 + rollouts
            with self._weights.loading(own, self.version):
                self._start_new_episodes("load_state", {w: (own[w], first, self.version) for w in own}, loaded)
            self._load_statistics(state)

    def _load_statistics(self, state: Mapping[str, Any]) -> None:
        """Give all workers the running statistics of the saved envs, also those of workers that no longer exist."""
        if not any(worker.info.learns for worker in self.workers):
            return
        reports = self.call("statistics", self.supervisor.everyone())
        lost = [state[name].get("statistics", []) for name in state if _is_gone(name, len(self.workers))]
        former = [
            as_tensors(merged([found for one in parts if (found := as_moments(one)) is not None], _shape(parts)))
            for parts in zip(state.get("statistics", []), *lost)
        ]
        self.supervisor.statistics.load(former, reports)


def _is_gone(name: str, workers: int) -> bool:
    return name.startswith("worker") and name[6:].isdigit() and int(name[6:]) >= workers


def _shape(parts: Sequence[Any]) -> tuple[int, ...]:
    return next((tuple(one[1].shape) for one in parts if one is not None), ())


def _mark_begun(worker: WorkerHandle, _: Any) -> None:
    """Note that a worker has mapped its memory. From this moment on a replacement must receive `begin` too."""
    worker.begun = True


def _keep_state(worker: WorkerHandle, state_after: Any) -> None:
    """Note the state in which a worker started new episodes: a replacement resumes from it, if one was reported."""
    worker.state_after = state_after


def _keep_seeded_state(worker: WorkerHandle, state_after: Any) -> None:
    """Note the state of a worker that was seeded. Without a resumable state, a replacement starts from the seed."""
    worker.state_after = state_after if is_resumable(state_after) else None


def _with_ids_from(first: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a worker's state with new trajectory ids, because with another number of workers its ids would clash."""
    resume = state.get("resume")
    return state if resume is None else {**state, "resume": {**resume, "next_id": max(first, resume["next_id"])}}
