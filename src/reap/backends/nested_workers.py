"""NestedWorkers: a remote worker with processes of its own beside it. To its collector it is one worker.

order ──► remote worker ──► worker 0 … worker k-1        sync    a rollout holds the lanes of all of them
             ▲                  │                         async   it is one worker's, whoever is first
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

from reap._system.remote_errors import Raised
from reap.backends.delivery import AsReady, InStep
from reap.backends.joint_slot import common_layout
from reap.backends.local.shared_memory import SharedMemoryTransport
from reap.backends.remote.remote_worker import RemoteWorker
from reap.backends.worker_backend import WorkerBackend
from reap.backends.worker_server import Job, WorkerInfo
from reap.core.measuring.episode_log import LANE, WORKER
from reap.core.measuring.moments import RunningStatistics
from reap.core.slot import TRAJ_IDS, Slot, State
from reap.core.stats import together
from reap.core.worker import Plan
from reap.errors import WorkerError

T = TypeVar("T")


@dataclass(frozen=True)
class NestedWorkers:
    """How many workers a remote worker has, and whether they go in step. Makes the remote worker, where it is to be."""

    workers: int
    sync: bool
    random_frames: int = 0  # of workers that do not go in step: they run ahead of what they are told

    def __call__(self, job: Job, *transport: Any) -> RemoteWorker:
        """Return the remote worker."""
        return NestedRemoteWorker(job, *transport, nested=self)


class NestedRemoteWorker(RemoteWorker):
    """A remote worker whose worker is several, in processes."""

    worker: _Processes  # type: ignore[assignment]

    def __init__(self, job: Job, *transport: Any, nested: NestedWorkers) -> None:
        self._job, self._nested = job, nested
        super().__init__(replace(job, hooks=None), *transport)  # they run in the workers

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
        self._forget()
        self.worker.load_state(state.get("env_state_dict", {}), first_id, version)
        if self.info.has_weights and state.get("policy_state_dict"):
            self._load(state["policy_state_dict"], int(state.get("policy_version", version)))

    def do_mark_cut(self) -> None:
        """All trajectories that were open in the workers before these have been cut."""
        self.worker.call("mark_cut")

    def do_find(self, path: str, packed: bytes | None) -> Any:
        """Return what is at a path in every worker, as a list."""
        try:
            return self.worker.find(path, None if packed is None else cloudpickle.loads(packed))
        except Exception as error:
            return Raised.of(error, path)

    def do_apply(self, path: str, packed: bytes) -> Any:
        """Give the models at a path in every worker what a user's strategy has made of their weights."""
        try:
            self.worker.call("apply", path, packed)
        except Exception as error:
            return Raised.of(error, path)

    def do_hooks(self, packed: bytes) -> None:
        """Hand the hooks on to the workers, which call them."""
        self.worker.call("hooks", packed)

    def do_weights(self) -> dict[str, Any]:
        self._refresh()
        found: dict[str, Any] = self.worker.weights()
        return found

    def _load(self, weights: Any, version: int) -> None:
        self._refresh()
        self.worker.publish(weights, version)
        self.worker.look_at_weights()


