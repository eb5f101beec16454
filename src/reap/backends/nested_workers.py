"""NestedWorkers: a remote worker that runs several worker processes. To its collector it is one worker.

order ──► remote worker ──► worker 0 … worker k-1        sync    a rollout holds the lanes of all processes
             ▲                  │                         async   a rollout is that of the first process that is ready
             └───── block ◄─────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import cloudpickle
import numpy as np
from torch import Tensor

from reap._system.messages.pickling import dumps
from reap.backends.delivery import AsReady, InStep
from reap.backends.joint_slot import common_layout
from reap.backends.local.shared_memory import SharedMemoryTransport
from reap.backends.remote.remote_worker import RemoteWorker
from reap.backends.worker_backend import WorkerBackend
from reap.backends.worker_server import Job, WorkerInfo
from reap.core.measuring.episode_log import LANE, WORKER
from reap.core.measuring.moments import RunningStatistics
from reap.core.measuring.stats import joined_counts
from reap.core.slot import TRAJ_IDS, Slot
from reap.core.worker import Plan
from reap.errors import WorkerError

T = TypeVar("T")


@dataclass(frozen=True)
class NestedWorkers:
    """Number of worker processes of a remote worker, and whether they run in step. Called, it makes that worker."""

    workers: int
    sync: bool
    random_frames: int = 0  # for workers not in step, which run ahead of what they are told

    def __call__(self, job: Job, *transport: Any) -> RemoteWorker:
        """Return the remote worker."""
        return NestedRemoteWorker(job, *transport, nested=self)


class NestedRemoteWorker(RemoteWorker):
    """A remote worker whose one worker is several processes."""

    worker: _Processes  # type: ignore[assignment]

    def __init__(self, job: Job, *transport: Any, nested: NestedWorkers) -> None:
        self._job, self._nested = job, nested
        super().__init__(replace(job, hooks={}), *transport)  # the processes call the hooks

    def _build(self, plan: Plan, workers: int) -> None:
        self.worker = _Processes(self._job, self._nested)
        self.info, self.tensors = self.worker.info, self.worker.tensors

    # ---- calls ----------------------------------------------------------------------------------------------------

    def do_state(self) -> dict[str, Any]:
        state = self.worker.state()
        state |= {"policy_state_dict": self.do_weights()} if self.info.has_weights else {}
        return {**state, "policy_version": self.worker.latest}

    def do_load_state(self, taken: int, state: dict[str, Any], first_id: int, version: int) -> None:
        self._refresh()
        self._discard_held_back()
        self.worker.load_state(state.get("env_state_dict", {}), first_id, version)
        if self.info.has_weights and state.get("policy_state_dict"):
            self._load(state["policy_state_dict"], int(state.get("policy_version", version)))

    def do_mark_cut(self) -> None:
        """Mark the trajectories that were open in the predecessors of all processes as cut."""
        self.worker.call("mark_cut")

    def do_find(self, path: str, packed: bytes | None) -> Any:
        """Return a pickled list of what is at a path in each process."""
        return dumps(self.worker.find(path, None if packed is None else cloudpickle.loads(packed)), path)

    def do_apply(self, path: str, packed: bytes) -> None:
        """Apply weights, extracted by a user's own strategy, to the model at a path in each process."""
        self.worker.call("apply", path, packed)

    def do_hooks(self, packed: bytes) -> None:
        """Pass the hooks on to the processes, which call them."""
        self.worker.call("hooks", packed)

    def do_weights(self) -> dict[str, Any]:
        self._refresh()
        found: dict[str, Any] = self.worker.weights()
        return found

    def _load(self, weights: Any, version: int) -> None:
        self._refresh()
        self.worker.publish(weights, version)
        self.worker.refresh_tensors()


