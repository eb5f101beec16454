"""Torch's random generator while a policy or an env is tried out, which is to leave no trace.

Alone, what was drawn is put back. In a thread beside the learner the generator must be left alone: the learner draws
from it, too, and would be given the same numbers twice. There nothing is put back, numbers that are drawn are new ones,
and what draws cannot be compared with its replay.

    alone                  position ──► draw ──► put_back ──► draw the same again
    beside the learner     nothing is put back; that a call draws nothing is seen by the generator, which did not move
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_thread = threading.local()


def beside_the_learner() -> None:
    """Declare that this thread runs beside one that draws random numbers."""
    _thread.beside = True


def is_shared() -> bool:
    """Whether another thread draws from the generators while this one does."""
    return getattr(_thread, "beside", False)


def position() -> Tensor | None:
    """Where torch's generator is; None where it is shared, and will be elsewhere before anybody could look."""
    return None if is_shared() else torch.get_rng_state()


def put_back(where: Tensor | None) -> None:
    """Have torch's generator go on at a `position`."""
    if where is not None:
        torch.set_rng_state(where)


def same_position(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether the generator is where it was, as far as that can be told."""
    return one is None or other is None or torch.equal(one, other)


def probe_generator(seed: float = 0) -> torch.Generator:
    """A generator of its own for inputs that are made up: nobody else draws from it."""
    return torch.Generator().manual_seed(round(10 * seed))
