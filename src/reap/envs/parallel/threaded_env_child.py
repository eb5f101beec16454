"""A child process with a thread for each env: for envs that wait, away from the policy's interpreter.

    parent ──► the thread's own pipe ──► it steps its lanes of the shared row ──► its number through the reply pipe

Orders go straight to the thread and answers straight back: a frame costs two wake-ups, one for the order and one for
what the env waits for. The main thread only waits for calls, which come when memory or actions change.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from reap._system.messages.framed import send
from reap._system.messages.remote_errors import Raised
from reap.core.slot import Layout, Row
from reap.envs.parallel.env_child import DRAW, END, FDS, ORDER, RESET, STEP, STEP_SOME, EnvChild, Rebuilt
from reap.envs.parallel.thread_workers import ThreadWorkers
from reap.errors import ReapError
from reap.spec import Key, Leaf

ANSWER = struct.Struct("ii")  # the number of a group within its process; the token of a PING, or 0
RAISED = -1
REBUILT_IN_PLACE = -1  # in place of a token: a message says which envs raised and were rebuilt


class OrderPipe:
    """The pipe from which a thread reads its orders; this process writes to it only to end the thread."""

    def __init__(self, child: ThreadedChild, number: int, theirs: int, ours: int) -> None:
        self._child, self._number, self._from, self._to = child, number, theirs, ours

    def get(self) -> tuple[int, Sequence[int] | None, int] | None:
        """Wait for the next order; None ends the thread."""
        what, slot_number, token = ORDER.unpack(os.read(self._from, ORDER.size))
        return None if what == END else self._child.order(self._number, what, slot_number, token)

    def put(self, order: None) -> None:
        """Tell the thread to end."""
        os.write(self._to, ORDER.pack(END, 0, 0))


class ThreadedChild(EnvChild):
    """The lanes of a child process, with a thread for each env."""

    def __init__(
        self, connection: Connection, fds: Sequence[int], *, makers: Any, limit: int | None, rebuild: bool = False
    ) -> None:
        ends = zip(fds[FDS::2], fds[FDS + 1 :: 2])
        pipes = [OrderPipe(self, number, *both) for number, both in enumerate(ends)]
        lane_workers = self._lane_workers = ThreadWorkers(
            [[one] for one in makers], limit=limit, orders=pipes.__getitem__, rebuild=rebuild
        )
        super().__init__(lane_workers.spec, lane_workers.traits, connection, fds)
        self._rows: dict[int, list[Row]] = {}
        self._pipe = _Answers(connection, self._reply, [first for first, _ in lane_workers.bounds])

    def order(
        self, number: int, what: int, slot_number: int, token: int
    ) -> tuple[int, Sequence[int] | None, int] | None:
        """Return an order as the thread that has read it needs it, and set that thread's row; None ends the thread."""
        threads = self._lane_workers.threads
        if not threads:
            return None
        thread, lanes = threads[number], None
        if what in (STEP_SOME, RESET):
            lanes = (thread.first + np.flatnonzero(self._some[thread.first : thread.last])).tolist()
        if what in (STEP, STEP_SOME, DRAW):
            thread.row = self._rows[slot_number][number]
        return what, lanes, token

    def do_number_lanes(self, first: int, lanes: int) -> None:
        super().do_number_lanes(first, lanes)
        for thread in self._lane_workers.threads:
            thread.into = [array[thread.first : thread.last] for array in self._first]
            thread.seeds = self._seeds[thread.first : thread.last]
            thread.answers = self._pipe
            if thread.rebuilt is not None:
                thread.rebuilt.first = thread.first

    def do_slot(self, slot_number: int, layout: Layout, start: int, end: int) -> None:
        threads = self._lane_workers.threads
        self._rows[slot_number] = [
            self._rows_of(layout, start, end, thread.first, thread.last, thread.env.spec)[0] for thread in threads
        ]

    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        for thread in self._lane_workers.threads:
            thread.env.expect(action)

    def close(self) -> None:
        self._lane_workers.close()


class _Answers:
    """Sends the answers of threads: a number through the reply pipe, after any error through the connection."""

    def __init__(self, connection: Connection, reply: int, firsts: Sequence[int]) -> None:
        self._connection, self._reply, self._firsts = connection, reply, firsts
        self._lock = threading.Lock()

    def put(self, answer: tuple[int, Exception | Rebuilt | None, int]) -> None:
        """Send an answer to the parent; called by the threads."""
        number, error, token = answer
        with contextlib.suppress(OSError):  # the parent has gone, and this process ends soon
            self._put(number, error, token)

    def _put(self, number: int, error: Exception | Rebuilt | None, token: int) -> None:
        if error is None:
            os.write(self._reply, ANSWER.pack(number, token))
            return
        first = self._firsts[number]
        if isinstance(error, Rebuilt):
            with self._lock:
                send(self._connection, Rebuilt(error.told, [first + lane for lane in error.cut]))
                os.write(self._reply, ANSWER.pack(number, REBUILT_IN_PLACE))
            return
        if isinstance(error, ReapError) and error.lane is not None:
            error.lane += first
        with self._lock:
            send(self._connection, Raised.of(error, "the env"))
            os.write(self._reply, ANSWER.pack(RAISED, 0))
