"""A crew of child processes: one per group, results in memory both sides see, one byte back."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reap.core.slot import Row
from reap.envs.crew import Crew, Makers
from reap.envs.hand_host import ANSWER, RAISED, serve_hands
from reap.envs.lane_host import BELL, PING
from reap.envs.process_lanes import ProcessLanes, Remote
from reap.errors import ReapError, UsageError
from reap.spec import Key, Leaf


class ProcessCrew(Crew):
    """Lanes in child processes."""

    def __init__(self, makers: Makers, *, timeout: float | None = None, **options: Any) -> None:
        super().__init__()
        self.timeout = timeout
        self._lanes = ProcessLanes(makers, timeout=timeout, **options)
        self.spec, self.first = self._lanes.spec, self._lanes.first
        self.bounds = [(remote.first, remote.last) for remote in self._lanes.remotes]
        self._remotes = list(self._lanes.remotes)
        self._selector = selectors.DefaultSelector()
        for n, remote in enumerate(self._remotes):
            self._selector.register(remote.reply, selectors.EVENT_READ, n)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._lanes.expect(action)

    def row(self) -> Row:
        return self._lanes.shared_row()

    def begin(self, seeds: Sequence[int] | None) -> None:
        self.settle()
        everyone = range(self.spec.lanes)
        self._lanes.begin(everyone, None if seeds is None else dict(zip(everyone, seeds)))

    def _ring_for(self, group: int, what: int, lanes: Sequence[int] | None) -> None:
        self._lanes.order(self._remotes[group], what, lanes)

    def _ping(self, group: int, token: int) -> None:
        self._lanes.ping(self._remotes[group], token)

    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        return [(key.data, self._lanes.take(self._remotes[key.data])) for key, _ in self._selector.select(wait)]

    def _silence_of(self, group: int, timeout: float) -> ReapError:
        return self._lanes.silence_of(self._remotes[group])

    def close(self) -> None:
        self._selector.close()
        self._lanes.close()


class HandsCrew(ProcessCrew):
    """Lanes in threads of child processes: every env is a group of its own (see hand_host.py)."""

    def __init__(self, makers: Makers, **options: Any) -> None:
        super().__init__(makers, host=serve_hands, **options)
        self._where: list[tuple[Remote, int, int]] = []  # of each group: its process, its number there, which process
        self._first_of: list[int] = []  # of each process: its first group
        bounds: list[tuple[int, int]] = []
        for n, (remote, own) in enumerate(zip(self._remotes, makers)):
            each, rest = divmod(remote.last - remote.first, len(own))
            if rest:
                self.close()
                raise UsageError("envs that share a process, each in a thread of its own, need as many lanes each")
            self._first_of.append(len(bounds))
            for number in range(len(own)):
                first = remote.first + number * each
                bounds.append((first, first + each))
                self._where.append((remote, number, n))
        self.bounds = bounds

    def ring(self, groups: Sequence[int], what: int, lanes: Sequence[int] | None = None) -> None:
        """One message to each process, however many of its groups are meant."""
        self._away.update(dict.fromkeys(groups, time.monotonic()))
        place = self._lanes.place(what)
        orders: dict[int, list[bytes]] = {}
        for group in groups:
            _, number, process = self._where[group]
            if lanes is not None:
                self._lanes.choose(*self.bounds[group], lanes)
            orders.setdefault(process, []).append(BELL.pack(what, place, number))
        for process, data in orders.items():
            self._lanes.write(self._remotes[process], b"".join(data))

    def _ping(self, group: int, token: int) -> None:
        remote, number, _ = self._where[group]
        self._lanes.write(remote, BELL.pack(PING, token, number))

    def _answers(self, wait: float | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for key, _ in self._selector.select(wait):
            data = os.read(key.fd, ANSWER.size * len(self._where))
            whole = list(ANSWER.iter_unpack(data[: len(data) // ANSWER.size * ANSWER.size]))
            if not whole or any(number == RAISED for number, _ in whole):
                raise self._lanes.gone(self._remotes[key.data])
            found += [(self._first_of[key.data] + number, token) for number, token in whole]
        return found

    def _silence_of(self, group: int, timeout: float) -> ReapError:
        return self._lanes.silence_of(self._where[group][0])
