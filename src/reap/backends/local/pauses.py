"""Pauses: keep background collection at rest until every pause has ended.

    pause ──► being made ──► given ──┬──► used as `with` block: ends with the block  ─┐
                 │                   └──► no block: ends when `resume` is called     ─┴──► over
                 └── Ctrl-C, between any two instructions ───────────────────────────────► over

No code has to run to end a pause that no caller can end any more: a pause that is being made, or used as a block, holds
only while its `Paused` object exists. Workers that rest check at intervals whether they still have to.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

AGAIN = 0.1  # seconds between two checks of a resting worker whether it still has to rest, if nothing wakes it


class Paused:
    """A pause as its caller holds it: it ends with its `with` block. `kept`: it ends only with `resume`."""

    __slots__ = ("__enter__", "__weakref__", "_end", "pause")
    __enter__: Any  # called without arguments

    def __init__(self, end: Callable[[Paused], None], *, kept: bool = False) -> None:
        self._end = end
        self.pause = _Pause(weakref.ref(self))
        # `__enter__` is a C function: in a Python one, Ctrl-C could come after the pause and before its block.
        self.__enter__ = [].clear if kept else self.pause.no_block.clear

    def __exit__(self, *_: object) -> None:
        if not self.pause.no_block:
            self._end(self)


class _Pause:
    """A pause as the resting side sees it."""

    def __init__(self, paused: weakref.ref[Paused]) -> None:
        self._paused = paused
        self.thread = threading.get_ident()  # the thread that requested it
        self.given = False  # whether its caller has received it
        self.no_block = [True]  # empty once its block has begun

    @property
    def holds(self) -> bool:
        return bool(self.given and self.no_block) or self._paused() is not None


class Pauses:
    """All current pauses: workers rest until the last one is over. Each change is a single instruction."""

    def __init__(self) -> None:
        self._all: list[_Pause] = []

    def begin(self, paused: Paused) -> None:
        """Add a pause, which holds from now on."""
        self._all.append(paused.pause)

    def end(self, paused: Paused | None) -> None:
        """End a pause, if it has not ended yet; None: the last one that a caller has received."""
        without = [one for one in self._all if one.given and one.no_block] or [one for one in self._all if one.given]
        over = without[-1:] if paused is None else [paused.pause]
        for one in over:
            if one in self._all:
                self._all.remove(one)

    @property
    def hold(self) -> bool:
        """Whether a pause holds."""
        for one in tuple(self._all):
            if not one.holds and one in self._all:
                self._all.remove(one)
        return bool(self._all)

    def hold_without(self, thread: int) -> bool:
        """Return whether a pause holds, and none was requested by this thread, which would have to end it."""
        return self.hold and all(one.thread != thread for one in tuple(self._all))
