"""WorkerHandle: one worker as the parent sees it: its job, its pending work, its counts and its connection."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

from reap.backends.base import WorkerConnection, WorkerLiveness
from reap.backends.worker_server import Job, WorkerInfo
from reap.core.measuring.stats import Stats, added, plus_earlier
from reap.core.slot import Slot


def is_resumable(state_after: Mapping[str, Any] | None) -> bool:
    """Return whether a worker's state after a rollout, if there is one, has its open episodes too."""
    return state_after is not None and state_after["resume"].get("why") is None


class WorkerHandle:
    """One worker as the parent sees it. The handle is kept when the worker is restarted."""

    info: WorkerInfo  # set when the worker has reported it
    connection: WorkerConnection | None = None  # None until it is launched

    def __init__(self, job: Job) -> None:
        self.index = job.index
        self.job: Job | None = job  # what it is started from; kept only if it may be restarted
        # Where its rollouts lie, by number; empty if it writes to a common slot in shared memory by itself.
        self.slots: dict[int, Slot] = {}
        self.lent: set[int] = set()  # numbers of those slots whose tensors the consumer still holds
        self.inbox: deque[Any] = deque()  # the answer to its last call, once it has arrived
        # When it last sent something, or received work while idle; later than now while it has time to start.
        self.busy_since = 0.0
        self.pending_slots: dict[int, bool] = {}  # slots it has been told to fill, and whether with random actions
        # The number of the call it has not answered yet; `UNREQUESTED`: it has not sent its `WorkerInfo` yet.
        self.pending_call: int | None = None
        self._pending_call_data = b""  # that call, serialized
        self.stats: Mapping[str, Any] = Stats(0).summary()  # all zero so far
        self._predecessors: Mapping[str, Any] = self.stats  # counts of the workers this one has replaced
        self.clock_behind = float("inf")  # seconds by which its clock is behind ours: the best estimate
        self.statistics_sent = 0  # the version of the statistics it was last sent
        self.frames = self.rollouts = 0  # collected so far
        self.made_at_answer = 0, 0  # its frames and rollouts when it answered the last call
        self._predecessors_at_answer: Mapping[str, Any] = self._predecessors  # `_predecessors` at that time
        self.begun = False  # whether it has mapped its memory and can collect rollouts
        self.joining: Generator[None, Any, None] | None = None  # while it restarts: the calls that update it
        self.failed_at = 0.0  # when the failure of its predecessor was noticed
        self.failed_starts = 0  # replacements launched since it was last ready
        self.state_after: Any = None  # its whole state after its last rollout, if it sends that
        self.dropped = False  # it failed, and the others continue without it

    @property
    def live_connection(self) -> WorkerConnection:
        """The connection of a worker that was launched."""
        if self.connection is None:
            raise RuntimeError(f"worker {self.index} was not launched")
        return self.connection

    @property
    def child(self) -> WorkerLiveness:
        """Its process, or the object that represents it here."""
        return self.live_connection.child

    @property
    def busy(self) -> bool:
        """Whether the parent expects something from it."""
        waited_for = self.pending_slots or self.pending_call is not None or self.joining is not None
        return not self.dropped and bool(waited_for)

    def fill(self, slot: int, *, random: bool) -> None:
        """Tell it to fill a slot."""
        if not self.busy:
            self.busy_since = time.monotonic()
        self.pending_slots[slot] = random
        if self.joining is None:  # else `resend_pending` sends it
            self.live_connection.fill(slot, random=random)

    def call(self, data: bytes) -> None:
        """Send it a call; if it is being restarted, `resend_pending` sends the call later."""
        self._pending_call_data = data
        if self.joining is None:
            self.live_connection.call(data)

    def expect_answer(self, call: int, grace: float = 0.0) -> None:
        """Note that it owes an answer to this call; `grace`: extra seconds it may take."""
        self.inbox.clear()
        if not self.busy:
            self.busy_since = time.monotonic()
        self.pending_call = call
        self.busy_since += grace

    def answered(self, answer: Any) -> None:
        """Store its answer to its last call."""
        self.pending_call = None
        self.inbox.append(answer)
        self.made_at_answer, self._predecessors_at_answer = (self.frames, self.rollouts), self._predecessors

    @property
    def restarts(self) -> int:
        """How many workers this one has replaced, one after another."""
        return 0 if self.job is None else self.job.restarts

    @property
    def can_resume(self) -> bool:
        """Whether a replacement can continue exactly where this worker was after its last rollout."""
        return self.begun and is_resumable(self.state_after)

    def keep_counts(self) -> None:
        """Keep the counts of a worker that is being replaced, because its replacement counts from zero."""
        self._predecessors, self.clock_behind = self.stats, float("inf")

    def with_counts(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state it has answered with, with the counts of the workers it had replaced by then added."""
        resume = state.get("resume")
        if resume is None:
            return state
        return {**state, "resume": {**resume, "statistics": added(resume["statistics"], self._predecessors_at_answer)}}

    def load_counts(self, state: Mapping[str, Any]) -> None:
        """Set its counts to those in the state it has loaded."""
        if (resume := state.get("resume")) is not None:
            self._predecessors = Stats(0).summary()
            self.stats = Stats.of(resume["statistics"]).summary()

    def resend_pending(self) -> None:
        """Send the replacement, which is ready now, the call and the slots that its predecessor left undone."""
        self.joining, self.busy_since = None, time.monotonic()
        if self.pending_call is not None and self._pending_call_data:
            self.live_connection.call(self._pending_call_data)
        for slot, random in self.pending_slots.items():
            self.live_connection.fill(slot, random=random)

    def drop(self) -> None:
        """Mark it as dropped and expect nothing more from it."""
        self.dropped, self.joining, self.pending_call = True, None, None
        self.pending_slots.clear()
        self.inbox.clear()  # its answers are of no use without the worker

    def keep_stats(self, stats: Mapping[str, Any]) -> None:
        """Store its counts so far, added to those of the workers it has replaced."""
        self.stats = plus_earlier(self._predecessors, stats)

    def discard_rollout(self, frames: int) -> None:
        """Subtract a rollout that will not be delivered."""
        self.frames, self.rollouts = self.frames - frames, self.rollouts - 1

    @property
    def size(self) -> int:
        """How many frames a full rollout has."""
        return self.info.layout.frames

    @property
    def name(self) -> str:
        """Its number and process, as error messages show them."""
        return f"{self.index}{self.child.label}"
