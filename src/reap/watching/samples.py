"""Samples: the counts of a collector at one moment. Two samples give rates, and how the time was spent.

    collector ──► Sample, Sample, Sample … ──► view: frames per second, time split, lag, returns, memory, diagnosis

A sample holds counts since the start of the run, so any two samples make a view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reap.watching.diagnosis import PARTS, Times, diagnose

WINDOW = 20.0  # seconds over which rates and shares are computed
_HISTORY = 600  # points per curve
_SMOOTH = 6.0  # seconds over which each point of a curve is averaged


@dataclass(frozen=True)
class WorkerSample:
    """One worker at one moment. `seconds` are in the order of `diagnosis.PARTS`."""

    index: int
    alive: bool
    frames: int
    lanes: int
    steps: int
    seconds: tuple[float, ...]
    doing: str
    pid: int | None
    memory: int | None  # bytes


@dataclass(frozen=True)
class Sample:
    """A collector at one moment."""

    time: float
    frames: int
    batches: int
    version: int
    restarts: int
    learner: float | None  # seconds that the learner spent; None: it takes no batches
    collecting: float  # seconds in which the learner waited for a batch
    workers: Sequence[WorkerSample]
    lags: dict[int, int] = field(default_factory=dict)  # number of frames by policy lag
    returns: Sequence[float] = ()  # of the last hundred episodes
    lengths: Sequence[float] = ()
    episodes: int = 0
    memory: int | None = None  # of the collector's process
    closed: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """The properties of a collector that do not change."""

    name: str
    pid: int
    total: float
    in_step: bool | None  # whether workers wait for one another; None: a single worker, in this process
    frames_per_batch: int
    cores: int


class Views:
    """Holds the last samples of a collector, and computes the view of them."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self._samples: deque[Sample] = deque()
        self._rates: deque[tuple[float, float]] = deque(maxlen=_HISTORY)  # when, frames per second
        self._returns: deque[tuple[float, float]] = deque(maxlen=_HISTORY)  # when, mean return

    def add(self, sample: Sample) -> None:
        """Add a sample that is later than all before."""
        samples = self._samples
        before = next((one for one in samples if one.time > sample.time - _SMOOTH), samples[-1] if samples else None)
        if before is not None and sample.time > before.time:
            self._rates.append((sample.time, max(sample.frames - before.frames, 0) / (sample.time - before.time)))
        if sample.returns:
            self._returns.append((sample.time, sum(sample.returns) / len(sample.returns)))
        samples.append(sample)
        while len(samples) > 2 and samples[1].time < sample.time - WINDOW:
            samples.popleft()

    def view(self, now: Sample | None = None) -> dict[str, Any]:
        """Return the view as JSON values, of the sample `now` or else the last one added."""
        now = now or self._samples[-1]
        then, info = self._before(now), self.info
        earlier = {one.index: one for one in then.workers} if then is not None else {}
        times = {one.index: _shares(self._seconds(one)) for one in now.workers}
        passed = now.time - then.time if then is not None else 0.0
        workers = [_worker(one, earlier.get(one.index), passed, times[one.index]) for one in now.workers]
        found = diagnose(
            [Times(one.index, one.lanes, one.steps, times[one.index]) for one in now.workers if one.alive],
            learner=self._learner(now, then),
            in_step=info.in_step,
            frames_per_batch=info.frames_per_batch,
            cores=info.cores,
        )
        start = self._rates[0][0] if self._rates else now.time
        return {
            "name": info.name,
            "pid": info.pid,
            "frames": now.frames,
            "total": None if info.total == float("inf") else info.total,
            "batches": now.batches,
            "version": now.version,
            "restarts": now.restarts,
            "episodes": now.episodes,
            "frames_per_second": (now.frames - then.frames) / passed if then is not None and passed else 0.0,
            "memory": now.memory,
            "closed": now.closed,
            "diagnosis": {"limit": found.limit, "share": found.share, "text": found.text},
            "split": _mean([one["split"] for one in workers if one["alive"]]),
            "learner": self._learner(now, then),
            "workers": workers,
            "lags": sorted(now.lags.items()),
            "returns": list(now.returns),
            "mean_return": sum(now.returns) / len(now.returns) if now.returns else None,
            "mean_length": sum(now.lengths) / len(now.lengths) if now.lengths else None,
            "rates": [[round(when - start, 2), round(rate, 1)] for when, rate in self._rates],
            "mean_returns": [[round(when - start, 2), mean] for when, mean in self._returns],
        }

    def _before(self, now: Sample) -> Sample | None:
        """Return the sample to compare `now` with: the oldest of the window; None: there is none."""
        return self._samples[0] if self._samples[0] is not now else None

    @staticmethod
    def _learner(now: Sample, then: Sample | None) -> float | None:
        if now.learner is None:
            return None
        learner, collecting = now.learner, now.collecting
        if then is not None and then.learner is not None:
            learner, collecting = learner - then.learner, collecting - then.collecting
        return learner / (learner + collecting) if learner + collecting > 0 else 0.0

    def _seconds(self, one: WorkerSample) -> tuple[float, ...]:
        """Return a worker's seconds since its first report in the window, which excludes its start-up."""
        for sample in self._samples:
            for before in sample.workers:
                if before.index == one.index and any(before.seconds) and before.seconds != one.seconds:
                    since = tuple(new - old for new, old in zip(one.seconds, before.seconds))
                    if min(since) > -1e-3:  # else the worker was restarted meanwhile
                        return tuple(max(part, 0.0) for part in since)
        return (*one.seconds[:-1], 0.0)


def _worker(one: WorkerSample, before: WorkerSample | None, passed: float, shares: Sequence[float]) -> dict[str, Any]:
    made = one.frames - before.frames if before is not None else 0
    return {
        "index": one.index,
        "alive": one.alive,
        "frames": one.frames,
        "lanes": one.lanes,
        "frames_per_second": max(made, 0) / passed if passed else 0.0,
        "doing": one.doing,
        "pid": one.pid,
        "memory": one.memory,
        "split": dict(zip(PARTS, shares)),
    }


def _shares(seconds: Sequence[float]) -> tuple[float, ...]:
    whole = sum(seconds)
    return tuple(part / whole for part in seconds) if whole > 0 else (0.0,) * len(seconds)


def _mean(splits: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: sum(one[part] for one in splits) / len(splits) if splits else 0.0 for part in PARTS}


def memory_of(pid: int | None) -> int | None:
    """Return the resident memory of a local process in bytes, shared memory included; None: unknown."""
    if pid is None:
        return None
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:  # the process has ended or is on another machine, or this is not Linux
        return None
    return None
