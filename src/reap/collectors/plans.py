"""Plans from options: a plan describes one worker completely, and the worker is built from it, wherever it lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from reap._system.messages.pickling import Packed
from reap.collectors.options import Options
from reap.core.env import Env
from reap.core.failure_record import ActionRecorder, pickled_factory
from reap.core.policies.exploration import exploration_type
from reap.core.worker import Plan
from reap.envs import as_env
from reap.weights.local import load, moved_to, unshared


@dataclass(frozen=True)
class EnvMaker:
    """Builds a worker's env."""

    source: Any
    kwargs: Packed | Mapping[str, Any] | None
    limit: int | None
    failure_dir: str | None = None  # the directory for files that let a failure be replayed
    worker: int | None = None

    def __call__(self) -> Env:
        """Build the env, with its step limit."""
        source, kwargs = (one.unpack() if isinstance(one, Packed) else one for one in (self.source, self.kwargs))
        limit = self.limit if self.limit is not None and self.limit > 0 else None
        if self.failure_dir is None:
            return as_env(source, kwargs, limit)
        plain = replace(self, source=source, kwargs=kwargs, failure_dir=None)
        # Before `as_env`: an env that was given as an object is still in its initial state.
        again = pickled_factory(plain)
        return ActionRecorder(as_env(source, kwargs, limit), self.failure_dir, again, self.worker)


@dataclass(frozen=True)
class PolicyMaker:
    """Builds a worker's policy.

    `policy` is the policy itself; with a `factory`, it holds the first weights of the policy it makes, or None.
    """

    policy: Any
    factory: Any
    device: torch.device | None

    def __call__(self) -> Any:
        """Build the policy, on the device where it acts."""
        source = self.policy if self.factory is None else self.factory
        sent = isinstance(source, Packed)
        policy = source.unpack() if sent else source
        if self.factory is not None:
            policy = policy()
        policy = moved_to(unshared(policy) if sent else policy, self.device)
        if self.factory is not None and self.policy is not None:
            load(policy, self.policy.unpack())
        return policy


@dataclass(frozen=True)
class StepsPerRollout:
    """Computes the steps per rollout of a worker that makes `frames` frames for each batch."""

    frames: int

    def __call__(self, lanes: int) -> int:
        """Return the number of steps, rounded up so that all lanes make equally many."""
        return -(-self.frames // lanes)


def plan_for(
    options: Options,
    make_env: Callable[[], Env],
    make_policy: Callable[[], Any],
    steps: Callable[[int], int],
    device: torch.device | None,
) -> Plan:
    """Return the plan of one worker."""
    return Plan(
        make_env,
        make_policy,
        steps,
        exploration=exploration_type(options.exploration_type),
        policy_device=device if device is not None and device.type != "cpu" else None,
        shown_device=device,
        trust_policy=bool(options.trust_policy),
        out_keys=options.out_key_tuples,
        capture=bool(options.capture),
        compile_policy=options.compiling,
        reset_when_done=options.reset_when_done,
        reset_at_each_iter=options.reset_at_each_iter,
        track_traj_ids=options.track_traj_ids,
        track_policy_version=bool(options.track_policy_version),
        track_episodes=options.track_episodes,
        gamma=options.gamma,
        deterministic=bool(options.deterministic),
        cut_column=options.on_failure == "restart",
        masked=options.on_failure == "drop",
        compact=options.compact_obs,
        contiguous=options.contiguous_batches,
        storing_device=options.devices[1],
        cuda_graphs=bool(options.cudagraph_policy),
        stop=None if options.interruptor is None else options.interruptor.collection_stopped,
    )
