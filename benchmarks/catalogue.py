"""The table of all workloads."""

from __future__ import annotations

from itertools import chain

from benchmarks import (
    buffers,
    env_adapters,
    gpu,
    processes,
    ready_envs,
    remote,
    rollouts,
    scripts,
    scripts_more,
    training,
    transforms,
)
from benchmarks.board import Workload

MODULES = (
    *(scripts_more, scripts, training, transforms, env_adapters, processes, ready_envs, buffers, rollouts, remote),
    gpu,
)


def workloads() -> list[Workload]:
    """All of them, those of a group together."""
    found = list(chain.from_iterable(module.workloads() for module in MODULES))
    groups = list(dict.fromkeys(workload.group for workload in found))
    return sorted(found, key=lambda workload: groups.index(workload.group))
