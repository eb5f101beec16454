"""The process-wide random generators: reading, seeding and restoring their states."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

State = tuple[Any, Any, Any]
_NAMES = tuple(
    f"{whose} global generator ({where})"
    for whose, where in (("NumPy's", "numpy.random"), ("Python's", "random"), ("torch's", "torch.random"))
)


def state() -> State:
    """Return the states of the three generators."""
    return np.random.get_state(legacy=False), random.getstate(), torch.get_rng_state()


def put(there: State) -> None:
    """Restore the states that `state` returned."""
    np.random.set_state(there[0])
    random.setstate(there[1])
    torch.set_rng_state(there[2])


def scatter(seed: int) -> None:
    """Seed all three generators."""
    np.random.seed(seed)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)


def moved(before: State, after: State) -> list[str]:
    """Return the names of the generators whose state has changed."""
    same = (
        pickle.dumps(before[0]) == pickle.dumps(after[0]),
        before[1] == after[1],
        torch.equal(before[2], after[2]),
    )
    return [name for name, stayed in zip(_NAMES, same) if not stayed]


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the generators after the block, however it ends."""
    before = state()
    try:
        yield
    finally:
        put(before)
