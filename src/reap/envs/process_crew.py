"""A crew of child processes: one per group, results in memory both sides see, one byte back."""

from __future__ import annotations

import selectors
from collections.abc import Mapping, Sequence
from typing import Any

from reap.core.slot import Row
from reap.envs.crew import Crew, Makers
from reap.envs.process_lanes import ProcessLanes
from reap.errors import ReapError
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
        self.gather()
        everyone = range(self.spec.lanes)
        self._lanes.begin(everyone, None if seeds is None else dict(zip(everyone, seeds)))

    def _ring_for(self, group: int, what: int, lanes: Sequence[int] | None) -> None:
        self._lanes.order(self._remotes[group], what, lanes)

    def _answers(self, wait: float | None) -> list[int]:
        found: list[int] = [key.data for key, _ in self._selector.select(wait)]
        for group in found:
            self._lanes.take(self._remotes[group])
        return found

    def _silence_of(self, group: int, timeout: float) -> ReapError:
        return self._lanes.silence_of(self._remotes[group])

    def close(self) -> None:
        self._selector.close()
        self._lanes.close()
