"""Small things collectors hand out: a part of a batch, and what `async_shutdown` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tensordict import TensorDictBase


class Ended:
    """Something to await that is over already."""

    def __await__(self) -> Iterator[None]:
        return iter(())


class Part(NamedTuple):
    """A batch, or what one worker made of it."""

    batch: TensorDictBase
    worker: int = 0
