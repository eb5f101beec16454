"""InlineBackend: one worker in this thread. `take` calls the fill loop; the backend has no processes (its env may).

take ──► in the env ──► out of it
           │                │
close ─────┴── cancel ──────┴─► closed        from any thread or signal handler: never while a thread is in the env
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from reap._system.affinity import Cores, run_pinned
from reap._system.interrupts import Interrupts
from reap._system.threads import stack_of
from reap.backends.base import Backend, Halted, Rollout, WorkerActivity, WorkerReport, halt_when
from reap.core.device.worker import DeviceWorker, device_worker
from reap.core.measuring.episode_log import EpisodeLog
from reap.core.measuring.profiling import RolloutTracer, TraceSettings
from reap.core.measuring.times import WorkClock
from reap.core.worker import Plan, Worker
from reap.errors import UsageError, WorkerSilent, WrongState
from reap.failures import FailurePolicy, RestartBudget
from reap.weight_update import WeightTransport
from reap.weights import local
from reap.weights.strategy import extract


class InlineBackend(Backend):
    """Runs one worker in this process. `same_slot` reuses one slot for all rollouts; `cores`: where it collects."""

    def __init__(
        self,
        plan: Plan,
        *,
        source: Any = None,
        same_slot: bool = False,
        transport: WeightTransport | None = None,
        strategy: Any = None,
        cores: Cores | None = None,
        rebuild: FailurePolicy | None = None,
    ) -> None:
        self._cores = cores
        self._rebuild = rebuild  # when set, a lane's env that raises is rebuilt
        self._plan, self._source, self._same_slot, self._transport = plan, source, same_slot, transport
        self._strategy = strategy  # a user's own strategy, which extracts and applies weights
        self.worker: Worker | DeviceWorker
        self._tracer: RolloutTracer | None = None
        self.on_rollout: Callable[..., None] | None = None  # called with each rollout
        self._episodes = EpisodeLog()
        self._lock = threading.RLock()  # reentrant: a signal handler of the same thread may close
        self._visits: dict[object, int] = {}  # the thread of each visit to the env
        self._closing = False  # whether the last visit closes the env
        # Not an Event: that is Python code, and Ctrl-C inside it could leave its lock held.
        self._closed, self._until_closed = False, threading.Lock()
        self._until_closed.acquire()  # released when the env is closed

    @property
    def close_ends_take(self) -> bool:
        return self.worker.env.runs_elsewhere

    @contextlib.contextmanager
    def _in_env(self) -> Iterator[None]:
        """Return a context in which no other thread closes the env."""
        visit, thread = object(), threading.get_ident()
        try:
            with self._lock:
                self._visits[visit] = thread
            if self._closing or self._closed:
                raise Halted
            yield
        finally:
            self._visits.pop(visit, None)  # first, in one call: else Ctrl-C could leave the visit registered
            with self._lock:
                last = self._closing and not self._visits
                self._closing = self._closing and not last
            if last:
                self._close()

    def start(self) -> None:
        env = self._plan.make_env()
        try:
            model = self._plan.make_policy()
            on_device = device_worker(self._plan, env, model, same_slot=self._same_slot)
        except BaseException:
            env.close()
            raise
        rebuilds = None if self._rebuild is None else RestartBudget(self._rebuild)
        why: str | None = "its lanes live on a device"
        if on_device is not None:
            self.worker = on_device
        else:
            self.worker = Worker(self._plan, built=(env, model), same_slot=self._same_slot, rebuilds=rebuilds)
            why = self.worker.rebuilds.why_not
        if rebuilds is not None and why is not None:
            self.worker.close()
            raise UsageError(
                f"on_failure='restart' rebuilds the env of a lane that raised; not possible here: {why}. Use "
                f"worker processes (MultiSyncCollector), which can be replaced"
            )

    def take(self, *, random: bool = False) -> Rollout:
        worker = self.worker
        slot = worker.pool.acquire()
        began = 0.0 if self.on_rollout is None else time.perf_counter()
        try:
            with self._in_env():
                if self._cores is None:
                    frames = worker.fill(slot, random=random)
                else:
                    frames = run_pinned(self._cores, functools.partial(worker.fill, slot, random=random))
        except BaseException:
            worker.pool.release(slot)
            raise
        if self.on_rollout is not None:
            self.on_rollout(0, (began, time.perf_counter()), frames=frames, version=worker.loop.version)
        arrays = slot.arrays if self._same_slot else worker.pool.lend(slot)
        return Rollout(arrays, worker.layout, frames, worker.loop.version, finals=slot.finals)

    @property
    def restarts(self) -> int:
        return self.worker.env.restarts()

    @property
    def episodes(self) -> EpisodeLog:
        """The finished episodes of the worker, including those that ended just now."""
        if hasattr(self, "worker"):
            self._episodes.add(self.worker.take_episodes())
        return self._episodes

    def reports(self, clock: WorkClock) -> list[WorkerReport]:
        stats, size = self.worker.stats, self.worker.layout.frames
        counts = stats.summary()
        counts |= clock.seconds(counts["collect_seconds"] - stats.loaded_seconds)
        return [WorkerReport(0, not self._closed, stats.frames, stats.rollouts, size, counts)]

    def rollout_lost(self) -> None:
        self.worker.reset_all_next()

    def uninterrupted(self) -> AbstractContextManager[None]:
        return Interrupts().held()

    def canceller(self) -> Callable[[], None]:
        cancelled: list[bool] = []
        halt_when(lambda: bool(cancelled), self.worker)
        return functools.partial(cancelled.append, True)

    def publish(self, weights: Any = None) -> int:
        if self._transport == "none":
            return self.worker.loop.version
        model = self.worker.model
        if not isinstance(model, nn.Module) and self._strategy is None:
            raise WrongState(f"policy {type(model).__name__} has no weights to update")
        given = self._source if weights is None else weights
        if given is not None and given is not model:
            self.load(given)
        self.worker.loop.version += 1
        return self.worker.loop.version

    def load(self, weights: Any) -> None:
        """Load weights into the policy."""
        model = self.worker.model
        if self._strategy is None:
            local.load(model, weights)
        else:
            self._strategy.apply_weights(model, extract(self._strategy, weights))

    def profile(self, settings: Mapping[int, TraceSettings | None]) -> None:
        if self._tracer is not None:
            self._tracer.end()
        chosen = settings.get(0)
        self._tracer = None if chosen is None else RolloutTracer(self.worker, chosen)

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        with self._in_env():
            self.worker.reset(lanes)

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        with self._in_env():
            return self.worker.set_seed(seed, static=static)

    def state_dict(self) -> dict[str, Any]:
        return self._state(self.worker.env.state_dict(), None)

    def last_state(self, why: str) -> dict[str, Any]:
        return self._state({}, why)

    def _state(self, env: Mapping[str, Any], why: str | None) -> dict[str, Any]:
        return {
            "env_state_dict": env,
            "traj_pool": {"traj_id": torch.tensor(self.worker.ledger.counter.next)},
            "policy_version": self.worker.loop.version,
            "resume": self.worker.open_state(why),
            "episodes": self.episodes.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loop = self.worker.loop
        self.worker.env.load_state_dict(state.get("env_state_dict", {}))
        counter = self.worker.ledger.counter
        counter.skip_to(int(state.get("traj_pool", {}).get("traj_id", 0)))
        if state.get("resume") is None:
            self.reset()  # episodes that were open elsewhere cannot continue here
        else:
            with self._in_env():
                self.worker.resume(state["resume"])
        loop.version = int(state.get("policy_version", loop.version))
        self.worker.take_episodes()  # drops episodes of the time before, which are no longer wanted
        if "episodes" in state:
            self._episodes.load(state["episodes"])

    def activity(self) -> list[WorkerActivity]:
        at = getattr(self.worker.loop, "at", None)
        text = "waits for the learner" if not self._visits else "collects" if at is None else f"is at step {at[0]}"
        return [WorkerActivity(0, text, None, self.worker.lanes)]

    def stacks(self) -> dict[str, str]:
        inside = list(self._visits.values())
        own = stack_of(inside[-1]) if inside else "(no batch is being collected)"
        return {"worker 0 (in this process)": own, **self.worker.env.stacks()}

    def close(self, *, failed: bool = False) -> None:
        """Close the env. If a thread is inside, that thread closes it after its current step."""
        with self._lock:
            if self._visits and not self.close_ends_take:
                self._closing = True
                self.canceller()()
                return
        self._close()

    def _close(self) -> None:
        self._closed = True
        if self._until_closed.locked():
            self._until_closed.release()
        self.profile({})
        if hasattr(self, "worker"):
            self.worker.close()

    def wait_closed(self, timeout: float) -> None:
        """Wait for the thread that is in the env, unless it is this one; raise `WorkerSilent` on timeout."""
        inside = [one for one in self._visits.values() if self._closing and one != threading.get_ident()]
        if inside and not (self._closed or self._until_closed.acquire(timeout=timeout)):
            raise WorkerSilent(
                f"the collecting thread did not leave the env within {timeout:.1f} s; it will close the env "
                f"when it does. Its stack:\n{stack_of(inside[0])}"
            )
