"""Listeners: functions that see every batch of a collector, beside its consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from reap._system.interrupts import Interrupts


class Listeners:
    """The functions called with every batch that this process delivers, or writes to a buffer.

    Each batch is shown once: Ctrl-C waits until all listeners have seen it, and a batch that is delivered after an
    interrupted attempt is not shown again.
    """

    def __init__(self) -> None:
        self.all: list[Callable[[TensorDictBase], Any]] = []
        self._shown: tuple[int, int] | None = None

    def add(self, listener: Callable[[TensorDictBase], Any]) -> None:
        """Call this function with each batch from now on."""
        self.all.append(listener)

    def remove(self, listener: Callable[[TensorDictBase], Any]) -> None:
        """Stop calling this listener."""
        self.all = [one for one in self.all if one != listener]

    def forget(self) -> None:
        """Show the next batch whatever its number: numbers may repeat."""
        self._shown = None

    def show(self, batch: TensorDictBase, number: tuple[int, int]) -> None:
        """Call all listeners with this batch, unless they have seen the one with this `number`."""
        if number != self._shown:
            with Interrupts().held():
                for listener in self.all:
                    listener(batch)
                self._shown = number
