"""Feed: who writes rows in the background, and what a reader does when there are too few.

sample ──► too few rows ──► is somebody bringing more? ──► yes: wait, look again
                                                     ├──► not now: the error that says why
                                                     ├──► they failed: their error
                                                     └──► never again: what is there is all there is; nobody to wait for
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol

from reap.errors import Starved

_LOOK = 0.001  # seconds between looks at rows that other processes write: there is nothing to wait on
_PATIENCE = 60.0  # seconds without a single new row


class Source(Protocol):
    """Something that fills a buffer."""

    def bringing(self) -> bool:
        """Whether rows are still to come. What went wrong with it is raised."""

    def over(self) -> bool:
        """Whether it will never bring another row."""


class Feed:
    """The sources of a buffer, if it has any. They are not kept alive."""

    def __init__(self) -> None:
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()

    def attach(self, source: Source) -> None:
        """From now on rows come from there too."""
        self._sources.add(source)

    def wait(self, why: Starved, since: float, patience: float | None = None) -> bool:
        """Rows have been missing `since` then: return when it is worth a look, or raise `why`.

        True: the last look, all sources have ended. `patience`: how long to wait for writers that nobody knows; None:
        not at all.
        """
        sources = list(self._sources)
        if not sources and patience is None:
            raise why
        more = [source.bringing() for source in sources]  # all are asked: one may have failed
        if more and not any(more):
            if all(source.over() for source in sources):
                return True
            raise why
        waited, limit = time.monotonic() - since, _PATIENCE if patience is None else patience
        if waited > limit:
            raise Starved(f"{why}; nothing came for {waited:.0f} s")
        time.sleep(_LOOK)
        return False
