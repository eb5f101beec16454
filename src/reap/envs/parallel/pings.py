"""Pings: numbers the PINGs that tell an order's answer from the answers of orders that Ctrl-C broke off.

Ctrl-C may come between any two lines, so a PING may have been sent or not, and its answer read or not. Each gets
another number; numbers repeat, because an answer is one byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from reap._system.interrupts import Interrupts
from reap.envs.parallel.env_child import TOKENS


class Pings:
    """Yields the token of the next PING; within the block, send it and read until its answer has come.

    Ctrl-C is held back for the last token: no answer is left unread when tokens begin again.
    """

    def __init__(self) -> None:
        self._last = 0

    @contextlib.contextmanager
    def next(self) -> Iterator[int]:
        """Return a context for one PING, with its token."""
        token = self._last % TOKENS + 1
        with Interrupts().held() if token == TOKENS else contextlib.nullcontext():
            self._last = token
            yield token
