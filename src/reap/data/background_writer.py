"""BackgroundWriter: a thread that writes the episodes of a recording, so that collecting does not wait for the disk.

    wait_for_room()  ──► returns once less than 64 MB are queued
    write(…)         ──► queue ──► thread: pieces are joined, DatasetWriter.add ──► counted as written
    finish(…)        ──► returns when all episodes are written, and then the metadata

File libraries release the GIL while they write. An episode is counted as written when `DatasetWriter.add` returns.
An error ends the thread: queued episodes are dropped, and every later call raises the error. Once `finish` was called
everything gets written, even if Ctrl-C ends the wait for it: another `finish`, or the end of Python, waits again. A
writer that is dropped without `finish`, by the program or when Python ends, writes only its current episode.
"""

from __future__ import annotations

import atexit
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

AHEAD = 1 << 26  # bytes of queued episodes from which on `wait_for_room` blocks


class _Shared:
    """State shared with the thread. It holds no reference to the `BackgroundWriter`, which can thus be deleted."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Pieces] = deque()
        self.bytes = 0  # of the queued episodes and the current one
        self.dropped = False
        self.metadata: Mapping[str, Any] | None = None  # set once no more episodes will come
        self.failure: BaseException | None = None
        self.lengths: list[int] = []  # of the episodes written so far
        self.ended = False  # the thread has finished writing


class BackgroundWriter:
    """Writes episodes with a format's writer, in their order, in a thread of its own."""

    def __init__(self, writer: DatasetWriter, path: Path) -> None:
        self._path, self._work = path, _Shared()
        self._error: RecordingFailed | None = None
        # At exit Python joins all non-daemon threads first; what ends this daemon is called after that.
        self._thread = threading.Thread(
            target=_write_all, args=(self._work, writer), name=f"reap-recording-{path.name}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end_thread, self._work, self._thread, os.getpid())
        # Python calls what was registered last first. The thread must have ended before h5py frees its converters,
        # which it registered at its import; all `weakref.finalize` together would be called after that.
        self._end.atexit = False
        atexit.register(self._end)

    @property
    def lengths(self) -> list[int]:
        """The number of steps of each episode written so far."""
        return self._work.lengths

    def wait_for_room(self) -> None:
        """Wait until the queue has room."""
        work = self._work
        with work.changed:
            work.changed.wait_for(lambda: work.bytes < AHEAD or work.failure is not None)
        self._raise_failure()

    def write(self, episodes: list[Pieces]) -> None:
        """Queue these episodes. The caller must not use their arrays any more."""
        work = self._work
        with work.changed:
            work.waiting.extend(episodes)
            work.bytes += sum(map(_bytes, episodes))
            work.changed.notify_all()
        self._raise_failure()

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Wait until all episodes are written, and then `metadata` with their `lengths`. May be called again."""
        with self._work.changed:
            self._work.metadata = metadata
            self._work.changed.notify_all()
            # Not by `join`: Python 3.11 treats a thread as ended after Ctrl-C interrupted a `join`.
            self._work.changed.wait_for(lambda: self._work.ended)
        self._thread.join()
        atexit.unregister(self._end)
        self._raise_failure()

    def _raise_failure(self) -> None:
        cause = self._work.failure
        if cause is None:
            return
        if self._error is None:
            self._error = RecordingFailed(
                f"the recording at {self._path} could not be written: {type(cause).__name__}: {cause}; "
                f"the file is incomplete or has no metadata; `load` reports which"
            )
        raise self._error from cause


def _bytes(pieces: Pieces) -> int:
    return sum(values.nbytes for piece in pieces for values in piece.values())


def _write_all(work: _Shared, writer: DatasetWriter) -> None:
    """Body of the thread: write queued episodes until `metadata` is set and the queue is empty."""
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
            del pieces  # frees the memory while waiting for the next
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


def _end_thread(work: _Shared, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child does not have the thread
    with work.changed:
        work.dropped = work.metadata is None
        work.changed.notify_all()
        if threading.current_thread() is thread:  # the garbage collector may run in this thread
            return
        work.changed.wait_for(lambda: work.ended)
    thread.join()
