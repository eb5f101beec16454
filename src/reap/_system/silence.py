"""Silence: how long a worker that has work may send nothing, and what is done about it then.

    timeout=30     an error after 30 seconds, with the silent worker's stack; the worker is ended
    timeout=None   a line in the log after `LOGGED_AFTER` seconds, with its stack; the worker is left alone

If several are silent, the one that has been so for longest is reported: the others may be waiting for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from reap._system.fork_server.orphans import state_of
from reap._system.worker_log import record
from reap.errors import WorkerSilent

LOGGED_AFTER = 60.0  # seconds of silence until a line in the log, if no timeout was given


class _Worker(Protocol):
    index: int

    @property
    def child(self) -> Any:
        """Its process, here or elsewhere, which has `silence` and `ask_stack`."""

    @property
    def name(self) -> str: ...


W = TypeVar("W", bound=_Worker)


class Silence:
    """Watches workers, each with the time since which it has been silent, or None if it has nothing to do."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.watched = True  # False: silence of any length is ignored
        self._logged: dict[int, float] = {}  # worker → the beginning of its silence that is logged already

    @property
    def limit(self) -> float:
        """Seconds of silence after which something is done."""
        return LOGGED_AFTER if self.timeout is None else self.timeout

    def patience(self, workers: Iterable[tuple[_Worker, float | None]]) -> float | None:
        """Return the seconds until `check` may have something to do; None: never, as things are."""
        if not self.watched:
            return None
        begun = [s for worker, s in workers if s is not None and self._logged.get(worker.index) != s]
        if begun:
            return max(0.0, min(begun) + self.limit - time.monotonic())
        return self.timeout

    def check(self, workers: Iterable[tuple[W, float | None]]) -> tuple[W, WorkerSilent] | None:
        """Return a worker that has been silent for `timeout` seconds, and the error for it; with no timeout, log it."""
        if not self.watched:
            return None
        now = time.monotonic()
        silent = [(s, worker) for worker, s in workers if s is not None and now - s >= self.limit]
        for since, worker in sorted(silent, key=lambda one: one[0]):
            if self.timeout is not None:
                return worker, worker.child.silence(now - since, self.timeout)
            if self._logged.get(worker.index) != since:
                self._logged[worker.index] = since
                log(f"worker {worker.name}", now - since, worker.child.ask_stack())
        return None


def silent_error(process: Any, seconds: float, timeout: float | None) -> WorkerSilent:
    """Return the error for a process that sent nothing for so long, with its stack; kill it if it gives none."""
    process.silent, stack = True, process.ask_stack()
    if not stack:
        stack = "(it does not answer signals)"
        process.signal(signal.SIGKILL)  # it would not react to SIGTERM either
    return WorkerSilent(f"sent nothing for {seconds:.1f} s (timeout={timeout}); its stack:\n{stack}")


def log(who: str, seconds: float, stack: str) -> None:
    """Log that a worker or process is silent."""
    where = stack or "(it does not answer signals)"
    text = "%s sent nothing for %.0f s; timeout=None waits without limit. Its stack:\n%s"
    record("slow", who, text, who, seconds, where)


def frozen_first(workers: Sequence[W]) -> list[W]:
    """Return workers of this machine with stopped (SIGSTOP) ones first: the others may be waiting for those."""
    return sorted(workers, key=lambda worker: state_of(worker.child.pid) not in "Tt")
