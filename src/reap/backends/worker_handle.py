"""WorkerHandle: one worker as the parent sees it: what it was given, what it has made, and how it is reached."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from reap.backends.base import WorkerConnection
from reap.backends.worker_server import Job, WorkerInfo
from reap.core.slot import Slot
from reap.core.stats import Stats


class WorkerHandle:
    """One worker as the parent sees it. It stays the same when its worker is started again."""

    about: WorkerInfo  # once it has said so
    connection: WorkerConnection | None = None  # once it is launched

    def __init__(self, job: Job) -> None:
        self.index = job.index
        self.job: Job | None = job  # what it is started from, where it may have to be started again
        self.slots: dict[int, Slot] = {}  # where its rollouts lie, by number, if it shares none with others
        self.lent: set[int] = set()  # of these, those the consumer looks at
        self.inbox: deque[Any] = deque()  # answers to the call it was asked last
        self.busy_since = 0.0  # when it was last given something to do while it had nothing, or heard of
        self.working: set[int] = set()  # slots it may fill
        self.asked: int | None = None  # the call it has not answered yet
        self.stats: dict[str, Any] = Stats(0).summary()  # nothing so far
        self.frames = self.rollouts = 0  # made so far
        self.made_at_answer = 0, 0  # of these, before it gave its last answer

    @property
    def reached(self) -> WorkerConnection:
        """Its connection, which it has."""
        if self.connection is None:
            raise RuntimeError(f"worker {self.index} was not launched")
        return self.connection

    @property
    def child(self) -> Any:
        """Its process, or what stands for it here."""
        return self.reached.child

    @property
    def busy(self) -> bool:
        """Whether something is to come from it."""
        return bool(self.working) or self.asked is not None

    def fill(self, slot: int, *, random: bool) -> None:
        """Give it a slot to fill."""
        if not self.busy:
            self.busy_since = time.monotonic()
        self.working.add(slot)
        self.reached.fill(slot, random=random)

    def expect_answer(self, call: int, grace: float = 0.0) -> None:
        """It was asked something; `grace`: seconds more than usual that it may take."""
        self.inbox.clear()
        if not self.busy:
            self.busy_since = time.monotonic()
        self.asked = call
        self.busy_since += grace

    def take_back_slots(self) -> list[int]:
        """The slots it was to fill, which it will not: it is gone."""
        slots = sorted(self.working)
        self.working.clear()
        return slots

    def uncount(self, frames: int) -> None:
        """Forget a rollout nobody will see."""
        self.frames, self.rollouts = self.frames - frames, self.rollouts - 1

    @property
    def size(self) -> int:
        """Frames of a whole rollout."""
        return self.about.layout.steps * self.about.layout.lanes

    @property
    def name(self) -> str:
        """By which it is known in errors."""
        return f"{self.index}{self.child.label}"
