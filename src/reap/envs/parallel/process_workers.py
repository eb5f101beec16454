"""Lanes stepped by child processes: a process for each group, or for several groups with a thread each.

Results are written into memory that both sides see; only a few bytes are sent back.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reap._system.conversation import Answer
from reap._system.fork_server.client import limits_as_worker_died
from reap._system.fork_server.server import MOST_FDS
from reap._system.interrupts import Interrupts
from reap._system.messages.remote_errors import Raised
from reap.core.slot import Row
from reap.envs.parallel.env_child import FDS, ORDER, PING, RESET
from reap.envs.parallel.env_process import EnvProcess
from reap.envs.parallel.lane_workers import LaneWorkers, Makers
from reap.envs.parallel.process_lanes import ProcessLanes
from reap.envs.parallel.threaded_env_child import ANSWER, RAISED, REBUILT_IN_PLACE, ThreadedChild
from reap.errors import ReapError, UsageError
from reap.failures import FailurePolicy
from reap.spec import Key, Leaf

MOST_THREADS = (MOST_FDS - FDS) // 2  # threads of one process: each has a pipe
_MOMENT = 100e-6  # seconds: for a shorter wait than this it does not pay to sleep


class ProcessWorkers(LaneWorkers):
    """Groups of lanes in child processes.

    A newcomer, which replaces a failed process, answers through its connection until it knows what the old one knew:

        started ──► sends its spec ──► is sent memory and actions ──► answers ──► resets its lanes ──► like the others
    """

    _objects = True  # whether observations may be text or objects

    def __init__(
        self,
        makers: Makers,
        *,
        timeout: float | None = None,
        on_failure: FailurePolicy | None = None,
        **options: Any,
    ) -> None:
        super().__init__(on_failure)
        self.timeout = timeout
        with limits_as_worker_died("processes for the lanes"):  # first: if it fails, nothing has to be closed
            self._selector = selectors.DefaultSelector()
        try:
            self._lanes = ProcessLanes(makers, timeout=timeout, objects=self._objects, budget=self.budget, **options)
        except BaseException:
            self._selector.close()
            raise
        self.spec, self.traits, self.first = self._lanes.spec, self._lanes.traits, self._lanes.first
        self.bounds = [(process.first, process.last) for process in self._lanes.processes]
        self._processes = list(self._lanes.processes)
        self._last_calls: dict[int, int] = {}  # of newcomers: the number of the last call of `introduce`
        for n, process in enumerate(self._processes):
            self._selector.register(process.reply, selectors.EVENT_READ, n)
            self._selector.register(process.child.socket.fileno(), selectors.EVENT_READ, n)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        if self._lanes.already_expects(action):
            return
        if self._restarting:
            self.settle()
        self._lanes.expect(action)
        self._lanes.shared_row()  # made now, while no process is under way: it calls all of them
        self.expecting = True
        for process, error in self._lanes.take_lost().items():
            self._handle_failure(process.number, error)

    def row(self) -> Row:
        return self._lanes.shared_row()

    def _seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        self._lanes.seed(lanes, seeds)

    def _order_group(self, group: int, what: int, lanes: Sequence[int] | None) -> None:
        self._lanes.order(self._processes[group], what, lanes)

    def _ping(self, group: int, token: int) -> None:
        self._lanes.ping(self._processes[group], token)

    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for key, _ in self._selector.select(wait):
            number = key.data
            try:
                if number < 0:
                    self._receive_from_newcomer(~number)
                elif key.fd != self._processes[number].reply:
                    self._processes[number].receive()  # a message too large for the socket; its byte follows
                else:
                    found.append((number, self._lanes.read_answer(self._processes[number])))
                    if self._lanes.rebuilt:
                        self.cut.update(self._lanes.rebuilt)
                        self._lanes.rebuilt.clear()
            except ReapError as error:
                self._handle_failure(number if number >= 0 else ~number, error)
                break  # further keys may be of the same process, whose descriptors are closed now
        return found

    # ---- failures -------------------------------------------------------------------------------------------------

    def _retire(self, unit: int) -> None:
        process = self._processes[unit]
        if not process.ended:
            for fd in (process.reply, process.child.socket.fileno()):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)
        self._last_calls.pop(unit, None)
        self._lanes.retire(process)

    def _start_again(self, unit: int) -> None:
        process = self._processes[unit] = self._lanes.start_again(self._processes[unit])
        events = selectors.EVENT_READ | selectors.EVENT_WRITE  # its target may not fit into the socket at once
        self._selector.register(process.child.socket.fileno(), events, ~unit)

    def _receive_from_newcomer(self, unit: int) -> None:
        """Continue the introduction of a newcomer with the messages that have come from it."""
        process = self._processes[unit]
        line = process.child.socket
        with Interrupts().held():  # Ctrl-C must not come between a message and the reply to it
            if line.flush():
                self._selector.modify(line.fileno(), selectors.EVENT_READ, ~unit)
            gone = process.conversation.receive()
            while process.conversation.inbox:
                message = process.conversation.inbox.popleft()
                value = message.value if isinstance(message, Answer) else message
                if isinstance(value, Raised):
                    raise process.named(value.unpack())
                if not isinstance(message, Answer):
                    self._last_calls[unit] = self._lanes.introduce(process, value[0])
                    self._pending.update(dict.fromkeys(self._groups_of(unit), time.monotonic()))
                elif message.call == self._last_calls[unit]:
                    self._begin(unit)
                    return
            if gone:
                raise process.death()

    def _begin(self, unit: int) -> None:
        """Reset the lanes of a newcomer whose introduction is complete, and listen to it as to the others."""
        process = self._processes[unit]
        self._selector.modify(process.child.socket.fileno(), selectors.EVENT_READ, unit)
        self._selector.register(process.reply, selectors.EVENT_READ, unit)
        for group in self._groups_of(unit):
            self._order_group(group, RESET, range(*self.bounds[group]))

    # ---- groups and processes -------------------------------------------------------------------------------------

    def _process_of(self, group: int) -> EnvProcess:
        return self._processes[group]

    def _stack_of(self, group: int) -> str:
        return self._process_of(group).child.ask_stack()

    def _silence_of(self, group: int, timeout: float) -> ReapError:
        return self._process_of(group).silent_error()

    def close(self) -> None:
        self._selector.close()
        self._lanes.close()


class ThreadedProcessWorkers(ProcessWorkers):
    """Groups of lanes in threads of child processes: every env is a group (see threaded_env_child.py)."""

    _objects = False

    def __init__(self, makers: Makers, **options: Any) -> None:
        self._order_fds: list[int] = []  # by group: the write end of its order pipe
        self._write_ends: dict[int, list[int]] = {}  # the same, by process
        self._read_ends: list[int] = []  # the read ends, until the child has them
        self._first_of: list[int] = []  # by process: its first group
        self._unit: list[int] = []  # by group: the number of its process
        self._answers_fast = False  # whether the last answer came within `_MOMENT`
        try:
            super().__init__(makers, child=ThreadedChild, more_fds=self._make_order_pipes, **options)
            self._close(self._read_ends)
            bounds: list[tuple[int, int]] = []
            for process, own in zip(self._processes, makers):
                each, rest = divmod(process.last - process.first, len(own))
                if rest:
                    self.close()
                    raise UsageError(
                        "envs that share a process, each in a thread of its own, need the same number of lanes"
                    )
                self._first_of.append(len(bounds))
                firsts = range(process.first, process.last, each)
                bounds += [(first, first + each) for first in firsts]
                self._unit += [process.number] * len(own)
                self._order_fds += self._write_ends[process.number]
        except BaseException:
            self._close(self._read_ends)
            self._close_pipes()
            raise
        self.bounds = bounds

    def _make_order_pipes(self, unit: int, envs: int) -> Sequence[int]:
        """Make a pipe for each env of a process and return both ends: the child must be able to end its threads."""
        made: list[int] = []
        own = self._write_ends.setdefault(unit, [])
        self._close(own)  # those of the process before it
        for _ in range(envs):
            theirs, ours = os.pipe()
            self._read_ends.append(theirs)  # noted at once: the next pipe may be one too many
            own.append(ours)
            made += theirs, ours
        return made

    @staticmethod
    def _close(fds: list[int]) -> None:
        with Interrupts().held():  # Ctrl-C must not come between taking one from the list and closing it
            while fds:
                os.close(fds.pop())

    def _close_pipes(self) -> None:
        for fds in self._write_ends.values():
            self._close(fds)

    def _unit_of(self, group: int) -> int:
        return self._unit[group]

    def _groups_of(self, unit: int) -> Sequence[int]:
        first = self._first_of[unit]
        return range(first, first + self._unit.count(unit))

    def _retire(self, unit: int) -> None:
        super()._retire(unit)
        self._close(self._write_ends[unit])
        for group in self._groups_of(unit):
            self._order_fds[group] = -1

    def _start_again(self, unit: int) -> None:
        try:
            super()._start_again(unit)
        finally:
            self._close(self._read_ends)
        first = self._first_of[unit]
        self._order_fds[first : first + len(self._write_ends[unit])] = self._write_ends[unit]

    def order(self, groups: Sequence[int], what: int, lanes: Sequence[int] | None = None) -> None:
        """Send orders straight to the groups' threads, without their process's main thread in between."""
        now = time.monotonic()
        if now > self._next_check:
            self._log_silence()
        if self.cut or self.dropped or self._restarting:
            groups = self._can_take_orders(groups)
        self._pending.update(dict.fromkeys(groups, now))
        if lanes is not None:
            for group in groups:
                self._lanes.choose(*self.bounds[group], lanes)
        order = ORDER.pack(what, self._lanes.slot_number(what), 0)
        for group in groups:
            if self._restarting and not self._can_take_orders([group]):
                continue  # lost just now, with another group of its process: the newcomer takes no orders yet
            try:
                self._write(group, order)
            except ReapError as error:
                self._handle_failure(self._unit[group], error)

    def _order_group(self, group: int, what: int, lanes: Sequence[int] | None) -> None:
        self._lanes.choose(*self.bounds[group], lanes)
        self._write(group, ORDER.pack(what, self._lanes.slot_number(what), 0))

    def _write(self, group: int, order: bytes) -> None:
        if (fd := self._order_fds[group]) < 0:
            return  # lost just now, with another group of its process
        try:
            os.write(fd, order)
        except BrokenPipeError:
            raise self._process_of(group).death() from None

    def _ping(self, group: int, token: int) -> None:
        self._write(group, ORDER.pack(PING, 0, token))

    def _written(self, wait: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for processes that have written something; poll for a moment first while answers come fast.

        A core that slept is slow at first: a small policy took twice as long after it. Only the main thread polls: if
        another thread calls this, the main one has work to do and would have to share the interpreter with a poll.
        """
        if wait == 0:
            return self._selector.select(0)
        ready: list[tuple[selectors.SelectorKey, int]] = []
        began = time.monotonic()
        if self._answers_fast and threading.current_thread() is threading.main_thread():
            until = began + (_MOMENT if wait is None else min(wait, _MOMENT))
            while not ready and time.monotonic() < until:
                ready = self._selector.select(0)
        if not ready:
            ready = self._selector.select(wait)
        self._answers_fast = time.monotonic() - began < _MOMENT
        return ready

    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for key, _ in self._written(wait):
            unit = key.data
            try:
                if unit < 0:
                    unit = ~unit
                    self._receive_from_newcomer(unit)
                    continue
                if key.fd != self._processes[unit].reply:
                    self._processes[unit].receive()  # a message too large for the socket; its byte follows
                    continue
                data = os.read(key.fd, ANSWER.size * len(self._unit))
                whole = list(ANSWER.iter_unpack(data[: len(data) // ANSWER.size * ANSWER.size]))
                if not whole or any(number == RAISED for number, _ in whole):
                    raise self._processes[unit].death()
                for n, (number, token) in enumerate(whole):
                    if token == REBUILT_IN_PLACE:
                        self.cut.update(self._lanes.count_rebuilt(self._processes[unit]))
                        whole[n] = number, 0
            except ReapError as error:
                self._handle_failure(unit, error)
                break  # further keys may be of the same process, whose descriptors are closed now
            first = self._first_of[unit]
            found += [(first + number, token) for number, token in whole]
        return found

    def _process_of(self, group: int) -> EnvProcess:
        return self._processes[self._unit[group]]

    def close(self) -> None:
        super().close()
        self._close_pipes()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._close_pipes()
