"""Interrupts: Ctrl-C is let in where nothing is in hand, and waits everywhere else.

    with interrupts.held():              what is taken here is also put down
        ...
        selector.select()                `interrupts` is registered there: one that comes ends the wait
        interrupts.let_in()

A KeyboardInterrupt is raised in these two places and nowhere else: never between two lines that belong together, never
in a finalizer, where Python would swallow it. After it everything goes on where it was. The handler is the caller's own
again at the end; elsewhere than in the main thread there is nothing to hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from typing_extensions import Self


class Wakeup:
    """Ends a wait of a selector it is registered with, from any thread, once it is open."""

    _ours = _theirs = -1

    def open(self) -> Self:
        """Make the descriptors; the first is readable while somebody is to wake."""
        self._ours, self._theirs = os.pipe()
        for fd in (self._ours, self._theirs):
            os.set_blocking(fd, False)
        return self

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for."""
        return self._ours

    def wake(self) -> None:
        """Wake whoever waits."""
        if self._theirs >= 0:
            with contextlib.suppress(OSError):  # it is full, so somebody wakes already; or nobody listens any more
                os.write(self._theirs, b"!")

    def quiet(self) -> None:
        """Forget earlier calls of `wake`: whoever waited is awake."""
        if self._ours >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ours, 4096)

    def close(self) -> None:
        """Give back the descriptors."""
        ours, theirs, self._ours, self._theirs = self._ours, self._theirs, -1, -1
        if ours >= 0:
            os.close(ours)
            os.close(theirs)


class Interrupts(Wakeup):
    """SIGINT, held back for a while; one that waits wakes whoever waits."""

    def __init__(self) -> None:
        self._usual: Any = None  # the caller's handler, while ours is in its place
        self._came = False
        self.woken = False  # whether `wake` was called

    def open(self) -> Self:
        super().open()
        if self._came:
            super().wake()
        return self

    def wake(self) -> None:
        """End a wait in any thread, for another reason than Ctrl-C."""
        self.woken = True
        super().wake()

    def _arrive(self, number: int, frame: Any) -> None:
        if not self._came:
            self._came = True
            super().wake()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Interrupts wait until `let_in`, or until the end."""
        usual = signal.getsignal(signal.SIGINT)
        if self._usual is not None or not callable(usual) or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self._take()  # one that was told already
            self._usual = usual
            signal.signal(signal.SIGINT, self._arrive)
            yield
        finally:
            self._usual = None  # first: the next line may be interrupted
            signal.signal(signal.SIGINT, usual)
            if self._take():
                usual(signal.SIGINT, None)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Inside `held`: here they come at any moment, as they would without us. Code of the user's runs here."""
        usual = self._usual
        if usual is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.let_in()
        signal.signal(signal.SIGINT, usual)
        try:
            yield
        finally:
            if self._usual is not None:  # Ctrl-C between us and the block: Python ends this when nobody holds any more
                signal.signal(signal.SIGINT, self._arrive)

    def let_in(self) -> None:
        """Raise the interrupt that was held back, if there is one."""
        usual = self._usual
        if usual is not None and threading.current_thread() is threading.main_thread() and self._take():
            usual(signal.SIGINT, None)

    def _take(self) -> bool:
        """Return whether an interrupt was held back, and forget it."""
        if not self._came:
            return False
        self.quiet()
        self._came = False
        return True
