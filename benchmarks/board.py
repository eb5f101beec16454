"""The board: a workload is something to collect; systems collect it in turns; what is told are ratios within turns.

    Race      several systems make batches of the same work      seconds per frame, round by round
    Probe     figures that are not a race: start-up, idle CPU    whatever its function returns

A race has two parts: reap and the loop by hand alone, who are fast and close to each other, then all. The order changes
from round to round. A ratio is the median of the ratios of each round, with the quartiles as its spread: a machine that
is busy for a while is busy for both.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

REST = 0.03  # seconds without work after which a worker is taken to rest
REAP, HAND, TORCHRL = "reap", "by hand", "TorchRL"


class Missing(Exception):
    """A library or a device that a workload needs is not here."""


def nothing() -> None:
    """Close what needs no closing."""


@dataclass(frozen=True)
class Contender:
    """A system at work: `run` makes a batch of `frames`.

    One turn is `turn` batches. `ahead` batches may lie ready before anybody asks; they are taken away before a turn.
    """

    run: Callable[[], Any]
    frames: int
    close: Callable[[], Any] = nothing
    ahead: int = 0
    turn: int = 1


@dataclass(frozen=True)
class Ratio:
    """How many times another system's speed reap's is (of `at_most`: what reap takes, in units of the other's)."""

    value: float
    low: float
    high: float
    aim: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.aim is None or (self.value <= self.aim if self.at_most else self.value >= self.aim)


@dataclass
class Row:
    """A line of the board: figures by system, and reap's ratio to each of the others."""

    group: str
    name: str
    unit: str
    figures: dict[str, float]
    ratios: dict[str, Ratio]
    rounds: int = 0
    seconds: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)  # Python calls per frame
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it: four digits are more than a clock can tell."""
        return _rounded(asdict(self))

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Row:
        return Row(**{**told, "ratios": {who: Ratio(**ratio) for who, ratio in told["ratios"].items()}})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def ratio(pairs: Iterable[tuple[float, float]], aim: float | None = None, *, at_most: bool = False) -> Ratio:
    """Return the median of `a / b` over the rounds, and its quartiles."""
    each = sorted(a / b for a, b in pairs)
    low, _, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(statistics.median(each), low, high, aim, at_most)


# ---- workers that rest ----------------------------------------------------------------------------------------------


def descendants(pid: int | None = None) -> set[int]:
    """All processes below this one (Linux)."""
    found: set[int] = set()
    left = [os.getpid() if pid is None else pid]
    while left:
        parent = left.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    new = {int(word) for word in file.read().split()} - found
                found |= new
                left += new
    return found


def cpu_seconds(pids: set[int]) -> float:
    """What these processes have used so far, all their threads."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                    total += int(file.read().split()[0])
    return total / 1e9


def rest() -> None:
    """Wait until no worker of anybody works."""
    pids = descendants()
    before = cpu_seconds(pids)
    for _ in range(4000):  # a peer may need a minute for a batch; something is wrong with one that never rests
        time.sleep(REST)
        now = cpu_seconds(pids)
        if now - before < 0.05 * REST:
            return
        before = now


# ---- races ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """How long a race may take: seconds for each of its two parts, and rounds at least and at most."""

    seconds: float = 1.2
    least: int = 3
    most: int = 101
    scale: float = 1.0  # of a batch: 1/16 where only is asked whether it runs
    frames: int | None = None  # of each training script, in place of its own number
    peers: bool = False
    calls: bool = False


SCOREBOARD = Budget()
ALL = Budget(seconds=6.0, least=5, peers=True, calls=True)
QUICK = Budget(seconds=0.0, least=2, most=2, scale=1 / 16)


