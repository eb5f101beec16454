"""Diagnosis: finds what limits the speed of a run, and suggests what to try, in one line.

learner      batches are ready before the learner takes them
stragglers   synchronous workers wait for the slowest of them
transport    workers and learner are idle: rollouts are so short that transferring them takes the time
policy, env  the policy or the env takes most of the busiest worker's time
limiter      workers that write to a buffer by themselves have to rest
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("env", "policy", "loop", "transport", "wait")
# Shares of time. `_MUCH`: above it, a part is the limit. `_IDLE`: workers idle for longer wait for the learner.
# `_BEHIND`: workers that are busy for less than this part of the slowest one's time wait for it.
_MUCH, _IDLE, _BEHIND = 0.5, 0.4, 0.7
_LANES = 32  # with this many lanes a policy's cost per frame is small


@dataclass(frozen=True)
class Times:
    """One worker: its lanes, the steps of a rollout, and the shares of its time that each of `PARTS` takes."""

    index: int
    lanes: int
    steps: int
    shares: Sequence[float]

    @property
    def env(self) -> float:
        return self.shares[0]

    @property
    def policy(self) -> float:
        return self.shares[1]

    @property
    def overhead(self) -> float:
        """The share of the loop itself and of transferring rollouts."""
        return self.shares[2] + self.shares[3]

    @property
    def busy(self) -> float:
        return sum(self.shares[:4])


@dataclass(frozen=True)
class Diagnosis:
    """The limit of a run ("" if it is not known yet), its share of the time, and a sentence about it."""

    limit: str
    share: float
    text: str


def diagnose(
    workers: Sequence[Times],
    *,
    learner: float | None,
    in_step: bool | None,
    frames_per_batch: int,
    cores: int,
) -> Diagnosis:
    """Return what limits a run. `learner`: the share of time the learner was busy; None: it takes no batches."""
    known = [one for one in workers if one.busy > 0]
    if not known:
        return Diagnosis("", 0.0, "nothing is known yet: no worker has finished a rollout")
    busiest = max(known, key=lambda one: one.busy)
    if learner is not None and learner > _MUCH and (in_step is None or busiest.busy < 1 - _IDLE):
        return _slow_learner(learner, in_step)
    if learner is None and busiest.busy < 1 - _MUCH:
        share = 1 - busiest.busy
        return Diagnosis(
            "limiter", share, f"workers rest {share:.0%} of the time: the buffer's limiter, or a pause, holds them back"
        )
    others = [one.busy for one in known if one is not busiest]
    if in_step and others and busiest.busy > _IDLE and statistics.median(others) < _BEHIND * busiest.busy:
        return _stragglers(busiest, statistics.median(others), learner or 0.0)
    share = max(1 - busiest.busy - (learner or 0.0), 0.0) if in_step is not None else 0.0
    if share + busiest.overhead > max(busiest.env, busiest.policy):
        return _transport(share + busiest.overhead, busiest, frames_per_batch)
    return _slow_policy(busiest, len(known)) if busiest.policy > busiest.env else _slow_env(busiest, len(known), cores)


def _slow_learner(share: float, in_step: bool | None) -> Diagnosis:
    way = "fewer workers would do, or a faster update"
    if in_step is not False:
        way = "MultiAsyncCollector, or start() with a replay buffer, collects meanwhile"
    return Diagnosis("learner", share, f"the learner takes {share:.0%} of the time, and workers wait for it: {way}")


def _stragglers(slowest: Times, others: float, learner: float) -> Diagnosis:
    times = slowest.busy / max(others, 1e-9)
    waited = max(1 - others - learner, 0.0)
    return Diagnosis(
        "stragglers",
        waited,
        f"worker {slowest.index} takes {times:.1f} times as long as the others, who wait for it {waited:.0%} of the "
        f"time: try MultiAsyncCollector, or preemptive_threshold",
    )


def _transport(share: float, worker: Times, frames: int) -> Diagnosis:
    return Diagnosis(
        "transport",
        share,
        f"handing over rollouts takes {share:.0%} of the time: they are {worker.steps} steps of {worker.lanes} "
        f"{'lane' if worker.lanes == 1 else 'lanes'}; try frames_per_batch={frames * 8:,}, or more lanes per worker",
    )


def _slow_policy(worker: Times, workers: int) -> Diagnosis:
    who = "a worker's" if workers > 1 else "the worker's"
    way = (
        f"try {_LANES} lanes per worker" if worker.lanes < _LANES else "try policy_device='cuda', or a smaller network"
    )
    return Diagnosis("policy", worker.policy, f"the policy takes {worker.policy:.0%} of {who} time: {way}")


def _slow_env(worker: Times, workers: int, cores: int) -> Diagnosis:
    who = "a worker's" if workers > 1 else "the worker's"
    way = f"try {cores} workers, one for each core" if workers < cores else "its own speed is the limit on this machine"
    return Diagnosis("env", worker.env, f"the env takes {worker.env:.0%} of {who} time: {way}")
