"""Running statistics: mean and variance of everything seen, by all lanes and all workers.

    worker 0 ── its own moments, with each rollout ──► StatisticsPool ── those of others, before the next ──► worker 0
    worker 1 ── … ──►                                        └──► the object the statistics were made from, here

What a worker knows is always `elsewhere ⊕ own`, each counted once, whenever news come. `⊕` is the parallel form of
Welford's update (Chan, Golub and LeVeque): exact, but for the rounding of float64, however the data were shared out.
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
_FIRST = 1e-4  # the weight of the mean 0 and the variance 1 that statistics begin with, as in Gymnasium and SB3


@dataclass(frozen=True)
class Moments:
    """How many values there were, their mean, and the sum of squares of their distances from it."""

    count: float
    mean: Array
    squares: Array

    @classmethod
    def of(cls, values: Array) -> Moments:
        """Return the moments of `values` `[n, …]`, in float64."""
        mean = np.add.reduce(values, 0) / len(values)
        apart = values - mean
        apart *= apart
        return cls(float(len(values)), mean, np.add.reduce(apart, 0))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not self.count or not other.count:
            return self if not other.count else other
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        apart *= apart
        apart *= self.count * other.count / count
        apart += self.squares
        apart += other.squares
        return Moments(count, mean, apart)


def merged(parts: Sequence[Moments], shape: tuple[int, ...] = ()) -> Moments:
    """All of them as one, from the first to the last."""
    total = Moments(0.0, np.zeros(shape), np.zeros(shape))
    for part in parts:
        total = total + part
    return total


def as_tensors(moments: Moments | None) -> list[torch.Tensor] | None:
    """Return moments as they are saved."""
    if moments is None:
        return None
    count = torch.tensor(moments.count, dtype=torch.float64)
    return [count, *(torch.as_tensor(value).clone() for value in (moments.mean, moments.squares))]


def as_moments(kept: Sequence[torch.Tensor] | None) -> Moments | None:
    """The moments that `as_tensors` was given."""
    return None if kept is None else Moments(float(kept[0]), kept[1].numpy().copy(), kept[2].numpy().copy())


_PARTS = ("own", "now", "elsewhere")
Name = tuple[str, Key]  # of statistics: whose they are, and of what
_here: weakref.WeakValueDictionary[str, LearnedStatistics] = weakref.WeakValueDictionary()


class RunningStatistics:
    """Mean and variance of all values seen so far. It goes to workers as a copy that knows where it comes from."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.shape: tuple[int, ...] | None = None  # once an env is known
        self._elsewhere: Moments | None = None
        self._begin()

    def _begin(self) -> None:
        shape = self.shape or ()
        self._own, self._new = Moments(0.0, np.zeros(shape), np.zeros(shape)), list[Moments]()
        self._look()

    def _look(self) -> None:
        shape = self.shape or ()
        first = Moments(_FIRST, np.zeros(shape), np.full(shape, _FIRST))
        parts = [first, *([] if self._elsewhere is None else [self._elsewhere]), self._own]
        self._now = merged(parts, shape)
        self._scale: Array | None = None

    def expect(self, shape: tuple[int, ...]) -> None:
        """Learn the shape of the values."""
        if self.shape is not None and self.shape != shape:
            raise ValueError(f"these statistics are of values of shape {list(self.shape)}, not {list(shape)}")
        if self.shape is None:
            self.shape = shape
            self._begin()

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
        """How many values there were."""
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
        """The square root of the variance and a little more."""
        if self._scale is None:
            self._scale = np.sqrt(self.var + epsilon)
        return self._scale

    def own(self) -> Moments:
        """Return the moments of what was seen here."""
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
        """Take in all that was seen, here and elsewhere."""
        self.expect(total.mean.shape)
        self._elsewhere = total
        self._begin()

    def hear(self, elsewhere: Moments) -> None:
        """Take in what all others have seen."""
        self.expect(elsewhere.mean.shape)
        self.own()
        self._elsewhere = elsewhere
        self._look()

    def state(self) -> dict[str, Any]:
        """Everything, to go on from elsewhere bit by bit."""
        self.own()
        return {name: as_tensors(one) for name, one in zip(_PARTS, (self._own, self._now, self._elsewhere))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        own, now, elsewhere = (as_moments(state[name]) for name in _PARTS)
        assert own is not None
        assert now is not None
        self.expect(now.mean.shape)
        self._new, self._own, self._now, self._elsewhere, self._scale = [], own, now, elsewhere, None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, as a worker gets it: what was seen here was seen elsewhere there."""
        self.own()
        seen = [one for one in (self._elsewhere, self._own) if one is not None]
        return {"name": self.name, "shape": self.shape, "elsewhere": merged(seen, self.shape or ())}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.name, self.shape, self._elsewhere = state["name"], state["shape"], state["elsewhere"]
        self._begin()


class LearnedStatistics:
    """The statistics of one transform by key. Made here they are known here by their number; copies of it are not."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.found: dict[Key, RunningStatistics] = {}
        _here[self.id] = self

    def of(self, key: Key) -> RunningStatistics:
        """Those of this key, which begin when they are asked for."""
        return self.found.setdefault(key, RunningStatistics((self.id, key)))


class StatisticsPool:
    """What each worker has seen, put together for the others, and for whoever made the statistics here."""

    def __init__(self) -> None:
        self._seen: dict[Name, dict[int, Moments]] = {}  # by statistics and worker
        self._former: dict[Name, Moments] = {}  # what was seen before, and by workers that are gone
        self.version = 0

    def report(self, worker: int, seen: Mapping[Name, Moments]) -> None:
        """A worker has seen so much in all."""
        for name, moments in seen.items():
            home = _here.get(name[0])
            mine = None if home is None else home.of(name[1])
            if mine is not None and name not in self._former:
                mine.expect(moments.mean.shape)  # first: what is sent on before others report has that shape too
                self._former[name] = mine.__getstate__()["elsewhere"]  # what it had seen before it was sent
            self._seen.setdefault(name, {})[worker] = moments
            if mine is not None:
                mine.adopt(self.total(name))
        self.version += bool(seen)

    def retire(self, worker: int) -> None:
        """A worker is gone; another begins to count in its place."""
        for name, seen in self._seen.items():
            if worker in seen:
                gone = seen.pop(worker)
                self._former[name] = self._former[name] + gone if name in self._former else gone

    def total(self, name: Name, *, without: int | None = None) -> Moments:
        """What all have seen, but for one; workers are added in the order of their numbers."""
        seen = [moments for worker, moments in sorted(self._seen[name].items()) if worker != without]
        former = [self._former[name]] if name in self._former else []
        shape = next(iter([*former, *self._seen[name].values()])).mean.shape
        return merged([*former, *seen], shape)

    def for_worker(self, worker: int) -> dict[Name, Moments]:
        """Return what the other workers have seen, by name."""
        return {name: self.total(name, without=worker) for name in self._seen}

    def former(self) -> list[Any]:
        """What none of the workers will tell, as plain tensors, in the order of their statistics."""
        return [as_tensors(self._former.get(name)) for name in self._seen]

    def load(self, former: Sequence[Any], reports: Mapping[int, Mapping[Name, Moments]]) -> None:
        """Go on from there, with what each worker says it has seen."""
        self._seen, self._former = {}, {}
        for worker, seen in reports.items():
            for name, kept in zip(seen, former):
                self._former[name] = as_moments(kept) or merged([], seen[name].mean.shape)
            self.report(worker, seen)
