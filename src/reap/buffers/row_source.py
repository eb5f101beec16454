"""Feed: who writes rows in the background, and what a reader does when there are too few.

sample ──► too few rows ──► is somebody bringing more? ──► yes: wait, look again
                                                     ├──► not now: the error that says why
                                                     ├──► they failed: their error
                                                     └──► never again: what is there is all there is; nobody to wait for

sample_while: a learner's loop, for as long as a collector brings rows
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from reap.errors import Starved, UsageError, WrongArgument, WrongState

_LOOK = 0.001  # seconds between looks at rows that other processes write: there is nothing to wait on
_PATIENCE = 60.0  # seconds without a single new row


class Source(Protocol):
    """Something that fills a buffer."""

    def bringing(self) -> bool:
        """Whether rows are still to come. What went wrong with it is raised."""

    def over(self) -> bool:
        """Whether it will never bring another row."""

    def paused_without(self, thread: int) -> bool:
        """Whether it brings rows again when another thread than this one ends a pause."""

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""


class Feed:
    """The sources of a buffer, if it has any. They are not kept alive."""

    def __init__(self) -> None:
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self._had_one = False
        self._paused_at = 0.0  # when a source was last seen to rest in a pause that somebody else will end

    def attach(self, source: Source) -> None:
        """From now on rows come from there too."""
        self._sources.add(source)
        self._had_one = True

    def check(self, source: Any) -> None:
        """Refuse what does not fill this buffer in the background."""
        if not all(callable(getattr(source, name, None)) for name in ("bringing", "over", "paused_without")):
            raise WrongArgument(f"sample_while takes a collector of reap's, got {type(source).__name__}")
        if source not in self._sources:
            raise UsageError(f"this {type(source).__name__} does not fill this buffer: give it replay_buffer=buffer")
        if not source.bringing() and not source.over():
            raise WrongState(
                f"sample_while samples while a collector runs: {type(source).__name__}.start() comes first"
            )

    def wait(self, why: Starved, since: float, patience: float | None = None, asker: int | None = None) -> bool:
        """Rows have been missing `since` then: return when it is worth a look, or raise `why`.

        True: the last look, all sources have ended. `patience`: how long to wait for writers that nobody knows; None:
        not at all. The time of a pause does not count, unless the `asker`, the thread the sample is for, began it.
        """
        sources = list(self._sources)
        if not sources and self._had_one:
            return True  # they are gone with their program's last reference to them
        if not sources and patience is None:
            raise why
        more = [source.bringing() for source in sources]  # all are asked: one may have failed
        if more and not any(more):
            if all(source.over() for source in sources):
                return True
            raise why
        now, asker = time.monotonic(), threading.get_ident() if asker is None else asker
        if any(source.paused_without(asker) for source in sources):
            self._paused_at = now
        waited, limit = now - max(since, self._paused_at), _PATIENCE if patience is None else patience
        if waited > limit:
            raise Starved(f"{why}; nothing came for {waited:.0f} s")
        time.sleep(_LOOK)
        return False


def sample_while(source: Source, sample: Callable[[], Any], owed: Callable[[], bool]) -> Iterator[Any]:
    """What `sample` returns, until `source` has brought its last row and no sample is `owed` for those there are.

    What went wrong with the source is raised before the next sample.
    """
    while source.bringing() or (not source.closed and owed()):
        try:
            drawn = sample()
        except Starved:
            if source.over():  # and there is not a single row
                return
            raise
        yield drawn