class _Processes:
    """The workers, with the methods that a remote worker calls on its one."""

    span = (0.0, 0.0)  # of the last rollout

    def __init__(self, job: Job, nested: NestedWorkers) -> None:
        self._index, self._of, self._version = job.index, job.workers, 0
        plan = replace(job.plan, steps=_Share(job.plan.steps, nested.workers)) if nested.sync else job.plan
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
            self._ask(self._backend.start)
        except BaseException:
            self._backend.close()
            raise
        self.info = self._seen_together(nested)
        self.layout = self.info.layout
        self.tensors: list[Tensor] = []
        if self.info.packing is not None:
            self.tensors = self.info.packing.views(np.zeros(self.info.packing.nbytes, np.uint8))
            self.look_at_weights()

    def _seen_together(self, nested: NestedWorkers) -> WorkerInfo:
        infos = [remote.info for remote in self._backend.workers]
        own, lanes = infos[0].layout, sum(info.lanes for info in infos)
        if not nested.sync:
            return replace(infos[0], lanes=lanes)
        layout = common_layout([info.layout for info in infos])
        if own.batched:
            layout.look = replace(layout.look, dims=(nested.workers, *own.dims))
        return replace(infos[0], layout=layout, lanes=lanes)

    def _ask(self, verb: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a verb of the backend; errors name a worker by two numbers: its remote worker's, and its own there."""
        try:
            return verb(*arguments, **options)
        except WorkerError as error:
            error.worker = f"{self._index}/{error.worker}"
            raise

    def fill(self, slot: Slot, *, random: bool) -> int:
        began = time.perf_counter()
        rollout = self._ask(self._backend.take, random=random)
        for key, array in rollout.arrays.items():
            slot.arrays[key][...] = array
        if TRAJ_IDS in slot.arrays:  # unique among remote workers
            ids = slot.arrays[TRAJ_IDS]
            ids *= self._of
            ids += self._index
        slot.finals, slot.state = rollout.finals, State.FULL
        self._version, self.span = rollout.version, (began, time.perf_counter())
        return rollout.frames

    def summary(self) -> dict[str, Any]:
        return together([remote.stats for remote in self._backend.workers])

    def ended_since(self) -> Any:
        """Episodes of all of them; their lanes are numbered from the first worker's to the last one's."""
        rows = self._backend.episodes.take()
        lanes = [worker.info.lanes for worker in self._backend.known_workers]
        first = np.cumsum([0, *lanes])
        rows[:, LANE] += first[rows[:, WORKER].astype(np.int64)]
        return rows

    def running_statistics(self) -> Sequence[RunningStatistics]:
        """None of its own: nested workers share theirs among themselves."""
        return ()

    @property
    def version(self) -> int:
        """Of the weights that made the last rollout."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """`tensors` hold the weights of this version from here on."""
        names = [] if self.info.packing is None else [entry[0] for entry in self.info.packing.entries]
        self.publish(dict(zip(names, self.tensors)), version)

    @property
    def latest(self) -> int:
        """The version of the weights that act from here on."""
        return self._backend.version

    def publish(self, weights: Any, version: int) -> None:
        """Send new weights to all workers."""
        self._backend.version = version - 1
        self._ask(self._backend.publish, weights)

    def look_at_weights(self) -> None:
        """`tensors` hold what the workers have now: the next update may leave some of it out."""
        for tensor, value in zip(self.tensors, self.weights().values() if self.tensors else ()):
            tensor.copy_(value)

    def weights(self) -> Any:
        """Return the weights of the first worker; all have the same."""
        return self._ask(self._backend.weights_of, 0)

    def reset(self, lanes: Any = None) -> None:
        self._ask(self._backend.reset, lanes)

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        return self._ask(self._backend.set_seed, seed, static=static)

    def call(self, name: str, *arguments: Any) -> None:
        """Ask all workers the same."""
        self._ask(self._backend.call, name, self._backend.supervisor.everyone(*arguments))

    def find(self, path: str, call: Any) -> list[Any]:
        """Return what is at a path, or what it returns when called, in each."""
        calls = None if call is None else [call] * len(self._backend.workers)
        return list(self._backend.find(path, calls).values())

    def state(self) -> dict[str, Any]:
        state = self._ask(self._backend.state_dict)
        first = int(state.pop("traj_pool")["traj_id"]) * self._of + self._index
        return {"env_state_dict": state, "traj_id": first}

    def load_state(self, state: dict[str, Any], first_id: int, version: int) -> None:
        first = max(0, -(-(first_id - self._index) // self._of))
        loaded = {**state, "traj_pool": {"traj_id": first}, "policy_version": version}
        self._ask(self._backend.load_state_dict, loaded)

    def close(self) -> None:
        self._backend.close()


@dataclass(frozen=True)
class _Share:
    """Steps of each, where all together make what was asked for."""

    steps: Callable[[int], int]
    workers: int

    def __call__(self, lanes: int) -> int:
        return self.steps(lanes * self.workers)
