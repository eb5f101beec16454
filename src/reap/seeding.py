"""Seeds: one number in, a chain of numbers out.

`next_seed(s)` is the link that follows `s`; lanes and workers take consecutive links, so every one of them has
its own stream and the whole run follows from the first number.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from reap.errors import WrongArgument

_MODULUS = 2**32 - 1


def next_seed(seed: int) -> int:
    """Return the link after `seed`: eight random bytes, read big-endian, folded below 2³²−1."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _MODULUS


def fresh_seed() -> int:
    """Return a random seed."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def chain(seed: int, count: int, *, static: bool = False) -> tuple[list[int], int]:
    """`count` seeds starting at `seed`, and the one that would come next. `static`: all the same."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
        raise WrongArgument(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    seed = int(seed)
    if static:
        return [seed] * count, seed
    seeds = []
    for _ in range(count):
        seeds.append(seed)
        seed = next_seed(seed)
    return seeds, seed


def seed_process(seed: int) -> None:
    """Seed torch, NumPy and `random` of this process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def restart_seed(seed: int, restarts: int) -> int:
    """The seed of a worker that began with `seed` and was started again so often: another one, and always the same."""
    return int(np.random.SeedSequence([seed, restarts]).generate_state(1, np.uint32)[0]) & 0x7FFFFFFF
