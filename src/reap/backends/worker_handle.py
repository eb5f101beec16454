"""WorkerHandle: one worker as the parent sees it: what it was given, what it has made, and how it is reached."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

from reap.backends.base import WorkerConnection, WorkerLiveness
from reap.backends.worker_server import Job, WorkerInfo
from reap.core.slot import Slot
from reap.core.stats import Stats, added, counted_on


class WorkerHandle:
    """One worker as the parent sees it. It stays the same when its worker is started again."""

    info: WorkerInfo  # once it has said so
    connection: WorkerConnection | None = None  # once it is launched

    def __init__(self, job: Job) -> None:
        self.index = job.index
        self.job: Job | None = job  # what it is started from, where it may have to be started again
        self.slots: dict[int, Slot] = {}  # where its rollouts lie, by number; empty: in lanes of one slot for all
        self.lent: set[int] = set()  # of these, those the consumer looks at
        self.inbox: deque[Any] = deque()  # answers to the call it was asked last
        self.busy_since = 0.0  # when it last sent something, or was given work while it had none
        self.pending_slots: dict[int, bool] = {}  # slots it may fill, and whether with random actions
        self.pending_call: int | None = None  # the call it has not answered yet
        self._pending_question = b""  # that call
        self.stats: Mapping[str, Any] = Stats(0).summary()  # nothing so far
        self._earlier: Mapping[str, Any] = self.stats  # counts of the workers that were in its place before it
        self.clock_behind = float("inf")  # seconds that its clock is behind ours, as far as it is known
        self.statistics_heard = 0  # the version of those that it was told
        self.frames = self.rollouts = 0  # made so far
        self.made_at_answer = 0, 0  # the frames and rollouts it had made when it answered the last call
        self._earlier_at_answer: Mapping[str, Any] = self._earlier  # by then
        self.begun = False  # whether it knows its memory, and can be asked for rollouts
        self.joining: Generator[None, Any, None] | None = None  # it was started again: what it is told first
        self.failed_at = 0.0  # when the one whose place it takes was found to have failed
        self.failed_starts = 0  # replacements launched in a row that failed before they were ready
        self.state_after: Any = None  # its whole state after its last rollout, where it sends that
        self.dropped = False  # it failed, and the others go on without it

    @property
    def live_connection(self) -> WorkerConnection:
        """The connection of a worker that was launched."""
        if self.connection is None:
            raise RuntimeError(f"worker {self.index} was not launched")
        return self.connection

    @property
    def child(self) -> WorkerLiveness:
        """Its process, or what stands for it here."""
        return self.live_connection.child

    @property
    def busy(self) -> bool:
        """Whether something is to come from it."""
        waited_for = self.pending_slots or self.pending_call is not None or self.joining is not None
        return not self.dropped and bool(waited_for)

    def fill(self, slot: int, *, random: bool) -> None:
        """Give it a slot to fill."""
        if not self.busy:
            self.busy_since = time.monotonic()
        self.pending_slots[slot] = random
        if self.joining is None:  # else once it is there
            self.live_connection.fill(slot, random=random)

    def ask(self, question: bytes) -> None:
        """Send it a call, once it is there."""
        self._pending_question = question
        if self.joining is None:
            self.live_connection.call(question)

    def expect_answer(self, call: int, grace: float = 0.0) -> None:
        """Wait for its answer to a call; `grace`: seconds more than usual that it may take."""
        self.inbox.clear()
        if not self.busy:
            self.busy_since = time.monotonic()
        self.pending_call = call
        self.busy_since += grace

    def answered(self, answer: Any) -> None:
        """Keep its answer to the call it was asked last."""
        self.pending_call = None
        self.inbox.append(answer)
        self.made_at_answer, self._earlier_at_answer = (self.frames, self.rollouts), self._earlier

    @property
    def restarts(self) -> int:
        """How many have been in its place before it."""
        return 0 if self.job is None else self.job.restarts

    @property
    def can_resume(self) -> bool:
        """Whether another that takes its place goes on exactly where it was after its last rollout."""
        return self.begun and self.state_after is not None and self.state_after.get("why") is None

    def keep_counts(self) -> None:
        """Keep its counts: another takes its place, and counts from nothing."""
        self._earlier, self.clock_behind, self.statistics_heard = self.stats, float("inf"), -1

    def with_counts(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state it has answered with, in which those are counted too whose place it had taken by then."""
        resume = state.get("resume")
        if resume is None:
            return state
        return {**state, "resume": {**resume, "statistics": added(resume["statistics"], self._earlier_at_answer)}}

    def load_counts(self, state: Mapping[str, Any]) -> None:
        """It has loaded this state: what it has seen is what that says."""
        if (resume := state.get("resume")) is not None:
            self._earlier = Stats(0).summary()
            self.stats = Stats.of(resume["statistics"]).summary()

    def resend_pending(self) -> None:
        """The one that took its place is there: it is asked for what the other did not do."""
        self.joining, self.busy_since = None, time.monotonic()
        if self.pending_call is not None and self._pending_question:
            self.live_connection.call(self._pending_question)
        for slot, random in self.pending_slots.items():
            self.live_connection.fill(slot, random=random)

    def drop(self) -> None:
        """Nothing is expected of it any more."""
        self.dropped, self.joining, self.pending_call = True, None, None
        self.pending_slots.clear()
        self.inbox.clear()  # what it has answered is of no use without it

    def keep_stats(self, stats: Mapping[str, Any]) -> None:
        """Keep what it has counted so far."""
        self.stats = counted_on(self._earlier, stats)

    def discard_rollout(self, frames: int) -> None:
        """Forget a rollout nobody will see."""
        self.frames, self.rollouts = self.frames - frames, self.rollouts - 1

    @property
    def size(self) -> int:
        """How many frames a whole rollout has."""
        return self.info.layout.steps * self.info.layout.lanes

    @property
    def name(self) -> str:
        """Its number, as errors show it."""
        return f"{self.index}{self.child.label}"
