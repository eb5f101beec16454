"""One thread that writes the episodes of a recording, so that whoever collects them does not wait for the disk.

    ready()     ──► returns while less than 64 MB wait
    write(…)    ──► wait their turn ──► thread: pieces are joined, DatasetWriter.add ──► counted as written
    finish(…)   ──► returns when all are written, and the metadata behind them

File libraries let other threads run while they write. An episode is counted when its format has taken it, not before.
An error ends the thread: what waits is dropped, and every call raises it from then on. Once `finish` is called all is
written, even if Ctrl-C ends the wait for it: another `finish`, or the end of Python, waits again. A writer that is
dropped without `finish`, by the program or when Python ends, writes the episode in hand and no other.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reap.data.columns import Pieces, joined
from reap.data.formats.base import DatasetWriter
from reap.errors import RecordingFailed

AHEAD = 1 << 26  # bytes of episodes that may wait before `ready` waits too


class _Work:
    """What the thread shares with those who give it work. It does not hold the `BackgroundWriter`, which may go."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Pieces] = deque()
        self.bytes = 0  # of those that wait, and of the one in hand
        self.dropped = False
        self.metadata: Mapping[str, Any] | None = None  # once no more will come
        self.failure: BaseException | None = None
        self.lengths: list[int] = []  # of the episodes that are written
        self.ended = False  # the thread writes no more


class BackgroundWriter:
    """Writes episodes by a format's writer in a thread of its own, in their order."""

    def __init__(self, writer: DatasetWriter, path: Path) -> None:
        self._path, self._work = path, _Work()
        self._error: RecordingFailed | None = None
        # At its end Python waits for all threads but daemons, then calls finalizers: this one is ended by the latter.
        self._thread = threading.Thread(
            target=_write_all, args=(self._work, writer), name=f"reap-recording-{path.name}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _drop, self._work, self._thread, os.getpid())

    @property
    def lengths(self) -> list[int]:
        """How many steps each episode has that is written."""
        return self._work.lengths

    def ready(self) -> None:
        """Wait until there is room for more."""
        work = self._work
        with work.changed:
            work.changed.wait_for(lambda: work.bytes < AHEAD or work.failure is not None)
        self._raise_failure()

    def write(self, episodes: list[Pieces]) -> None:
        """Write these later. Nobody else may have them any more."""
        work = self._work
        with work.changed:
            work.waiting.extend(episodes)
            work.bytes += sum(map(_bytes, episodes))
            work.changed.notify_all()
        self._raise_failure()

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Wait until all is written, then the metadata with the `lengths` of all episodes. May be called again."""
        with self._work.changed:
            self._work.metadata = metadata
            self._work.changed.notify_all()
            # Not by `join`: Python 3.11 takes a thread for ended when Ctrl-C has broken off a `join`.
            self._work.changed.wait_for(lambda: self._work.ended)
        self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        cause = self._work.failure
        if cause is None:
            return
        if self._error is None:
            self._error = RecordingFailed(
                f"the recording at {self._path} could not be written: {type(cause).__name__}: {cause}; "
                f"it has no metadata, and is not whole"
            )
        raise self._error from cause


def _bytes(pieces: Pieces) -> int:
    return sum(values.nbytes for piece in pieces for values in piece.values())


def _write_all(work: _Work, writer: DatasetWriter) -> None:
    """The thread: write what waits, until the metadata is there and nothing else."""
    try:
        while True:
            with work.changed:
                work.changed.wait_for(lambda: work.waiting or work.dropped or work.metadata is not None)
                if work.dropped or not work.waiting:
                    break
                pieces = work.waiting.popleft()
            size, steps = _bytes(pieces), sum(len(next(iter(piece.values()))) for piece in pieces)
            writer.add(joined(pieces))
            with work.changed:
                work.lengths.append(steps)
                work.bytes -= size
                work.changed.notify_all()
            del pieces  # while it waits for the next
        if work.metadata is not None:
            writer.close({**work.metadata, "lengths": work.lengths})
    except BaseException as cause:
        with work.changed:
            work.failure = cause
            work.waiting.clear()
    finally:
        with work.changed:
            work.ended = True
            work.changed.notify_all()


def _drop(work: _Work, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return  # a child that was forked has no such thread
    with work.changed:
        work.dropped = work.metadata is None
        work.changed.notify_all()
        if threading.current_thread() is thread:  # where garbage is found, too
            return
        work.changed.wait_for(lambda: work.ended)
    thread.join()
