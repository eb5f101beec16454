"""Feed: the collectors that write rows in the background, and what a reader does when there are too few rows.

sample ──► too few rows ──► is a collector bringing more? ──► yes: wait, try again
                                                        ├──► not now: raise the error that says why
                                                        ├──► it failed: raise its error
                                                        └──► never again: sample what is there, without waiting

sample_while: a learner's loop, for as long as a collector brings rows
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from reap.errors import Starved, UsageError, WrongArgument, WrongState

T = TypeVar("T")
_POLL = 0.001  # seconds between polls: rows of other processes give us no handle to wait on
_PATIENCE = 60.0  # seconds without a single new row


class Source(Protocol):
    """Something that fills a buffer in the background: a collector."""

    def bringing(self) -> bool:
        """Return whether more rows will come. Raise the error if the source has failed."""

    def over(self) -> bool:
        """Return whether it will never bring another row."""

    def paused_without(self, thread: int) -> bool:
        """Return whether it is paused, and a thread other than `thread` will end the pause."""

    @property
    def closed(self) -> bool:
        """Whether the source was shut down."""


class Feed:
    """Holds the sources of a buffer, if any, by weak references."""

    def __init__(self) -> None:
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self._had_one = False
        self._paused_at = 0.0  # when a source was last seen in a pause that another thread will end

    def attach(self, source: Source) -> None:
        """Add a source of rows."""
        self._sources.add(source)
        self._had_one = True

    def check(self, source: Any) -> None:
        """Raise unless `source` fills this buffer in the background."""
        if not all(callable(getattr(source, name, None)) for name in ("bringing", "over", "paused_without")):
            raise WrongArgument(f"sample_while takes a collector of reap's, got {type(source).__name__}")
        if source not in self._sources:
            raise UsageError(f"this {type(source).__name__} does not fill this buffer: give it replay_buffer=buffer")
        if not source.bringing() and not source.over():
            raise WrongState(f"sample_while samples while a collector runs: call {type(source).__name__}.start() first")

    def retry(
        self,
        why: Starved,
        sample: Callable[[bool], T],
        written: Callable[[], int],
        patience: float | None = None,
        closing: Callable[[], bool] | None = None,
        for_thread: int | None = None,
    ) -> T:
        """Call `sample(limited)`, which has raised `why`, until it returns a sample. Wait for rows in between.

        `limited` is False in the last try, once all sources have ended. `written` counts the rows ever written: a
        reader waits for at most `patience` seconds after the last of them; None: 60 s, and not at all if no source is
        attached. `for_thread`: the thread that the sample is for, if it is not the calling one. No more waiting once
        `closing` returns True.
        """
        for_thread = threading.get_ident() if for_thread is None else for_thread
        seen, since = -1, 0.0
        while closing is None or not closing():
            if (count := written()) != seen:
                seen, since = count, time.monotonic()
            last = self._wait(why, since, patience, for_thread)
            try:
                return sample(not last)
            except Starved as error:
                why = error
                if last:
                    break
        raise why

    def _wait(self, why: Starved, since: float, patience: float | None, for_thread: int) -> bool:
        """Wait a moment before the next try of a reader that got no row `since` then, or raise `why`.

        Return True if all sources have ended: the next try is the last. The time of a pause does not count, unless
        `for_thread` began the pause.
        """
        sources = list(self._sources)
        if not sources and self._had_one:
            return True  # the program has dropped its collectors
        if not sources and patience is None:
            raise why
        more = [source.bringing() for source in sources]  # call it on all sources: one may have failed
        if more and not any(more):
            if all(source.over() for source in sources):
                return True
            raise why
        now = time.monotonic()
        if any(source.paused_without(for_thread) for source in sources):
            self._paused_at = now
        waited, limit = now - max(since, self._paused_at), _PATIENCE if patience is None else patience
        if waited > limit:
            raise Starved(f"{why}; no rows came for {waited:.0f} s")
        time.sleep(_POLL)
        return False


def sample_while(source: Source, sample: Callable[[], Any], owed: Callable[[], bool]) -> Iterator[Any]:
    """Yield what `sample` returns, until `source` has brought its last row and no more samples are `owed`.

    An error of the source is raised before the next sample.
    """
    while source.bringing() or (not source.closed and owed()):
        try:
            drawn = sample()
        except Starved:
            if source.over():  # and the buffer has not a single row
                return
            raise
        yield drawn
