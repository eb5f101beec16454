"""SharedCounters: numbers in memory that the parent and its workers share. Only claims take a lock.

stop       rollouts end after the current step                           parent writes, or a worker's interruptor
random     number of first frames of the run that have random actions    parent writes
total      number of frames that free-running workers are to collect     parent writes
rest       free-running workers begin no rollout                         parent writes
leave      workers exit after their current step                         parent writes
claimed    frames that count against `total`, or, of workers given       its worker, the file locked while it adds;
           slots, against `random`: later ones are not counted.          the parent, while that worker rests or is gone
           After a reset or a restart: the frames taken so far
step       position of each worker in its rollout                        its worker writes
lane       the lane that is being stepped, if the env can tell           its worker writes
_frames    frames that each free-running worker has finished             its worker writes
_rollouts  rollouts that each free-running worker has finished           its worker writes
_stats     the counts of each worker                                     its worker writes
_ended     its episodes, a ring of rows                                  its worker writes, then counts them
_count     how many episodes it has written to the ring                  its worker writes
_read      how many of these episodes the parent has taken               parent writes
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reap.core.measuring.episode_log import COLUMNS, Episodes, UnreportedEpisodes
from reap.core.measuring.stats import COUNT_NAMES, numbers_of, stats_of
from reap.core.shared_slots import SharedFile

NOWHERE = -1  # the step of a worker outside a rollout
BETWEEN = -2  # the step of a worker in a rollout, but between steps: hooks, weights, postproc, writing
_FLAGS = 5
_RING = 8192  # room for episodes of one worker; untouched pages cost no memory
_WORDS = 7  # columns of 64-bit integers per worker


class _Flag:
    """A descriptor for one of the numbers that all workers share."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, counters: SharedCounters, kind: type | None = None) -> int:
        return int(counters.flags[self._index])

    def __set__(self, counters: SharedCounters, value: int) -> None:
        counters.flags[self._index] = value


class SharedCounters:
    """One process's view of the counters."""

    stop, random, total, rest, leave = map(_Flag, range(_FLAGS))

    def __init__(self, file: SharedFile, workers: int) -> None:
        words = file.map(8 * (_FLAGS + (_WORDS + len(COUNT_NAMES) + len(COLUMNS) * _RING) * workers)).view(np.int64)
        self.file, self.flags = file, words[:_FLAGS]
        each = words[_FLAGS:][: _WORDS * workers].reshape(_WORDS, workers)
        self.claimed, self.step, self.lane, self._frames, self._rollouts, self._count, self._read = each
        stats, ended = np.split(words[_FLAGS + _WORDS * workers :].view(np.float64), [workers * len(COUNT_NAMES)])
        self._stats, self._ended = stats.reshape(workers, len(COUNT_NAMES)), ended.reshape(workers, _RING, len(COLUMNS))

    def claim(self, worker: int, frames: int, *, most: int) -> int | None:
        """Claim `frames` frames, if fewer than `most` are claimed; return how many were claimed before, or None.

        The file is locked meanwhile, so that no other worker claims the same frames.
        """
        if self.claimed.sum() >= most:
            return None
        with self.file.locked():
            before = int(self.claimed.sum())
            if before >= most:
                return None
            self.claimed[worker] += frames
        return before

    def finish(
        self, worker: int, frames: int, claimed: int, stats: dict[str, Any], unreported: UnreportedEpisodes
    ) -> None:
        """Count a rollout that was written, and release the frames that were claimed but not collected.

        Episodes stay in `unreported` if there is no room for them because the parent has not taken earlier ones.
        """
        self.claimed[worker] += frames - claimed
        self._stats[worker] = numbers_of(stats)
        self.report_ended(worker, unreported)
        self._rollouts[worker] += 1
        self._frames[worker] += frames  # last: a reader of the new frame count can also read everything else

    def report_ended(self, worker: int, unreported: UnreportedEpisodes) -> None:
        """Move finished episodes from `unreported` to the ring, as many as there is room for."""
        count, episodes = int(self._count[worker]), unreported.take()
        room = _RING - (count - int(self._read[worker]))
        if len(episodes) > room:
            unreported.add(episodes[room:])
            episodes = episodes[:room]
        self._ended[worker, (count + np.arange(len(episodes))) % _RING] = episodes
        self._count[worker] = count + len(episodes)  # last: a reader of the count may read the rows

    def made(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a copy of the frames and rollouts of each worker: `[2, workers]`."""
        return np.stack([self._frames, self._rollouts])

    def take_ended(self, worker: int) -> Episodes:
        """Return the episodes of a worker that have ended since the last call."""
        count = int(self._count[worker])
        found: Episodes = self._ended[worker, np.arange(self._read[worker], count) % _RING]
        self._read[worker] = count  # last: the worker may overwrite these rows from here on
        return found

    def stats(self, worker: int) -> dict[str, Any]:
        """Return the counts of a worker; empty before its first rollout."""
        if not self._rollouts[worker]:
            return {}
        return stats_of(self._stats[worker])
