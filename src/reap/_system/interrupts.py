"""Interrupts: Ctrl-C is delivered only at safe points, and waits everywhere else.

    with interrupts.held():              what is taken within the block is also put back
        ...
        selector.select()                `interrupts` is registered with the selector: Ctrl-C ends the wait
        interrupts.let_in()

`let_in` and the end of the block raise KeyboardInterrupt, and no other place does (except inside `admitted`): never
between two lines that belong together, never in a finalizer, where Python would swallow it. Afterwards everything goes
on where it was. The caller's handler is back in place after the block. In threads other than the main one nothing is
held back.
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
    """Ends the wait of a selector it is registered with, from any thread, once it is open."""

    _reader = _writer = -1

    def open(self) -> Self:
        """Create the descriptors; the first is readable after `wake`."""
        self._reader, self._writer = os.pipe()
        for fd in (self._reader, self._writer):
            os.set_blocking(fd, False)
        return self

    def fileno(self) -> int:
        """Return the descriptor to register with a selector."""
        return self._reader

    def wake(self) -> None:
        """End the wait of the thread that waits for this."""
        if self._writer >= 0:
            with contextlib.suppress(OSError):  # the pipe is full, so a wakeup is pending already; or it is closed
                os.write(self._writer, b"!")

    def quiet(self) -> None:
        """Discard earlier calls of `wake`: the waiting thread is awake."""
        if self._reader >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)

    def close(self) -> None:
        """Close the descriptors."""
        reader, writer, self._reader, self._writer = self._reader, self._writer, -1, -1
        if reader >= 0:
            os.close(reader)
            os.close(writer)


class Interrupts(Wakeup):
    """Holds SIGINT back for a while; a SIGINT that arrives meanwhile ends the wait of a selector."""

    def __init__(self) -> None:
        self._user_handler: Any = None  # the caller's handler, while ours is installed
        self._pending = False
        self.woken = False  # whether `wake` was called

    def open(self) -> Self:
        super().open()
        if self._pending:
            super().wake()
        return self

    def wake(self) -> None:
        """End a wait in any thread, for another reason than Ctrl-C."""
        self.woken = True
        super().wake()

    def _arrive(self, number: int, frame: Any) -> None:
        if not self._pending:
            self._pending = True
            super().wake()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold interrupts back within the block, until `let_in` or its end."""
        if self._user_handler is not None or not _in_main_thread():
            yield
            return
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            yield
            return
        try:
            self._clear_pending()  # discard one that was delivered already
            self._user_handler = handler
            signal.signal(signal.SIGINT, self._arrive)
            yield
        finally:
            self._user_handler = None  # first: Ctrl-C may break off at the next line
            signal.signal(signal.SIGINT, handler)
            if self._clear_pending():
                handler(signal.SIGINT, None)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Within `held`, let interrupts come at any moment, as they would without reap: for the user's code."""
        handler = self._user_handler
        if handler is None or not _in_main_thread():
            yield
            return
        self.let_in()
        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            # Not if Ctrl-C came between yield and block: Python then closes this generator after `held` has ended.
            if self._user_handler is not None:
                signal.signal(signal.SIGINT, self._arrive)

    def let_in(self) -> None:
        """Raise the interrupt that was held back, if there is one."""
        handler = self._user_handler
        if handler is not None and _in_main_thread() and self._clear_pending():
            handler(signal.SIGINT, None)

    def _clear_pending(self) -> bool:
        """Return whether an interrupt was held back, and clear it."""
        if not self._pending:
            return False
        self.quiet()
        self._pending = False
        return True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
