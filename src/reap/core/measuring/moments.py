"""Running statistics: mean and variance of all values that all lanes of all workers have seen.

    worker 0 ── its own moments, with each rollout ──► StatisticsPool ── those of others, before the next ──► worker 0
    worker 1 ── … ──►                                        └──► the original statistics object in this process

A worker's statistics are always `elsewhere ⊕ own`, each value counted once, whenever an update arrives. `⊕` is the
parallel form of Welford's update (Chan, Golub and LeVeque): exact up to float64 rounding, however the data are split.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reap.spec import Key

Array = np.ndarray[Any, Any]
_PRIOR = 1e-4  # the weight of the mean 0 and the variance 1 that statistics begin with, as in Gymnasium and SB3


@dataclass(frozen=True)
class Moments:
    """The number of values, their mean, and the sum of their squared distances from the mean."""

    count: float
    mean: Array
    squares: Array

    @classmethod
    def of(cls, values: Array) -> Moments:
        """Return the moments of `values` `[n, …]`, in float64."""
        mean = np.add.reduce(values, 0) / len(values)
        difference = values - mean
        difference *= difference  # in place, as below: envs do this at every step
        return cls(float(len(values)), mean, np.add.reduce(difference, 0))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not self.count or not other.count:
            return self if not other.count else other
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.count / count)
        difference *= difference
        difference *= self.count * other.count / count
        difference += self.squares
        difference += other.squares
        return Moments(count, mean, difference)


def merged(parts: Sequence[Moments], shape: tuple[int, ...] = ()) -> Moments:
    """Return the sum of `parts`, added in order. `shape`: the shape of the values."""
    total = Moments(0.0, np.zeros(shape), np.zeros(shape))
    for part in parts:
        total = total + part
    return total


def as_tensors(moments: Moments | None) -> list[torch.Tensor] | None:
    """Return moments as tensors for a checkpoint."""
    if moments is None:
        return None
    count = torch.tensor(moments.count, dtype=torch.float64)
    return [count, *(torch.as_tensor(value).clone() for value in (moments.mean, moments.squares))]


def as_moments(kept: Sequence[torch.Tensor] | None) -> Moments | None:
    """Return the moments that were given to `as_tensors`."""
    return None if kept is None else Moments(float(kept[0]), kept[1].numpy().copy(), kept[2].numpy().copy())


_PARTS = ("own", "now", "elsewhere")
Name = tuple[str, Key]  # of statistics: the id of their LearnedStatistics, and the key of the values
_originals: weakref.WeakValueDictionary[str, LearnedStatistics] = weakref.WeakValueDictionary()


class RunningStatistics:
    """Mean and variance of all values seen so far. Workers get a pickled copy, which keeps its `name`."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.shape: tuple[int, ...] | None = None  # of the values; None until `expect`
        self._elsewhere: Moments | None = None
        self._reset()

    def _reset(self) -> None:
        shape = self.shape or ()
        self._own, self._new = Moments(0.0, np.zeros(shape), np.zeros(shape)), list[Moments]()
        self._merge()

    def _merge(self) -> None:
        shape = self.shape or ()
        first = Moments(_PRIOR, np.zeros(shape), np.full(shape, _PRIOR))
        parts = [first, *([] if self._elsewhere is None else [self._elsewhere]), self._own]
        self._now = merged(parts, shape)
        self._scale: Array | None = None

    def expect(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the values, or raise ValueError if it was set to another."""
        if self.shape is not None and self.shape != shape:
            raise ValueError(f"these statistics are of values of shape {list(self.shape)}, not {list(shape)}")
        if self.shape is None:
            self.shape = shape
            self._reset()

    def update(self, values: Array) -> None:
        """Count these values `[n, …]`, in float64."""
        new = Moments.of(values)
        self._new.append(new)
        if len(self._new) >= 4096:
            self.own()
        self._now = self._now + new
        self._scale = None

    @property
    def count(self) -> float:
        """The number of values."""
        return self._now.count

    @property
    def mean(self) -> Array:
        """Their mean."""
        return self._now.mean

    @property
    def var(self) -> Array:
        """Their variance."""
        return self._now.squares / self._now.count

    def scale(self, epsilon: float) -> Array:
        """Return the square root of the variance plus `epsilon`."""
        if self._scale is None:
            self._scale = np.sqrt(self.var + epsilon)
        return self._scale

    def own(self) -> Moments:
        """Return the moments of the values seen by this object."""
        new, self._new = self._new, []
        if new:
            count = np.array([one.count for one in new])
            weight = count.reshape(-1, *[1] * len(self.shape or ()))
            means, total = np.stack([one.mean for one in new]), float(count.sum())
            mean = np.add.reduce(means * weight, 0) / total
            squares = np.add.reduce(np.stack([one.squares for one in new]), 0)
            squares = squares + np.add.reduce(weight * (means - mean) ** 2, 0)
            self._own = self._own + Moments(total, mean, squares)
        return self._own

    def adopt(self, total: Moments) -> None:
        """Replace everything by `total`, which includes what was seen here."""
        self.expect(total.mean.shape)
        self._elsewhere = total
        self._reset()

    def set_elsewhere(self, elsewhere: Moments) -> None:
        """Set the moments of what all others have seen, and keep this object's own."""
        self.expect(elsewhere.mean.shape)
        self.own()
        self._elsewhere = elsewhere
        self._merge()

    def state(self) -> dict[str, Any]:
        """Return the complete state, from which another object continues bit for bit."""
        self.own()
        return {name: as_tensors(one) for name, one in zip(_PARTS, (self._own, self._now, self._elsewhere))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        own, now, elsewhere = (as_moments(state[name]) for name in _PARTS)
        assert own is not None
        assert now is not None
        self.expect(now.mean.shape)
        self._new, self._own, self._now, self._elsewhere, self._scale = [], own, now, elsewhere, None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for a worker, in which the values seen here count as seen elsewhere."""
        self.own()
        seen = [one for one in (self._elsewhere, self._own) if one is not None]
        return {"name": self.name, "shape": self.shape, "elsewhere": merged(seen, self.shape or ())}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.name, self.shape, self._elsewhere = state["name"], state["shape"], state["elsewhere"]
        self._reset()


class LearnedStatistics:
    """The statistics of one transform, by key. The original is registered in its process by `id`, copies are not."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.found: dict[Key, RunningStatistics] = {}
        _originals[self.id] = self

    def of(self, key: Key) -> RunningStatistics:
        """Return the statistics of this key, created at the first call."""
        return self.found.setdefault(key, RunningStatistics((self.id, key)))


class StatisticsPool:
    """Merges what each worker has seen, for the other workers and for the original statistics in this process."""

    def __init__(self) -> None:
        self._seen: dict[Name, dict[int, Moments]] = {}  # by statistics and worker
        self._former: dict[Name, Moments] = {}  # what was seen before the run, and by workers that have ended
        self.version = 0

    def report(self, worker: int, seen: Mapping[Name, Moments]) -> None:
        """Set the moments of everything that a worker has seen so far."""
        for name, moments in seen.items():
            learned = _originals.get(name[0])
            original = None if learned is None else learned.of(name[1])
            if original is not None and name not in self._former:
                original.expect(moments.mean.shape)  # first, so that the moments taken from it below have this shape
                self._former[name] = original.__getstate__()["elsewhere"]  # what it had seen before it went to workers
            self._seen.setdefault(name, {})[worker] = moments
            if original is not None:
                original.adopt(self.total(name))
        self.version += bool(seen)

    def retire(self, worker: int) -> None:
        """Keep what an ended worker has seen; its replacement reports from zero."""
        for name, seen in self._seen.items():
            if worker in seen:
                gone = seen.pop(worker)
                self._former[name] = self._former[name] + gone if name in self._former else gone

    def total(self, name: Name, *, without: int | None = None) -> Moments:
        """Return what all workers, except `without`, have seen; workers are added in the order of their numbers."""
        seen = [moments for worker, moments in sorted(self._seen[name].items()) if worker != without]
        former = [self._former[name]] if name in self._former else []
        shape = next(iter([*former, *self._seen[name].values()])).mean.shape
        return merged([*former, *seen], shape)

    def for_worker(self, worker: int) -> dict[Name, Moments]:
        """Return what the other workers have seen, by name."""
        return {name: self.total(name, without=worker) for name in self._seen}

    def former(self) -> list[Any]:
        """Return what no worker will report again as plain tensors, in the order of the statistics."""
        return [as_tensors(self._former.get(name)) for name in self._seen]

    def load(self, former: Sequence[Any], reports: Mapping[int, Mapping[Name, Moments]]) -> None:
        """Restore what `former` returned, with what each worker reports that it has seen."""
        self._seen, self._former = {}, {}
        for worker, seen in reports.items():
            for name, kept in zip(seen, former):
                self._former[name] = as_moments(kept) or merged([], seen[name].mean.shape)
            self.report(worker, seen)
