"""A child process whose envs each have a thread: for envs that wait, away from the policy's interpreter.

    parent ──► the thread's own pipe ──► it steps on its lanes of the shared row ──► its number through the reply pipe

Orders go straight to the thread, answers straight back: a frame costs two wake-ups, one for the order and one for what
the env waits for. The main thread only listens for messages, when memory or actions change.
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

from reap.children import Raised, send
from reap.core.slot import Layout, Row
from reap.envs.lane_host import BEGIN, BELL, DRAW, END, FDS, SOME, STEP, Host
from reap.envs.thread_crew import ThreadCrew
from reap.errors import ReapError
from reap.spec import Key, Leaf

ANSWER = struct.Struct("ii")  # the number of a group, counted within its process; and a token, if it was asked for one
RAISED = -1


class Door:
    """A pipe in which a thread finds its orders, from the parent; and, when all end, from here."""

    def __init__(self, host: HandHost, number: int, theirs: int, ours: int) -> None:
        self._host, self._number, self._from, self._to = host, number, theirs, ours

    def get(self) -> tuple[int, Sequence[int] | None, int] | None:
        """The next order; None: to end."""
        what, place, token = BELL.unpack(os.read(self._from, BELL.size))
        return None if what == END else self._host.order(self._number, what, place, token)

    def put(self, order: None) -> None:
        """Send the thread home."""
        os.write(self._to, BELL.pack(END, 0, 0))


class HandHost(Host):
    """Lanes of a child, in threads."""

    def __init__(self, connection: Connection, fds: Sequence[int], *, makers: Any, limit: int | None) -> None:
        ends = zip(fds[FDS::2], fds[FDS + 1 :: 2])
        doors = [Door(self, number, *both) for number, both in enumerate(ends)]
        crew = self._crew = ThreadCrew([[one] for one in makers], limit=limit, orders=doors.__getitem__)
        super().__init__(crew.spec, crew.traits, connection, fds)
        self._rows: dict[int, list[Row]] = {}
        self._pipe = _Answers(connection, self._reply, [first for first, _ in crew.bounds])

    def order(self, number: int, what: int, place: int, token: int) -> tuple[int, Sequence[int] | None, int]:
        """What a thread is to do, asked by itself."""
        hand, lanes = self._crew.hands[number], None
        if what in (SOME, BEGIN):
            lanes = (hand.first + np.flatnonzero(self._some[hand.first : hand.last])).tolist()
        if what in (STEP, SOME, DRAW):
            hand.row = self._rows[place][number]
        return what, lanes, token

    def do_begin(self, first: int, lanes: int) -> None:
        super().do_begin(first, lanes)
        for hand in self._crew.hands:
            hand.into = [array[hand.first : hand.last] for array in self._first]
            hand.seeds = self._seeds[hand.first : hand.last]
            hand.answers = self._pipe

    def do_slot(self, place: int, layout: Layout, start: int, end: int) -> None:
        hands = self._crew.hands
        self._rows[place] = [
            self._rows_of(layout, start, end, hand.first, hand.last, hand.env.spec)[0] for hand in hands
        ]

    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        for hand in self._crew.hands:
            hand.env.expect(action)

    def close(self) -> None:
        self._crew.close()


class _Answers:
    """Where threads put their answers: a number in the reply pipe, an error in the connection before it."""

    def __init__(self, connection: Connection, reply: int, firsts: Sequence[int]) -> None:
        self._connection, self._reply, self._firsts = connection, reply, firsts
        self._lock = threading.Lock()

    def put(self, answer: tuple[int, Exception | None, int]) -> None:
        """Called by the threads."""
        number, error, token = answer
        with contextlib.suppress(OSError):  # nobody is there any more, and so will we not be
            self._put(number, error, token)

    def _put(self, number: int, error: Exception | None, token: int) -> None:
        if error is None:
            os.write(self._reply, ANSWER.pack(number, token))
            return
        if isinstance(error, ReapError) and error.lane is not None:
            error.lane += self._firsts[number]
        with self._lock:
            send(self._connection, Raised.of(error, "the env"))
            os.write(self._reply, ANSWER.pack(RAISED, 0))