class _Processes:
    """The worker processes, behind the methods that a remote worker calls on its `Worker`."""

    span = (0.0, 0.0)  # of the last rollout

    def __init__(self, job: Job, nested: NestedWorkers) -> None:
        self._index, self._remote_workers, self._version = job.index, job.workers, 0
        plan = replace(job.plan, steps=_SharedSteps(job.plan.steps, nested.workers)) if nested.sync else job.plan
        self._backend = WorkerBackend(
            [plan] * nested.workers,
            transport=SharedMemoryTransport(),
            delivery=InStep() if nested.sync else AsReady(nested.random_frames),
            threads=job.threads,
            init=job.init,
            hooks=job.hooks,
            strategy=job.strategy,
        )
        try:
            self._call_backend(self._backend.start)
        except BaseException:
            self._backend.close()
            raise
        self.info = self._joint_info(nested)
        self.layout = self.info.layout
        self.tensors: list[Tensor] = []
        if self.info.packing is not None:
            self.tensors = self.info.packing.views(np.zeros(self.info.packing.nbytes, np.uint8))
            self.refresh_tensors()

    def _joint_info(self, nested: NestedWorkers) -> WorkerInfo:
        infos = [remote.info for remote in self._backend.workers]
        own, lanes = infos[0].layout, sum(info.lanes for info in infos)
        if not nested.sync:
            return replace(infos[0], lanes=lanes)
        layout = common_layout([info.layout for info in infos])
        if own.batched:
            layout.look = replace(layout.look, dims=(nested.workers, *own.dims))
        return replace(infos[0], layout=layout, lanes=lanes)

    def _call_backend(self, verb: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a method of the backend; errors name a worker as "remote worker/process"."""
        try:
            return verb(*arguments, **options)
        except WorkerError as error:
            error.worker = f"{self._index}/{error.worker}"
            raise

    def fill(self, slot: Slot, *, random: bool) -> int:
        began = time.perf_counter()
        rollout = self._call_backend(self._backend.take, random=random)
        for key, array in rollout.arrays.items():
            slot.arrays[key][...] = array
        if TRAJ_IDS in slot.arrays:  # made unique among remote workers
            ids = slot.arrays[TRAJ_IDS]
            ids *= self._remote_workers
            ids += self._index
        slot.finals = rollout.finals
        self._version, self.span = rollout.version, (began, time.perf_counter())
        return rollout.frames

    def summary(self) -> dict[str, Any]:
        return joined_counts([remote.stats for remote in self._backend.workers])

    def take_episodes(self) -> Any:
        """Return the new episodes of all processes; lanes are numbered from the first process to the last."""
        rows = self._backend.episodes.take()
        lanes = [worker.info.lanes for worker in self._backend.known_workers]
        first = np.cumsum([0, *lanes])
        rows[:, LANE] += first[rows[:, WORKER].astype(np.int64)]
        return rows

    def running_statistics(self) -> Sequence[RunningStatistics]:
        """Return no statistics: the processes share theirs among themselves."""
        return ()

    @property
    def version(self) -> int:
        """The version of the weights that made the last rollout."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Publish the weights in `tensors`, which have this version."""
        names = [] if self.info.packing is None else [entry[0] for entry in self.info.packing.entries]
        self.publish(dict(zip(names, self.tensors)), version)

    @property
    def latest(self) -> int:
        """The version of the weights that the next rollouts use."""
        return self._backend.version

    def publish(self, weights: Any, version: int) -> None:
        """Send new weights to all processes."""
        self._backend.version = version - 1
        self._call_backend(self._backend.publish, weights)

    def refresh_tensors(self) -> None:
        """Copy the current weights into `tensors`, because the next update may leave some of them out."""
        for tensor, value in zip(self.tensors, self.weights().values() if self.tensors else ()):
            tensor.copy_(value)

    def weights(self) -> Any:
        """Return the weights of the first process; all have the same."""
        return self._call_backend(self._backend.weights_of, 0)

    def reset(self, lanes: Any = None) -> None:
        self._call_backend(self._backend.reset, lanes)

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        return self._call_backend(self._backend.set_seed, seed, static=static)

    def call(self, name: str, *arguments: Any) -> None:
        """Call all processes with the same arguments."""
        self._call_backend(self._backend.call, name, self._backend.supervisor.everyone(*arguments))

    def find(self, path: str, call: Any) -> list[Any]:
        """Return what is at a path in each process, or what it returns there when called."""
        calls = None if call is None else [call] * len(self._backend.workers)
        return list(self._backend.find(path, calls).values())

    def state(self) -> dict[str, Any]:
        state = self._call_backend(self._backend.state_dict)
        first = int(state.pop("traj_pool")["traj_id"]) * self._remote_workers + self._index
        return {"env_state_dict": state, "traj_id": first}

    def load_state(self, state: dict[str, Any], first_id: int, version: int) -> None:
        first = max(0, -(-(first_id - self._index) // self._remote_workers))
        loaded = {**state, "traj_pool": {"traj_id": first}, "policy_version": version}
        self._call_backend(self._backend.load_state_dict, loaded)

    def close(self) -> None:
        self._backend.close()


@dataclass(frozen=True)
class _SharedSteps:
    """Computes the steps of each process such that all together collect the requested frames."""

    steps: Callable[[int], int]
    workers: int

    def __call__(self, lanes: int) -> int:
        return self.steps(lanes * self.workers)
