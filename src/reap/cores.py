"""Cores: which processors a thread or a process may run on, said by the caller and refused at the door.

worker_affinity=[[1], [2, 3]]    worker 0 on core 1, worker 1 on cores 2 and 3
driver_affinity=[0]              whoever collects, on core 0, while it collects
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

from reap.errors import UsageError

Cores = frozenset[int]
Masks = Sequence[Sequence[int]] | Callable[[int], Sequence[int]]


def mask(name: str, given: Any) -> Cores:
    """The cores the argument `name` says, which this process may use."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{name} needs an operating system that lets threads be placed on cores, as Linux does")
    try:
        numbers = [*given]
    except TypeError:
        numbers = []
    if not numbers or any(isinstance(core, bool) or not isinstance(core, Integral) for core in numbers):
        raise UsageError(f"{name} must be a list of numbers of cores, got {given!r}")
    ours = os.sched_getaffinity(0)
    if not {*numbers} <= ours:
        raise UsageError(f"{name} is {given!r}, but this process may run on the cores {sorted(ours)} only")
    return frozenset(map(int, numbers))


def masks(name: str, given: Any, workers: int) -> list[Cores] | list[None]:
    """The cores of each worker; None: wherever there is room."""
    if given is None:
        return [None] * workers
    if callable(given):
        return [mask(f"{name}({n})", given(n)) for n in range(workers)]
    if not isinstance(given, (list, tuple)):
        raise UsageError(f"{name} must be a list with the cores of each worker, or a function, got {given!r}")
    if len(given) != workers:
        raise UsageError(f"{name} must hold the cores of each worker, {workers} here, got {len(given)}: {given!r}")
    return [mask(f"{name}[{n}]", cores) for n, cores in enumerate(given)]


def settle_on(cores: Cores | None) -> None:
    """From now on this thread, and those it starts, run there."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def staying_on(cores: Cores) -> Iterator[None]:
    """This thread runs there inside, and wherever it could before after."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
