"""Affinity: which cores a thread or a process may run on. An impossible choice is refused at once.

worker_affinity=[[1], [2, 3]]    worker 0 runs on core 1, worker 1 on cores 2 and 3
driver_affinity=[0]              the collecting thread runs on core 0 while it collects
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeVar

from reap.errors import UsageError, WrongArgument

Cores = frozenset[int]
Masks = Sequence[Sequence[int]] | Callable[[int], Sequence[int]]
T = TypeVar("T")


def mask(name: str, given: Any) -> Cores:
    """Return the cores given as argument `name`; raises if this process may not use them."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{name} needs an operating system that lets threads be placed on cores, as Linux does")
    try:
        numbers = [*given]
    except TypeError:
        numbers = []
    if not numbers or any(isinstance(core, bool) or not isinstance(core, Integral) for core in numbers):
        raise WrongArgument(f"{name} must be a list of numbers of cores, got {given!r}")
    cores, ours = frozenset(map(int, numbers)), os.sched_getaffinity(0)
    if not cores <= ours:
        raise UsageError(f"{name} is {sorted(cores)}, but this process may run on the cores {sorted(ours)} only")
    return cores


def masks(name: str, given: Any, workers: int, envs: int) -> list[Cores]:
    """Return the cores of each worker. An error also says how many envs each of them has."""
    if callable(given):
        return [mask(f"{name}({n})", given(n)) for n in range(workers)]
    try:
        each = [*given]
    except TypeError:
        raise WrongArgument(
            f"{name} must be a list with the cores of each worker, or a function, got {given!r}"
        ) from None
    if len(each) != workers:
        here = f"{workers} here with {envs // workers} of {envs} envs each"
        raise UsageError(f"{name} must hold the cores of each worker, {here}, got {len(each)}: {each!r}")
    return [mask(f"{name}[{n}]", cores) for n, cores in enumerate(each)]


def pin_process(cores: Cores | None) -> None:
    """Pin this process, with its present and future threads, to these cores; None leaves it where it is."""
    if cores is None:
        return
    for thread in os.listdir("/proc/self/task"):  # imports may have started some already
        _place(int(thread), cores)


def run_pinned(cores: Cores, work: Callable[[], T]) -> T:
    """Return what `work` returns. The calling thread runs on these cores meanwhile, afterwards on its own again."""
    before = os.sched_getaffinity(0)
    try:  # the try comes first: Ctrl-C may come during the next line
        _place(0, cores)
        return work()
    finally:
        os.sched_setaffinity(0, before)


def _place(thread: int, cores: Cores) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:  # the thread has ended meanwhile
        pass
    except OSError as refused:  # the cores the process may use have changed since `mask` checked them
        raise UsageError(f"cannot run on the cores {sorted(cores)}: {refused}") from refused
