"""Handle torch's random generator while a policy or an env is tried out, so that trying it leaves no trace.

If no other thread draws, the generator is put back to where it was. In a thread beside the learner it must be left
alone: the learner draws from it, too, and would get the same numbers twice. There nothing is put back, every draw gives
new numbers, and code that draws cannot be compared with its replay.

    alone                  position ──► draw ──► restore_generator ──► draw the same again
    beside the learner     nothing is put back; if the generator did not move, a call has drawn nothing
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_thread = threading.local()


def use_own_generator() -> None:
    """Declare that this thread runs beside one that draws random numbers."""
    _thread.beside = True


def is_shared() -> bool:
    """Return whether another thread draws from the generators while this one does."""
    return getattr(_thread, "beside", False)


def position() -> Tensor | None:
    """Return the state of torch's generator, or None if it is shared, as another thread may move it at any time."""
    return None if is_shared() else torch.get_rng_state()


def restore_generator(where: Tensor | None) -> None:
    """Set torch's generator to a `position`; None leaves it alone."""
    if where is not None:
        torch.set_rng_state(where)


def same_position(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two positions are the same; True if that is unknown because the generator is shared."""
    return one is None or other is None or torch.equal(one, other)


def probe_generator(seed: float = 0) -> torch.Generator:
    """Return a separate generator for making up probe inputs, from which nothing else draws."""
    return torch.Generator().manual_seed(round(10 * seed))


def varied(
    values: Sequence[Tensor], by: float, other: Callable[[Tensor, float, torch.Generator], Tensor]
) -> list[Tensor]:
    """Return probe inputs: other values of the same shapes and dtypes, on which replay and original must agree.

    `other(value, by, generator)` makes those that are neither floating-point numbers nor bytes.
    """
    found, chance = [], probe_generator(by)
    for value in values:
        if value.dtype.is_floating_point:
            found.append(value + by * torch.randn(value.shape, dtype=value.dtype, generator=chance))
        elif value.dtype is torch.uint8:
            found.append(torch.randint(256, value.shape, dtype=value.dtype, generator=chance))
        else:
            found.append(other(value, by, chance))
    return found
