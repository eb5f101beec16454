"""Waiting for what nothing tells: a file, another process or thread. Where there is an event, wait for that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `condition` returns something true, and return that; fail after so many seconds."""
    found = comes_true(condition, seconds)
    assert found, f"it did not happen within {seconds:g} s"
    return found


def comes_true(condition: Callable[[], Any], seconds: float) -> Any:
    """Wait until `condition` returns something true or so many seconds are over; return what it returned last."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found
