"""Interrupts: Ctrl-C is let in where nothing is in hand, and waits everywhere else.

    with interrupts.held():          what is taken here is also put down
        ...
        with interrupts.let_in():    where time is spent: waiting
            select()

So a KeyboardInterrupt never falls between two lines that belong together, and after it everything goes on where it was.
The handler is the caller's own again at the end; elsewhere than in the main thread there is nothing to hold.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """SIGINT, held back for a while."""

    def __init__(self) -> None:
        self._usual: Any = None  # the caller's handler, while ours is in its place
        self._open = self._came = False

    def _arrive(self, number: int, frame: Any) -> None:
        if self._open:
            self._usual(number, frame)
        else:
            self._came = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Interrupts wait until `let_in`, or until the end."""
        usual = signal.getsignal(signal.SIGINT)
        if self._usual is not None or not callable(usual) or not _in_main_thread():
            yield
            return
        try:
            self._usual, self._open, self._came = usual, False, False
            signal.signal(signal.SIGINT, self._arrive)
            yield
        finally:
            self._open, self._usual = False, None  # first: the next line may be interrupted
            signal.signal(signal.SIGINT, usual)
            if self._came:
                usual(signal.SIGINT, None)

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        """Interrupts come through here, those that waited first."""
        if self._usual is None or not _in_main_thread():
            yield
            return
        self._open = True
        try:
            if self._came:
                self._came = False
                self._usual(signal.SIGINT, None)
            yield
        finally:
            self._open = False


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
