"""Pauses: what keeps those at rest who collect in the background.

    pause ──► in the making ──► given ──┬──► a block: ends with it                     ─┐
                 │                      └──► no block: ends when somebody says resume  ─┴──► over
                 └── Ctrl-C, between any two instructions ──────────────────────────────────► over

Nothing here has to run for a pause to end that nobody can end any more: one in the making, or for a block, holds only
while the `Paused` that stands for it exists. Who rests looks now and then whether it still has to.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

AGAIN = 0.1  # seconds after which who rests looks whether it still has to, should nobody have said so


class Paused:
    """A pause in the hands of who asked for it: it ends with the block. `kept`: not before somebody says resume."""

    __slots__ = ("__enter__", "__weakref__", "_end", "pause")
    __enter__: Any  # called without arguments

    def __init__(self, end: Callable[[Paused], None], *, kept: bool = False) -> None:
        self._end = end
        self.pause = _Pause(weakref.ref(self))
        # A block begins by a function of C: in one of Python Ctrl-C could come after the pause and before its block.
        self.__enter__ = [].clear if kept else self.pause.no_block.clear

    def __exit__(self, *_: object) -> None:
        if not self.pause.no_block:
            self._end(self)


class _Pause:
    """A pause as the one knows it who rests."""

    def __init__(self, paused: weakref.ref[Paused]) -> None:
        self._paused = paused
        self.thread = threading.get_ident()  # which asked for it
        self.given = False  # whether who asked for it has got it
        self.no_block = [True]  # empty once its block has begun

    @property
    def holds(self) -> bool:
        return bool(self.given and self.no_block) or self._paused() is not None


class Pauses:
    """Pauses add up: there is rest until all are over. Each change is one instruction."""

    def __init__(self) -> None:
        self._all: list[_Pause] = []

    def begin(self, paused: Paused) -> None:
        """Let a pause hold from here on."""
        self._all.append(paused.pause)

    def end(self, paused: Paused | None) -> None:
        """It is over, if it was not before; None: the last one that somebody has."""
        without = [one for one in self._all if one.given and one.no_block] or [one for one in self._all if one.given]
        over = without[-1:] if paused is None else [paused.pause]
        for one in over:
            if one in self._all:
                self._all.remove(one)

    @property
    def hold(self) -> bool:
        """Whether there is one that is not over."""
        for one in tuple(self._all):
            if not one.holds and one in self._all:
                self._all.remove(one)
        return bool(self._all)

    def hold_without(self, thread: int) -> bool:
        """Return whether there is one, and none that this thread has asked for and would have to end."""
        return self.hold and all(one.thread != thread for one in tuple(self._all))
