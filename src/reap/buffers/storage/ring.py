"""Ring: decides which writer may write which rows, and which rows may be read.   reserve → write → commit

    position   base ………… head - capacity ══════════ frontier ░░░░░░░░░░ head        row = position % capacity
                          └─ may be read ─┘          └ being written ┘

Positions only grow. A writer reserves the next positions under the lock, copies its rows without the lock, and commits.
Below the frontier everything is committed. A reader reads only there, and checks afterwards that the head has not
meanwhile come round to the rows it read.

A writer that is killed leaves its entry behind, and the kernel drops the lock that marked it as alive. The next process
that finds the entry turns its rows into a hole, which no reader counts and the next lap overwrites.
Every row has a mark: it CONTINUES the run of the row before it, BEGINS a run, or is a HOLE. A run is one lane's rows of
one episode by one writer, without a gap.

Words change in an order that allows a process to die between any two changes: see the comment at each.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from reap.buffers.storage.file_lock import FileLock, Waiting, describe_process

Array = np.ndarray[Any, Any]
CONTINUES, BEGINS, HOLE = 0, 1, 2

HEAD, FRONTIER, COUNT, HOLES, BASE, LAYOUT, SAMPLED = range(7)  # words of the header
_ENTRIES = 64  # the most writers at work at the same time
_FROM = 64  # the word where the entries begin: (from, to, process, worker + 1) each; an entry with to = 0 is unused
HEADER = 8 * (_FROM + 4 * _ENTRIES)


class Ring:
    """The shared words and marks of a buffer, for any number of writers and readers."""

    def __init__(self, book: Array, lock: FileLock, capacity: int) -> None:
        self.lock, self.capacity = lock, capacity
        self.words = book[:HEADER].view(np.int64)
        self._ints = self.words.data  # indexing it gives Python ints, at a third of NumPy's cost
        self.marks = book[HEADER : HEADER + capacity]
        self._entries, self._writers = np.split(self.words[_FROM:].reshape(_ENTRIES, 4), 2, axis=1)
        self.worker: int | None = None  # the number of this worker process, if known
        self._last_gap: tuple[int, int] | None = None

    # ---- writers ------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> tuple[int, int]:
        """Reserve the next `count` positions; return the first of them, and the entry to commit.

        Raise `WorkerSilent`, which names the process, if another writer blocks them longer than the lock's patience.
        """
        waiting = Waiting(self.lock.patience)
        while True:
            with self.lock.locked():
                # A writer that died between its two words below has an entry beyond the head: those rows are its own.
                head = max(int(self.words[HEAD]), int(self._entries[:, 1].max()))
                # More than rows still being written must not be overwritten: a slow writer holds back the frontier,
                # and half of the ring must stay readable behind it, however far ahead other writers could run.
                limit = head + count - self.capacity // 2
                self._clear_dead_writers(before=limit)
                active = self._entries[:, 1] > 0
                behind = active & (self._entries[:, 0] < limit)
                if not behind.any():
                    for entry in np.flatnonzero(~active).tolist():
                        if self.lock.claim(entry):
                            self._writers[entry] = os.getpid(), 0 if self.worker is None else self.worker + 1
                            self._entries[entry] = head, head + count  # before the head: no writer may miss it
                            self.words[HEAD] = head + count
                            return head, entry
                    behind = active  # all entries are in use: wait for any
            self._wait(waiting, behind)

    def _wait(self, waiting: Waiting, whom: Array) -> None:
        """Wait a little for the entry with the lowest position among these."""
        first = int(np.where(whom, self._entries[:, 0], np.iinfo(np.int64).max).argmin())
        (start, end), (pid, worker) = self._entries[first].tolist(), self._writers[first].tolist()
        who = functools.partial(describe_process, pid, worker - 1 if worker else None)
        waiting.poll((first, start), lambda: f"{who()} has been writing {end - start} rows to the replay buffer")
        self.lock.interrupts.let_in()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock while no writer is active; wait for active writers first, as `reserve` does."""
        waiting = Waiting(self.lock.patience)
        while True:
            with self.lock.locked():
                self._clear_dead_writers()
                active = self._entries[:, 1] > 0
                if not active.any():
                    yield
                    return
            self._wait(waiting, active)

    def commit(self, entry: int) -> None:
        """Make the written rows readable."""
        with self.lock.locked():
            first, end = self._entries[entry].tolist()
            self._entries[entry, 1] = 0
            self._advance()
            if first >= self.words[BASE]:
                self.words[COUNT] += end - first
            self.lock.release(entry)

    def abandon(self, entry: int) -> None:
        """Turn the reserved rows into a hole after an error in writing them."""
        with self.lock.locked():
            self._make_hole(entry)
            self.lock.release(entry)

    def _advance(self) -> None:
        active = self._entries[self._entries[:, 1] > 0, 0]
        self.words[FRONTIER] = active.min() if len(active) else self.words[HEAD]

    def _clear_dead_writers(self, before: int | None = None) -> None:
        """Turn the rows of dead writers into holes; with `before`, only those that begin below it."""
        for entry in np.flatnonzero(self._entries[:, 1] > 0).tolist():
            if (before is None or self._entries[entry, 0] < before) and self.lock.claim(entry):
                self._make_hole(entry)
                self.lock.release(entry)

    def _make_hole(self, entry: int) -> None:
        first, end = self._entries[entry].tolist()
        self.mark(max(first, end - self.capacity), np.full(min(end - first, self.capacity), HOLE, np.uint8))
        self.words[HEAD] = max(int(self.words[HEAD]), end)
        self.words[HOLES] = max(int(self.words[HOLES]), end)
        self._entries[entry, 1] = 0  # after the marks: then readers may read them
        self._advance()

    def mark(self, first: int, marks: Array) -> None:
        """Set the marks of the rows from position `first` on."""
        at = first % self.capacity
        head = min(len(marks), self.capacity - at)
        self.marks[at : at + head] = marks[:head]
        self.marks[: len(marks) - head] = marks[head:]

    # ---- readers ------------------------------------------------------------------------------------------------

    def window(self) -> tuple[int, int]:
        """Return the positions [low, high) that may be read; holes may be among them."""
        ints = self._ints
        high, head = ints[FRONTIER], ints[HEAD]  # in this order: never includes uncommitted rows
        while high < head - self.capacity and ints[FRONTIER] != high:  # a whole lap passed between the two reads
            high, head = ints[FRONTIER], ints[HEAD]
        if high < head:
            if self._last_gap == (high, head):  # nothing moved since the last call: is the writer dead?
                with self.lock.locked():
                    self._clear_dead_writers()
                    high, head = ints[FRONTIER], ints[HEAD]  # locked: no lap passes in between
            self._last_gap = high, head
        low = max(ints[BASE], head - self.capacity)
        return low, max(low, high)

    @property
    def low(self) -> int:
        """The lowest position that is not being overwritten."""
        return max(self._ints[BASE], self._ints[HEAD] - self.capacity)

    def holes(self, low: int) -> bool:
        """Return whether there may be holes at or above this position."""
        return self._ints[HOLES] > low

    def marks_of(self, low: int, high: int) -> Array:
        """Return the marks of positions [low, high)."""
        a, b = low % self.capacity, (high - 1) % self.capacity + 1
        if high <= low:
            return self.marks[:0]
        return self.marks[a:b] if a < b else np.concatenate([self.marks[a:], self.marks[:b]])

    def __len__(self) -> int:
        low, high = self.window()
        lost = int((self.marks_of(low, high) == HOLE).sum()) if self.holes(low) else 0
        return high - low - lost

    def next_lap(self) -> int:
        """Return the next position that is row 0."""
        return -(-int(self.words[HEAD]) // self.capacity) * self.capacity

    def empty(self) -> None:
        """Remove all rows; the next row written is row 0."""
        with self.lock.locked():
            base = self.next_lap()
            self.words[BASE] = base  # first: from now on no old row can be read
            self.words[HEAD], self.words[COUNT], self.words[SAMPLED] = base, 0, 0
            self._advance()
