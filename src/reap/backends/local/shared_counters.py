"""SharedCounters: numbers in memory that the parent and its workers share. Nobody waits for anybody to write one.

stop      whoever is filling a slot is to leave it at that               parent writes, or a worker's interruptor
random    so many frames of the run have random actions                  parent writes
total     so many frames are to be made by workers that run free         parent writes
rest      workers that run free begin no rollout                         parent writes
leave     workers are asked to leave, after the step they are in         parent writes
claimed   frames each worker has begun on                                its worker, the file locked while it adds;
                                                                         the parent, while that worker rests or is gone
step      where each worker is in its rollout                            its worker writes
lane      which of its lanes is being stepped, if it can tell            its worker writes
made      frames and rollouts each worker has finished, running free     its worker writes
told      what each worker has counted                                   its worker writes
ended     its episodes, a ring of rows                                   its worker writes, then counts them
read      how many of them were taken                                    parent writes
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reap.core.measuring.episode_log import COLUMNS, Episodes, UntoldEpisodes
from reap.core.shared_slots import SharedFile
from reap.core.stats import TOLD, numbers_of, stats_of

NOWHERE = -1  # the step of a worker that is in no rollout
BETWEEN = -2  # of one that is in a rollout, but in no step of it: hooks, weights, postproc, writing to a buffer
_FLAGS = 5
_RING = 8192  # episodes of a worker there is room for; pages nobody touches cost nothing
_WORDS = 7  # of each worker


class _Flag:
    """A number that the parent writes, as an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, of: SharedCounters, kind: type | None = None) -> int:
        return int(of.flags[self._index])

    def __set__(self, of: SharedCounters, value: int) -> None:
        of.flags[self._index] = value


class SharedCounters:
    """The counters, as one process sees them."""

    stop, random, total, rest, leave = map(_Flag, range(_FLAGS))

    def __init__(self, file: SharedFile, workers: int) -> None:
        words = file.map(8 * (_FLAGS + (_WORDS + len(TOLD) + len(COLUMNS) * _RING) * workers)).view(np.int64)
        self.file, self.flags = file, words[:_FLAGS]
        each = words[_FLAGS:][: _WORDS * workers].reshape(_WORDS, workers)
        self.claimed, self.step, self.lane, self._frames, self._rollouts, self._count, self._read = each
        told, ended = np.split(words[_FLAGS + _WORDS * workers :].view(np.float64), [workers * len(TOLD)])
        self._told, self._ended = told.reshape(workers, len(TOLD)), ended.reshape(workers, _RING, len(COLUMNS))

    def claim(self, worker: int, frames: int, *, most: int) -> int | None:
        """Begin on so many frames, if fewer than `most` are claimed: how many were. Nobody else claims meanwhile."""
        if self.claimed.sum() >= most:
            return None
        with self.file.locked():
            before = int(self.claimed.sum())
            if before >= most:
                return None
            self.claimed[worker] += frames
        return before

    def finish(self, worker: int, frames: int, claimed: int, stats: dict[str, Any], untold: UntoldEpisodes) -> None:
        """A rollout is where it belongs. What was claimed and not made is for others to make.

        Episodes for which there is no room, as nobody has taken the others yet, are left with the `untold`.
        """
        self.claimed[worker] += frames - claimed
        self._told[worker] = numbers_of(stats)
        self.tell_ended(worker, untold)
        self._rollouts[worker] += 1
        self._frames[worker] += frames  # last: who has seen all frames has seen all else

    def tell_ended(self, worker: int, untold: UntoldEpisodes) -> None:
        """Write down episodes that have ended, as many as there is room for."""
        count, episodes = int(self._count[worker]), untold.take()
        room = _RING - (count - int(self._read[worker]))
        if len(episodes) > room:
            untold.add(episodes[room:])
            episodes = episodes[:room]
        self._ended[worker, (count + np.arange(len(episodes))) % _RING] = episodes
        self._count[worker] = count + len(episodes)  # last: who has seen it may read them

    def made(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Frames and rollouts of each worker: `[2, workers]`, a copy."""
        return np.stack([self._frames, self._rollouts])

    def take_ended(self, worker: int) -> Episodes:
        """Return the episodes of a worker that have ended since this was asked before."""
        count = int(self._count[worker])
        found: Episodes = self._ended[worker, np.arange(self._read[worker], count) % _RING]
        self._read[worker] = count  # last: what is there may be written over from here on
        return found

    def stats(self, worker: int) -> dict[str, Any]:
        """Return what it has to say; empty before its first rollout."""
        if not self._rollouts[worker]:
            return {}
        return stats_of(self._told[worker])
