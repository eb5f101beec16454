"""Silence: how long one that has work may say nothing, and what is done about it then.

    timeout=30     an error after 30 seconds, with the stack of the one that is silent; it is ended
    timeout=None   a line in the log after `LOGGED_AFTER` seconds, with its stack; it is left alone

Of several that are silent, the one that has been so for longest is told of: the others may be waiting for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from reap._system.worker_log import record
from reap.errors import WorkerSilent

LOGGED_AFTER = 60.0  # seconds without a word, where no timeout was given


class _Worker(Protocol):
    index: int

    @property
    def child(self) -> Any:
        """Its process, here or elsewhere, which has `silence` and `ask_stack`."""

    @property
    def name(self) -> str: ...


W = TypeVar("W", bound=_Worker)


class Silence:
    """Watches workers, each of which has been silent since some time. None: it has nothing to do."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.watched = True  # False: nobody is asked, however long it takes
        self._logged: dict[int, float] = {}  # the silence of each worker that is in the log already, by its beginning

    @property
    def limit(self) -> float:
        """Seconds after which something is done."""
        return LOGGED_AFTER if self.timeout is None else self.timeout

    def patience(self, workers: Iterable[tuple[_Worker, float | None]]) -> float | None:
        """Seconds until something may have to be done; None: never, as things are."""
        if not self.watched:
            return None
        begun = [s for worker, s in workers if s is not None and self._logged.get(worker.index) != s]
        if begun:
            return max(0.0, min(begun) + self.limit - time.monotonic())
        return self.timeout

    def check(self, workers: Iterable[tuple[W, float | None]]) -> tuple[W, WorkerSilent] | None:
        """Return the one that has been silent for longer than `timeout`, and the error for it."""
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
    """Return the error for a process that sent nothing for so long, with its stack; one that gives none is killed."""
    process.silent, stack = True, process.ask_stack()
    if not stack:
        stack = "(it does not answer signals)"
        process.signal(signal.SIGKILL)  # nor will it a goodbye
    return WorkerSilent(f"sent nothing for {seconds:.1f} s (timeout={timeout}); its stack:\n{stack}")


def log(who: str, seconds: float, stack: str) -> None:
    """Write into the log that somebody is silent."""
    where = stack or "(it does not answer signals)"
    text = "%s sent nothing for %.0f s; with timeout=None it is waited for. Its stack:\n%s"
    record("slow", who, text, who, seconds, where)


def frozen_first(workers: Sequence[W]) -> list[W]:
    """Workers of this machine, those that are stopped (SIGSTOP) before the others, who may be waiting for them."""
    return sorted(workers, key=lambda worker: not _stopped(worker.child.pid))


def _stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] in "Tt"
    except (OSError, IndexError):  # it is gone; or this is not Linux
        return False