def race(
    runs: Mapping[str, Contender], seconds: float, *, least: int = 3, most: int = 101, workers: bool = False
) -> dict[str, list[float]]:
    """Return the seconds per frame of every contender, round by round, each round in another order."""
    for one in runs.values():
        for n in range(max(3, one.ahead)):  # every slot has been used once
            start = time.perf_counter()
            one.run()
            if n >= one.ahead and time.perf_counter() - start > 0.3:  # a slow one is warm
                break
    told: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    try:
        for r in range(most):
            if r >= least and time.perf_counter() - began > seconds:
                break
            for name in names[r % len(names) :] + names[: r % len(names)]:
                one = runs[name]
                if workers:
                    rest()
                for _ in range(one.ahead):
                    one.run()
                start = time.perf_counter()
                for _ in range(one.turn):
                    kept = one.run()
                told[name].append((time.perf_counter() - start) / (one.turn * one.frames))
                del kept
    finally:
        gc.enable()
    return told


def calls(run: Callable[[], Any]) -> int:
    """Return the number of Python calls of one batch: exact, whatever the machine is doing."""
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Workload:
    """What every line of the table has. On the board are those with an aim, and those that say so."""

    group: str
    name: str
    aims: Mapping[str, float] = field(default_factory=dict)
    board: bool = True  # a part of `make bench`; others are for `make bench-all`

    def rows(self, budget: Budget) -> list[Row]:
        raise NotImplementedError


@dataclass(frozen=True)
class Race(Workload):
    """Systems that make the same batches; `build` takes the scale of a batch and returns them by name.

    `peers` are built for `--all` only. Where `subject` is not reap, it is reap in another way.
    """

    build: Callable[[float], dict[str, Contender]] = field(default=lambda scale: {})
    peers: Callable[[float], dict[str, Contender]] | None = None
    workers: bool = False  # processes work for somebody: everybody rests before a turn
    builds: int = 1  # two processes that do the same differ by some percent for life: how often all are started anew
    subject: str = REAP
    unit: str = "frames/s"
    note: str = ""

    def rows(self, budget: Budget) -> list[Row]:
        began = time.perf_counter()
        told: dict[str, list[tuple[float, float]]] = {}
        figures: dict[str, list[float]] = {}
        counted: dict[str, float] = {}
        for _ in range(self.builds if budget.scale == 1 else 1):
            runs = self.build(budget.scale)
            try:
                if self.peers is not None and budget.peers:
                    runs |= self.peers(budget.scale)
                for seconds in self._heats(runs, budget):
                    for name, each in seconds.items():
                        figures.setdefault(name, []).extend(each)
                        if name != self.subject:
                            told.setdefault(name, []).extend(zip(each, seconds[self.subject]))
                if budget.calls and not self.workers:
                    counted = {name: calls(one.run) / one.frames for name, one in runs.items()}
            finally:
                for one in runs.values():
                    one.close()
        ratios = {name: ratio(pairs, self.aims.get(name)) for name, pairs in told.items()}
        speeds = {name: 1 / statistics.median(each) for name, each in figures.items()}
        took, rounds = time.perf_counter() - began, len(figures[self.subject])
        return [Row(self.group, self.name, self.unit, speeds, ratios, rounds, took, counted, self.note)]

    def _heats(self, runs: Mapping[str, Contender], budget: Budget) -> Iterator[dict[str, list[float]]]:
        """The fast ones first, among themselves; then everybody, if there are others."""
        fast = {name: one for name, one in runs.items() if name in (self.subject, HAND)}
        for these in [fast] * (len(fast) > 1) + [runs] * (len(fast) < len(runs) or len(runs) == 1):
            yield race(these, budget.seconds, least=budget.least, most=budget.most, workers=self.workers)


@dataclass(frozen=True)
class Probe(Workload):
    """Figures of another kind: `measure` takes the budget and the workload, and returns the lines."""

    measure: Callable[[Budget, Workload], Sequence[Row]] = field(default=lambda budget, workload: [])

    def rows(self, budget: Budget) -> list[Row]:
        began = time.perf_counter()
        found = list(self.measure(budget, self))
        for row in found:
            row.seconds = row.seconds or (time.perf_counter() - began) / len(found)
        return found
