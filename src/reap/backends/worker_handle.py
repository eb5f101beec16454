"""WorkerHandle: a worker's process as the parent sees it, and the pipe through which it is given slots."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import deque
from typing import Any

from reap._system.processes import Child
from reap.backends.worker_server import WorkerInfo
from reap.core.shared_slots import SharedSlots
from reap.core.stats import Stats


class FreeSlots:
    """The parent's end of a worker's free pipe. A fork of the parent gives nothing back: the slot is in use here."""

    def __init__(self, fd: int) -> None:
        self._fd, self._owner = fd, os.getpid()

    def give(self, slot: int) -> None:
        """Permission to fill it."""
        if self._fd >= 0 and self._owner == os.getpid():
            with contextlib.suppress(BrokenPipeError):  # it is gone; whoever waits for it finds out
                os.write(self._fd, bytes([slot]))

    def close(self) -> None:
        """No more of it."""
        fd, self._fd = self._fd, -1  # first: nobody may write to a number that is somebody else's
        if fd >= 0:
            os.close(fd)


class WorkerHandle:
    """One worker as the parent sees it."""

    def __init__(self, index: int, child: Child, free: FreeSlots) -> None:
        self.index, self.child, self.free = index, child, free
        self.about: WorkerInfo
        self.inbox: deque[Any] = deque()
        self.slots: SharedSlots  # its own, if asynchronous
        self.lent: set[int] = set()
        self.busy_since = 0.0  # when it was last given something to do while it had nothing, or heard of
        self.working: set[int] = set()  # slots it may fill
        self.asked: int | None = None  # the call it has not answered yet
        self.stats: dict[str, Any] = Stats(0).summary()  # nothing so far
        self.frames = self.rollouts = 0  # made so far

    @property
    def busy(self) -> bool:
        """Whether something is to come from it."""
        return bool(self.working) or self.asked is not None

    def give(self, slot: int) -> None:
        """A slot to fill."""
        if not self.busy:
            self.busy_since = time.monotonic()
        self.working.add(slot)
        self.free.give(slot)

    def ask(self, call: int) -> None:
        """Something is to be answered."""
        if not self.busy:
            self.busy_since = time.monotonic()
        self.asked = call

    def messages(self) -> list[Any]:
        """What it has said since."""
        return [pickle.loads(data) for data in self.child.line.hear()]

    def uncount(self, frames: int) -> None:
        """A rollout nobody will see."""
        self.frames, self.rollouts = self.frames - frames, self.rollouts - 1

    @property
    def size(self) -> int:
        """Frames of a whole rollout."""
        return self.about.layout.steps * self.about.layout.lanes

    @property
    def name(self) -> str:
        """By which it is known in errors."""
        return f"{self.index}{self.child.label}"
