"""Lanes stepped by child processes: one per group, results in memory both sides see, one byte back."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reap._system.fork_server.client import enough_room
from reap._system.fork_server.server import MOST_FDS
from reap.core.slot import Row
from reap.envs.parallel.env_child import FDS, ORDER, PING
from reap.envs.parallel.lane_workers import LaneWorkers, Makers
from reap.envs.parallel.process_lanes import EnvProcess, ProcessLanes
from reap.envs.parallel.threaded_env_child import ANSWER, RAISED, ThreadedChild
from reap.errors import ReapError, UsageError
from reap.spec import Key, Leaf

MOST_HANDS = (MOST_FDS - FDS) // 2  # threads of one process: each has a pipe
_MOMENT = 100e-6  # seconds in which it does not pay to fall asleep


class ProcessWorkers(LaneWorkers):
    """Lanes in child processes."""

    _cells = True  # whether its lanes can bring texts and objects

    def __init__(self, makers: Makers, *, timeout: float | None = None, **options: Any) -> None:
        super().__init__()
        self.timeout = timeout
        with enough_room("processes for the lanes"):  # before there is something to close
            self._selector = selectors.DefaultSelector()
        try:
            self._lanes = ProcessLanes(makers, timeout=timeout, cells=self._cells, **options)
        except BaseException:
            self._selector.close()
            raise
        self.spec, self.traits, self.first = self._lanes.spec, self._lanes.traits, self._lanes.first
        self.bounds = [(remote.first, remote.last) for remote in self._lanes.remotes]
        self._remotes = list(self._lanes.remotes)
        for n, remote in enumerate(self._remotes):
            self._selector.register(remote.reply, selectors.EVENT_READ, n)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._lanes.expect(action)
        self.expecting = True

    def row(self) -> Row:
        return self._lanes.shared_row()

    def seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        self._lanes.seed(lanes, seeds)

    def _ring_for(self, group: int, what: int, lanes: Sequence[int] | None) -> None:
        self._lanes.order(self._remotes[group], what, lanes)

    def _ping(self, group: int, token: int) -> None:
        self._lanes.ping(self._remotes[group], token)

    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        return [(key.data, self._lanes.take(self._remotes[key.data])) for key, _ in self._selector.select(wait)]

    def _process_of(self, group: int) -> EnvProcess:
        return self._remotes[group]

    def _stack_of(self, group: int) -> str:
        return self._process_of(group).child.ask_stack()

    def _silence_of(self, group: int, timeout: float) -> ReapError:
        return self._lanes.silence_of(self._process_of(group))

    def close(self) -> None:
        self._selector.close()
        self._lanes.close()


class ThreadedProcessWorkers(ProcessWorkers):
    """Lanes in threads of child processes: every env is a group of its own (see threaded_env_child.py)."""

    _cells = False

    def __init__(self, makers: Makers, **options: Any) -> None:
        self._doors: list[int] = []  # of each group: where orders for it are written
        self._theirs: list[int] = []  # the other ends
        self._where: list[EnvProcess] = []  # of each group: its process
        self._first_of: list[int] = []  # of each process: its first group
        self._brisk = False  # whether the last answer came within a moment
        try:
            super().__init__(makers, host=ThreadedChild, wires=self._make_doors, **options)
            self._hang_up(self._theirs)
            bounds: list[tuple[int, int]] = []
            for remote, own in zip(self._remotes, makers):
                each, rest = divmod(remote.last - remote.first, len(own))
                if rest:
                    self.close()
                    raise UsageError("envs that share a process, each in a thread of its own, need as many lanes each")
                self._first_of.append(len(bounds))
                firsts = range(remote.first, remote.last, each)
                bounds += [(first, first + each) for first in firsts]
                self._where += [remote] * len(own)
        except BaseException:
            self._hang_up(self._theirs)
            self._hang_up(self._doors)
            raise
        self.bounds = bounds

    def _make_doors(self, process: int, envs: int) -> Sequence[int]:
        """A pipe for each env of a process, both ends: the child itself must be able to send its threads home."""
        made: list[int] = []
        for _ in range(envs):
            theirs, ours = os.pipe()
            self._theirs.append(theirs)  # each at once: the next may be one too many
            self._doors.append(ours)
            made += theirs, ours
        return made

    @staticmethod
    def _hang_up(ends: list[int]) -> None:
        while ends:
            os.close(ends.pop())

    def ring(self, groups: Sequence[int], what: int, lanes: Sequence[int] | None = None) -> None:
        """Straight to the thread: nobody in its process hands the order on."""
        now = time.monotonic()
        if now > self._look_at:
            self._log_silence()
        self._away.update(dict.fromkeys(groups, now))
        if lanes is not None:
            for group in groups:
                self._lanes.choose(*self.bounds[group], lanes)
        order = ORDER.pack(what, self._lanes.place(what), 0)
        for group in groups:
            self._order(group, order)

    def _order(self, group: int, order: bytes) -> None:
        try:
            os.write(self._doors[group], order)
        except BrokenPipeError:
            raise self._lanes.gone(self._where[group]) from None

    def _ping(self, group: int, token: int) -> None:
        self._order(group, ORDER.pack(PING, 0, token))

    def _written(self, wait: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Processes that have written something. Where answers come thick and fast, nobody falls asleep in between.

        A core that slept is slow at first: a small policy took twice as long after it. Other threads than the main
        one sleep, as the main one then has work, and would share the interpreter with somebody who only looks.
        """
        if wait == 0:
            return self._selector.select(0)
        ready: list[tuple[selectors.SelectorKey, int]] = []
        began = time.monotonic()
        if self._brisk and threading.current_thread() is threading.main_thread():
            until = began + (_MOMENT if wait is None else min(wait, _MOMENT))
            while not ready and time.monotonic() < until:
                ready = self._selector.select(0)
        if not ready:
            ready = self._selector.select(wait)
        self._brisk = time.monotonic() - began < _MOMENT
        return ready

    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for key, _ in self._written(wait):
            data = os.read(key.fd, ANSWER.size * len(self._where))
            whole = list(ANSWER.iter_unpack(data[: len(data) // ANSWER.size * ANSWER.size]))
            if not whole or any(number == RAISED for number, _ in whole):
                raise self._lanes.gone(self._remotes[key.data])
            first = self._first_of[key.data]
            found += [(first + number, token) for number, token in whole]
        return found

    def _process_of(self, group: int) -> EnvProcess:
        return self._where[group]

    def close(self) -> None:
        super().close()
        self._hang_up(self._doors)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._hang_up(self._doors)
