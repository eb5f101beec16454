"""ParallelEnv: the public class for envs in child processes that are stepped together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reap._system.forks import guard, refuse_use
from reap._system.processes import StartMethod
from reap.arguments import one_of, seconds, whole
from reap.core.device.devices import named_device
from reap.envs.base import EnvBase
from reap.envs.parallel.async_lanes import ReadyLanes
from reap.envs.parallel.process_lanes import ProcessLanes
from reap.envs.parallel.process_workers import ProcessWorkers
from reap.envs.serial import one_each
from reap.errors import UsageError, WrongArgument
from reap.failures import FailureAction, WorkerFailure, failure_policy


class ParallelEnv(EnvBase):
    """Envs in child processes, as the lanes of one env.

    >>> env = ParallelEnv(4, lambda: GymEnv("CartPole-v1"))
    >>> collector = Collector(env, policy, frames_per_batch=400)      # batches [4, 100]

    Args:
        num_envs: the number of lanes.
        create_env_fn: a factory, a Gymnasium id, or a list with one per lane.
        num_workers: the number of processes that share the lanes; one per lane if not given.
        ready: step the lanes of this many processes at a time, whichever are ready; None: all lanes together. A slow
            lane then delays the others only where a batch needs frames of every lane. For collectors only.
        create_env_kwargs: keywords for the factories, one mapping or a list.
        timeout: seconds a process may take for one step before it is reported as stuck; None: no limit.
        start_method: "forkserver" or "spawn".
        num_sub_threads: torch threads of each process.
        on_failure: what a collector does about a process that dies, raises or takes longer than `timeout`: "raise" its
            error; "restart" it, which resets its lanes; "drop" it, which masks out its lanes. See docs/failures.md.
        max_restarts: how many restarts are allowed within `restart_window` seconds; None: any number.
        restart_window: seconds over which restarts are counted.
        on_restart: called with a `reap.collectors.WorkerFailure` after each restart, and when a process is dropped.
        device: where tensors used by hand are placed.
    """

    def __init__(
        self,
        num_envs: int | None = None,
        create_env_fn: Any = None,
        *,
        num_workers: int | None = None,
        ready: int | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        start_method: StartMethod = "forkserver",
        num_sub_threads: int = 1,
        on_failure: FailureAction = "raise",
        max_restarts: int | None = 10,
        restart_window: float = 600.0,
        on_restart: Callable[[WorkerFailure], Any] | None = None,
        device: Any = None,
    ) -> None:
        lanes = num_workers if num_envs is None else num_envs  # TorchRL's keyword for it is num_workers
        if create_env_fn is None:
            raise WrongArgument("ParallelEnv needs create_env_fn: a factory, or one per lane")
        seconds("timeout", timeout)
        one_of("start_method", start_method, ("forkserver", "spawn"))
        whole("num_sub_threads", num_sub_threads)
        place = named_device("device", device)
        made = one_each("num_envs", lanes, create_env_fn, create_env_kwargs)
        count = len(made) if num_workers is None else num_workers
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(made):
            raise UsageError(f"num_workers must lie between 1 and the {len(made)} lanes, got {count!r}")
        bounds = np.linspace(0, len(made), count + 1).astype(int)
        shares = [made[a:b] for a, b in itertools.pairwise(bounds)]
        options: dict[str, Any] = {"timeout": timeout, "start_method": start_method, "threads": num_sub_threads}
        if ready is not None and (isinstance(ready, bool) or not isinstance(ready, int) or not 1 <= ready < count):
            raise UsageError(f"ready must lie between 1 and {count - 1}, below the number of processes, got {ready!r}")
        failures = failure_policy(on_failure, max_restarts, restart_window, on_restart)
        options["on_failure"] = failures
        if ready is None:
            super().__init__(ProcessLanes(shares, **options), device=place)
        else:
            super().__init__(ReadyLanes(ProcessWorkers(shares, **options), ready, ready), device=place)
        guard(self)

    def in_fork(self, why: str) -> None:
        """Refuse use in a forked copy: the processes belong to the process that started them."""
        refuse_use(self, why)
