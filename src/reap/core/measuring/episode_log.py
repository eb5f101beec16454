"""EpisodeLog: keeps every ended episode until it is taken, and the last hundred of each worker.

worker ──► rows, one for each episode that ended ──► EpisodeLog ──┬──► taken: `collector.episodes()`
                                                                 └──► the last hundred: means and percentiles

A row is nine numbers (`COLUMNS`), so rows are sent as one array, and are sorted, shifted and cut without a loop.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from reap.spec import Key, Leaf

EPISODE_RETURN: Key = ("collector", "episode_return")  # return of each frame's episode up to that frame
EPISODE_LENGTH: Key = ("collector", "episode_length")
EPISODE_COLUMNS = {EPISODE_RETURN: Leaf((), torch.float64), EPISODE_LENGTH: Leaf((), torch.int64)}
RECENT = 100  # episodes over which means and percentiles are taken
KEPT = 100_000  # episodes kept until they are taken; older ones are dropped, and their number is counted
COLUMNS = (
    "time",  # when it ended: seconds of `perf_counter` in the worker, and once logged, in the process of the log
    "return",
    "length",
    "discounted_return",  # NaN: no discount was given
    "lane",
    "worker",
    "policy_version",  # of the weights that acted last
    "terminated",  # 1: the env ended it; 0: it was truncated
    "seconds",  # from its first step to its last
)
TIME, RETURN, LENGTH, DISCOUNTED, LANE, WORKER, VERSION, TERMINATED, SECONDS = range(len(COLUMNS))
Episodes = np.ndarray[Any, np.dtype[np.float64]]  # [n, 9]
NO_EPISODES: Episodes = np.zeros((0, len(COLUMNS)))
_SMALL_ARRAYS, _SMALL_EPISODES = 256, 8192  # so many small arrays, or episodes in them, are merged
_PERCENTILES = (10, 50, 90)
SUMMARY = (
    "mean_return",
    "mean_length",
    *(f"return_p{percent}" for percent in _PERCENTILES),
    *(f"length_p{percent}" for percent in _PERCENTILES),
)  # names in `EpisodeLog.summary`


class UnreportedEpisodes:
    """The last `KEPT` episodes that were not taken yet. One thread may add while another takes."""

    def __init__(self) -> None:
        # Deques append and pop in C, so no lock is needed. Small arrays are merged into larger ones.
        self._small: deque[Episodes] = deque()
        self._large: deque[Episodes] = deque()
        self._rows = 0  # upper bound of the episodes in the small arrays
        self.forgotten = 0

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def add(self, episodes: Episodes) -> None:
        """Add episodes that have ended."""
        if not len(episodes):
            return
        self._small.append(episodes)
        self._rows += len(episodes)
        if len(self._small) >= _SMALL_ARRAYS or self._rows >= _SMALL_EPISODES:
            self._rows = 0
            self._large.append(np.concatenate([NO_EPISODES, *_emptied(self._small)]))
            self._forget_oldest()

    def take(self) -> Episodes:
        """Remove all episodes and return them, sorted by the time they ended."""
        found = [*_emptied(self._large), *_emptied(self._small)]
        if not found:
            return NO_EPISODES
        episodes = by_time(np.concatenate(found))
        self.forgotten += max(len(episodes) - KEPT, 0)
        return episodes[-KEPT:]

    def _forget_oldest(self) -> None:
        beyond = sum(map(len, tuple(self._large))) - KEPT
        while beyond > 0 and self._large:
            try:
                oldest = self._large.popleft()
            except IndexError:  # another thread took it
                return
            if len(oldest) > beyond:
                self._large.appendleft(oldest[beyond:].copy())
            self.forgotten += min(len(oldest), beyond)
            beyond -= len(oldest)


def _emptied(chunks: deque[Episodes]) -> list[Episodes]:
    """Empty the deque and return its items, the oldest first."""
    found = []
    while chunks:
        try:
            found.append(chunks.popleft())
        except IndexError:  # another thread took it
            break
    return found


class EpisodeLog:
    """The episodes of all workers of a collector."""

    def __init__(self) -> None:
        self._unreported = UnreportedEpisodes()
        self._recent: dict[int, Episodes] = {}  # the last hundred of each worker, which include the last hundred of all
        self._warned_of = 0  # the number of dropped episodes that `records` has warned of

    def add(self, episodes: Episodes, worker: int = 0, *, shift: float = 0.0) -> None:
        """Add ended episodes of a worker; `shift` is the number of seconds its clock is behind that of this process."""
        if not len(episodes):
            return
        new = episodes.copy()
        new[:, TIME] += shift
        new[:, WORKER] = worker
        before = self._recent.get(worker, NO_EPISODES)
        if len(before):  # a worker's episodes stay in order, even if the estimate of its clock changes
            np.maximum(new[:, TIME], before[-1, TIME], out=new[:, TIME])
        self._recent[worker] = _latest(before, new)
        self._unreported.add(new)

    def take(self) -> Episodes:
        """Return the episodes that ended since the last call."""
        return self._unreported.take()

    def records(self) -> list[dict[str, Any]]:
        """Take the episodes as records that `pandas.DataFrame` accepts; warn if older ones were dropped."""
        rows = self.take()
        forgotten, self._warned_of = self._unreported.forgotten - self._warned_of, self._unreported.forgotten
        if forgotten:
            warnings.warn(
                f"{forgotten:,} episodes were dropped: only the last {KEPT:,} are kept until episodes() is "
                f"called; call it more often",
                stacklevel=3,
            )
        return as_records(rows)

    def recent(self, worker: int | None = None) -> Episodes:
        """Return the last hundred episodes of all workers or of one, sorted by the time they ended."""
        if worker is not None:
            return self._recent.get(worker, NO_EPISODES)
        return _latest(NO_EPISODES, np.concatenate([NO_EPISODES, *self._recent.values()]))

    def summary(self, worker: int | None = None) -> dict[str, float | None]:
        """Return means and percentiles of returns and lengths of the last hundred (None before the first one ends)."""
        recent = self.recent(worker)
        if not len(recent):
            return dict.fromkeys(SUMMARY)
        columns = recent[:, [RETURN, LENGTH]]
        percentiles = np.percentile(columns, _PERCENTILES, axis=0)
        return dict(zip(SUMMARY, [*columns.mean(0).tolist(), *percentiles.T.reshape(-1).tolist()]))

    def state(self) -> torch.Tensor:
        """Return the last hundred episodes of each worker for a checkpoint; end times are relative to now."""
        rows = np.concatenate([NO_EPISODES, *self._recent.values()])
        rows[:, TIME] -= time.perf_counter()
        return torch.from_numpy(rows)

    def load(self, state: torch.Tensor) -> None:
        """Replace all episodes by those of a `state`; `take` will not return these again."""
        rows = state.numpy().copy()
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS):  # saved by an earlier version, which kept fewer columns
            rows = NO_EPISODES
        rows[:, TIME] += time.perf_counter()
        self._unreported = UnreportedEpisodes()
        self._recent = {int(worker): rows[rows[:, WORKER] == worker] for worker in np.unique(rows[:, WORKER])}


def as_records(rows: Episodes) -> list[dict[str, Any]]:
    """Return a dictionary for each episode, without `discounted_return` if no discount was given."""
    whole = rows[:, [LENGTH, LANE, WORKER, VERSION]].astype(np.int64).T.tolist()
    ended = ["terminated" if one else "truncated" for one in rows[:, TERMINATED]]
    columns: Mapping[str, list[Any]] = {
        "return": rows[:, RETURN].tolist(),
        "length": whole[0],
        "discounted_return": rows[:, DISCOUNTED].tolist(),
        "lane": whole[1],
        "worker": whole[2],
        "policy_version": whole[3],
        "ended": ended,
        "seconds": rows[:, SECONDS].tolist(),
    }
    has_discounted = not np.isnan(rows[:, DISCOUNTED]).all()
    names = [name for name in columns if has_discounted or name != "discounted_return"]
    return [dict(zip(names, values)) for values in zip(*(columns[name] for name in names))]


def by_time(episodes: Episodes) -> Episodes:
    """Return episodes sorted by the time they ended."""
    return episodes[np.argsort(episodes[:, TIME], kind="stable")]


def _latest(kept: Episodes, new: Episodes) -> Episodes:
    return by_time(np.concatenate([kept, new]))[-RECENT:]
