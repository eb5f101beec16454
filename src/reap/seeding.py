"""Seeds: one number in, a chain of numbers out.

`next_seed(s)` is the seed that follows `s` in the chain. Lanes and workers take consecutive seeds, so each has its own
random stream and the whole run is determined by the first number.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from reap.errors import WrongArgument

_MODULUS = 2**32 - 1


def next_seed(seed: int) -> int:
    """Return the seed after `seed`: eight random bytes, read big-endian, modulo 2³²−1."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _MODULUS


def fresh_seed() -> int:
    """Return a random seed."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def chain(seed: int, count: int, *, static: bool = False) -> tuple[list[int], int]:
    """Return `count` seeds starting with `seed`, and the seed after them. With `static`, all of them are `seed`."""
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
    """Return the seed of a worker that was restarted so often: a different one each time, and the same in every run."""
    return int(np.random.SeedSequence([seed, restarts]).generate_state(1, np.uint32)[0]) & 0x7FFFFFFF
