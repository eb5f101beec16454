"""EpisodeLog: every episode that has ended, until somebody asks; and of each worker the last hundred.

worker ──► rows, one for each episode that ended ──► EpisodeLog ──┬──► taken: `collector.episodes()`
                                                                 └──► the last hundred: means and percentiles

A row is nine numbers (`COLUMNS`), so that rows travel as one array and are sorted, shifted and cut without a loop.
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

EPISODE_RETURN: Key = ("collector", "episode_return")  # of the episode of each frame, so far
EPISODE_LENGTH: Key = ("collector", "episode_length")
EPISODE_COLUMNS = {EPISODE_RETURN: Leaf((), torch.float64), EPISODE_LENGTH: Leaf((), torch.int64)}
RECENT = 100  # episodes over which means and percentiles are taken
KEPT = 100_000  # episodes that nobody has asked for: older ones are forgotten, and counted
COLUMNS = (
    "time",  # when it ended: seconds of `perf_counter` where it was played, then of whoever holds the log
    "return",
    "length",
    "discounted_return",  # NaN: nobody asked for it
    "lane",
    "worker",
    "policy_version",  # of the weights that acted last
    "terminated",  # 1: by the env's own end; 0: cut by a limit
    "seconds",  # from its first step to its last
)
TIME, RETURN, LENGTH, DISCOUNTED, LANE, WORKER, VERSION, TERMINATED, SECONDS = range(len(COLUMNS))
Episodes = np.ndarray[Any, np.dtype[np.float64]]  # [n, 9]
NO_EPISODES: Episodes = np.zeros((0, len(COLUMNS)))
_CHUNKS, _LARGE = 256, 8192  # arrays, and episodes in them, that are held before they are put together
_SHARES = (10, 50, 90)  # percentiles
SUMMARY = (
    "mean_return",
    "mean_length",
    *(f"return_p{share}" for share in _SHARES),
    *(f"length_p{share}" for share in _SHARES),
)  # what is said of the last hundred


class UntoldEpisodes:
    """Episodes that nobody was told of, the last `KEPT` of them. One thread may add while another takes."""

    def __init__(self) -> None:
        # Appended and popped by functions of C: no lock is needed. Small arrays are put together into larger ones.
        self._small: deque[Episodes] = deque()
        self._large: deque[Episodes] = deque()
        self._rows = 0  # in the small ones, at most
        self.forgotten = 0

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def add(self, episodes: Episodes) -> None:
        """Add episodes that have ended."""
        if not len(episodes):
            return
        self._small.append(episodes)
        self._rows += len(episodes)
        if len(self._small) >= _CHUNKS or self._rows >= _LARGE:
            self._rows = 0
            self._large.append(np.concatenate([NO_EPISODES, *_popped(self._small)]))
            self._forget_oldest()

    def take(self) -> Episodes:
        """All of them, by their ends; from here on somebody was told."""
        found = [*_popped(self._large), *_popped(self._small)]
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
            except IndexError:  # another thread has it
                return
            if len(oldest) > beyond:
                self._large.appendleft(oldest[beyond:].copy())
            self.forgotten += min(len(oldest), beyond)
            beyond -= len(oldest)


def _popped(chunks: deque[Episodes]) -> list[Episodes]:
    """All that is in there, the oldest first; it is empty then."""
    found = []
    while chunks:
        try:
            found.append(chunks.popleft())
        except IndexError:  # another thread has it
            break
    return found


class EpisodeLog:
    """The episodes of all workers of a collector."""

    def __init__(self) -> None:
        self._untold = UntoldEpisodes()
        self._recent: dict[int, Episodes] = {}  # by worker: the last hundred of all are among them
        self._told = 0  # how many forgotten ones somebody was warned of

    def add(self, episodes: Episodes, worker: int = 0, *, shift: float = 0.0) -> None:
        """Episodes of a worker have ended; `shift` is what its clock is behind ours."""
        if not len(episodes):
            return
        new = episodes.copy()
        new[:, TIME] += shift
        new[:, WORKER] = worker
        before = self._recent.get(worker, NO_EPISODES)
        if len(before):  # whatever is known of its clock, a worker's episodes stay in their order
            np.maximum(new[:, TIME], before[-1, TIME], out=new[:, TIME])
        self._recent[worker] = _latest(before, new)
        self._untold.add(new)

    def take(self) -> Episodes:
        """Those that ended since this was asked before."""
        return self._untold.take()

    def records(self) -> list[dict[str, Any]]:
        """The same as records that `pandas.DataFrame` takes; warns if some of them were forgotten."""
        rows = self.take()
        forgotten, self._told = self._untold.forgotten - self._told, self._untold.forgotten
        if forgotten:
            warnings.warn(
                f"{forgotten:,} episodes were forgotten: the last {KEPT:,} are kept until episodes() is called; "
                f"call it more often",
                stacklevel=3,
            )
        return as_records(rows)

    def recent(self, worker: int | None = None) -> Episodes:
        """The last hundred, of all workers or of one, by their ends."""
        if worker is not None:
            return self._recent.get(worker, NO_EPISODES)
        return _latest(NO_EPISODES, np.concatenate([NO_EPISODES, *self._recent.values()]))

    def summary(self, worker: int | None = None) -> dict[str, float | None]:
        """Means and percentiles of the returns and lengths of the last hundred (None before the first one ends)."""
        recent = self.recent(worker)
        if not len(recent):
            return dict.fromkeys(SUMMARY)
        columns = recent[:, [RETURN, LENGTH]]
        shares = np.percentile(columns, _SHARES, axis=0)
        return dict(zip(SUMMARY, [*columns.mean(0).tolist(), *shares.T.reshape(-1).tolist()]))

    def state(self) -> torch.Tensor:
        """The last hundred of each worker, to go on from elsewhere: their ends as seconds from now."""
        rows = np.concatenate([NO_EPISODES, *self._recent.values()])
        rows[:, TIME] -= time.perf_counter()
        return torch.from_numpy(rows)

    def load(self, state: torch.Tensor) -> None:
        """Hold these, and no others. Nobody is told of them again."""
        rows = state.numpy().copy()
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS):  # of an earlier version: it knew less of each
            rows = NO_EPISODES
        rows[:, TIME] += time.perf_counter()
        self._untold = UntoldEpisodes()
        self._recent = {int(worker): rows[rows[:, WORKER] == worker] for worker in np.unique(rows[:, WORKER])}


def as_records(rows: Episodes) -> list[dict[str, Any]]:
    """A dictionary for each episode. `discounted_return` is there only if it was asked for."""
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
    asked = not np.isnan(rows[:, DISCOUNTED]).all()
    names = [name for name in columns if asked or name != "discounted_return"]
    return [dict(zip(names, values)) for values in zip(*(columns[name] for name in names))]


def by_time(episodes: Episodes) -> Episodes:
    """In the order in which they ended."""
    return episodes[np.argsort(episodes[:, TIME], kind="stable")]


def _latest(kept: Episodes, new: Episodes) -> Episodes:
    return by_time(np.concatenate([kept, new]))[-RECENT:]
