"""What workers in other processes are doing right now, as far as the parent can see.

No worker is called, so this works from any thread and also for a worker that is stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reap._system.stacks import call_all
from reap.backends.base import Transport, WorkerActivity
from reap.backends.worker_handle import WorkerHandle


def activity_of(workers: Sequence[WorkerHandle], transport: Transport) -> list[WorkerActivity]:
    """Return what each worker is doing. The pid of a worker on another machine is left out."""
    found = []
    for worker in workers:
        if worker.connection is not None and hasattr(worker, "info"):
            local = getattr(worker.child, "ask_stacks", dict) is not dict  # it is a process of this machine
            pid = worker.child.pid if local else None
            found.append(WorkerActivity(worker.index, _activity(worker, transport), pid, worker.info.lanes))
    return found


def _activity(worker: WorkerHandle, transport: Transport) -> str:
    if worker.dropped or worker.joining is not None:
        return "has failed, and was dropped" if worker.dropped else "is being restarted"
    place = transport.position(worker)
    if worker.info.layout.lanes == 1:
        place.pop("lane", None)
    if place:
        return "is at " + ", ".join(f"{what} {number}" for what, number in place.items())
    if worker.pending_call is not None:
        return "answers a call"
    return "collects" if worker.pending_slots else "waits"


def stacks_of(workers: Sequence[WorkerHandle]) -> dict[str, str]:
    """Return the current stack of each worker, and of each process of its lanes, by name."""
    asked: dict[str, Callable[[], Any]] = {}
    for worker in workers:
        if worker.connection is not None and not worker.child.gone():
            asked[f"worker {worker.name}"] = worker.child.ask_stack
            asked[f"worker {worker.name}, below"] = getattr(worker.child, "ask_stacks", dict)
    found: dict[str, str] = {}
    for name, told in call_all(asked).items():
        if isinstance(told, dict):
            found |= {f"{name.removesuffix(', below')}, {process}": stack for process, stack in told.items()}
        else:
            found[name] = told or "(it does not answer)"
    return found
