"""Listeners: who is shown every batch of a collector, beside its consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from reap._system.interrupts import Interrupts


class Listeners:
    """Those who are shown every batch that is delivered, or written to a buffer, by this process.

    Each batch is shown once: Ctrl-C waits until all have seen it, and one that is made ready again is not shown again.
    """

    def __init__(self) -> None:
        self.all: list[Callable[[TensorDictBase], Any]] = []
        self._shown: tuple[int, int] | None = None

    def add(self, listener: Callable[[TensorDictBase], Any]) -> None:
        """From now on, call this with each batch."""
        self.all.append(listener)

    def remove(self, listener: Callable[[TensorDictBase], Any]) -> None:
        """Call this listener no more."""
        self.all = [one for one in self.all if one != listener]

    def show(self, batch: TensorDictBase, number: tuple[int, int]) -> None:
        """Call all of them with this batch; `number` tells it from the others."""
        if number != self._shown:
            with Interrupts().held():
                for listener in self.all:
                    listener(batch)
                self._shown = number
