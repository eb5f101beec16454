"""Two worker processes: reap beside an expert's hand-written loop, TorchRL and other peers.

    MultiSync, MultiAsync, ParallelEnv: reap / by hand, and reap / each peer that is installed
    weights: one update / one copy of their bytes       start-up: 8 workers / 1       idle workers: seconds of CPU

Before the turn of one whose workers run ahead, what lies ready is taken away; everybody waits until all workers rest.
Sample Factory and PufferLib ask for an older gymnasium and numpy than reap is tested with: `REAP_SAMPLE_FACTORY` and
`REAP_PUFFERLIB` name interpreters that have them. They do not rest between their turns, so they run alone, after reap.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import peers, processes_by_hand
from benchmarks.board import (
    HAND,
    REAP,
    REST,
    TORCHRL,
    Budget,
    Contender,
    Probe,
    Race,
    Ratio,
    Row,
    Workload,
    cpu_seconds,
    descendants,
    race,
    ratio,
    rest,
)
from benchmarks.envs_and_policies import Case, LargePolicy
from benchmarks.interpreters import opened
from benchmarks.peers import VECTOR_ENVS
from reap._system.fork_server.client import kept_fork_server
from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import GymEnv, ParallelEnv, SerialEnv

WORKERS = 2
GROUP = "two worker processes"

# ---- contenders -----------------------------------------------------------------------------------------------------


def hand(case: Case, kind: str, turn: int) -> Contender:
    if kind == "async":
        loop = processes_by_hand.Async(case, WORKERS)
        return Contender(loop, case.frames, loop.close, 2 * WORKERS, turn)
    made = (processes_by_hand.Sync if kind == "sync" else processes_by_hand.Central)(case, WORKERS)
    return Contender(made, WORKERS * case.frames, made.close, turn=turn)


def reap(case: Case, kind: str, turn: int = 1, *, probabilistic: bool = False, **options: Any) -> Contender:
    def lane() -> GymEnv:
        return GymEnv(case.make(), categorical_action_encoding=True)

    lanes, policy = case.lanes, case.policy(probabilistic=probabilistic)
    collector: Any
    if kind == "central":
        frames = WORKERS * case.frames
        env = ParallelEnv(WORKERS * lanes, lane, num_workers=WORKERS)
        collector = Collector(env, policy, frames_per_batch=frames)
    else:
        frames = WORKERS * case.frames if kind == "sync" else case.frames
        multi = MultiSyncCollector if kind == "sync" else MultiAsyncCollector
        collector = multi([lambda: SerialEnv(lanes, lane)] * WORKERS, policy, frames_per_batch=frames, **options)
    ahead = 4 * WORKERS if kind == "async" else 0
    return Contender(iter(collector).__next__, frames, collector.shutdown, ahead, turn)


# ---- throughput -----------------------------------------------------------------------------------------------------

CARTPOLE = Case("CartPole-v1", "CartPole-v1", 16, 128)
CHEETAH = Case("HalfCheetah-v5", "HalfCheetah-v5", 4, 128, continuous=True)
PONG = Case("Pong 84×84×4", "ALE/Pong-v5", 4, 64)
KINDS = {"sync": "MultiSyncCollector", "async": "MultiAsyncCollector", "central": "ParallelEnv"}


def shorter(case: Case, scale: float) -> Case:
    return replace(case, steps=max(4, int(case.steps * scale)))


def plain(case: Case, kind: str, aim: float, turn: int, *, board: bool = True, peers: bool = False) -> Race:
    """An `nn.Module`, beside the loop by hand and, where asked for, peers."""

    def build(scale: float) -> dict[str, Contender]:
        short = shorter(case, scale)
        return {HAND: hand(short, kind, turn), REAP: reap(short, kind, turn)}

    def others(scale: float) -> dict[str, Contender]:
        return installed(shorter(case, scale), kind)

    name = f"{case.name}, 2 × {case.lanes} lanes, {KINDS[kind]}"
    return Race(GROUP, name, {HAND: aim}, board, build, others if peers else None, workers=True)


def installed(case: Case, kind: str) -> dict[str, Contender]:
    """The peers that are here."""
    makers: dict[str, Callable[[], Contender]]
    if kind == "central":
        makers = {name: lambda make=make: make(case, WORKERS) for name, make in VECTOR_ENVS.items()}  # type: ignore[misc]
    else:
        makers = {TORCHRL: lambda: peers.torchrl(case, WORKERS, sync=kind == "sync")}
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as missing:
            print(f"    {name}: not installed ({missing})", flush=True)
    return found


def with_actors(case: Case, kind: str, aim: float, turn: int) -> Race:
    """TorchRL's ProbabilisticActor with log-probabilities, as its users write policies."""

    def build(scale: float) -> dict[str, Contender]:
        short = shorter(case, scale)
        ours = reap(short, kind, turn, probabilistic=True)
        return {REAP: ours, TORCHRL: peers.torchrl(short, WORKERS, sync=kind == "sync", probabilistic=True)}

    name = f"{case.name}, 2 × {case.lanes} lanes, {KINDS[kind]}, ProbabilisticActor"
    return Race(GROUP, name, {TORCHRL: aim}, build=build, workers=True)


def that_restarts(case: Case, kind: str, turn: int) -> Race:
    """What `on_failure="restart"` costs while nobody fails: beside "raise"."""

    def build(scale: float) -> dict[str, Contender]:
        short = shorter(case, scale)
        return {"raise": reap(short, kind, turn), REAP: reap(short, kind, turn, on_failure="restart")}

    return Race(GROUP, f"{KINDS[kind]}, restart beside raise", {"raise": 0.99}, build=build, workers=True, builds=5)


def replaced(budget: Budget, workload: Workload) -> list[Row]:
    """From the death of a worker, which the kernel kills, to the first batch with rows of the one in its place."""
    case = replace(CARTPOLE, steps=max(4, int(8 * budget.scale)))
    policy, rounds, told = case.policy(probabilistic=False), 2 if budget.scale < 1 else 10, []
    makers = ["CartPole-v1"] * WORKERS
    collector = MultiSyncCollector(
        makers, policy, frames_per_batch=8 * WORKERS, on_failure="restart", max_restarts=None
    )
    try:
        for _ in range(rounds):
            collector.next()
            began = time.perf_counter()
            os.kill(collector._backend.workers[0].child.pid, signal.SIGKILL)
            found: Any = collector.next()
            while not found["collector", "cut"].any():
                found = collector.next()
            told.append(time.perf_counter() - began)
    finally:
        collector.shutdown()
    beside = ratio(((one, 1.0) for one in told), 1.0, at_most=True)
    return [Row(GROUP, workload.name, "s", {REAP: statistics.median(told)}, {"a second": beside}, rounds)]


# Peers with interpreters of their own: their scripts, what they are measured beside, and who names the interpreter.
ELSEWHERE = {
    "Sample Factory": ("sample_factory_sampler", "async", "REAP_SAMPLE_FACTORY"),
    "PufferLib": ("pufferlib_vector", "central", "REAP_PUFFERLIB"),
}


def elsewhere(budget: Budget, workload: Workload) -> list[Row]:
    """First reap's turns, then the peer's."""
    rows = []
    for name, (script, kind, variable) in ELSEWHERE.items():
        python = os.environ.get(variable)
        if python is None:
            print(f"    {name}: {variable} names no interpreter", flush=True)
            continue
        frames = max(16, int(16_384 * budget.scale))
        ours = reap(CARTPOLE, kind)
        ours = replace(ours, turn=max(1, frames // ours.frames))
        try:
            mine = race({REAP: ours}, 0.0, least=5, most=5, workers=True)[REAP]
        finally:
            ours.close()
        with opened(python, script) as ask:
            theirs = [float(ask(str(frames))) / frames for _ in range(5)]
        speeds = {REAP: 1 / statistics.median(mine), name: 1 / statistics.median(theirs)}
        told = {name: ratio(zip(theirs, mine))}
        rows.append(Row(GROUP, f"{workload.name}, {KINDS[kind]}", "frames/s", speeds, told, 5))
    return rows


# ---- weights --------------------------------------------------------------------------------------------------------


def weights(budget: Budget, workload: Workload) -> list[Row]:
    """One update against one copy of the bytes, and what many updates cost the workers, who go on meanwhile."""
    case, quick = replace(CARTPOLE, steps=max(8, int(256 * budget.scale))), budget.scale < 1
    torch.manual_seed(0)
    policy = LargePolicy(1000) if quick else LargePolicy()
    source = torch.cat([p.detach().reshape(-1) for p in policy.parameters()])
    target = torch.empty_like(source).copy_(source)

    def env() -> SerialEnv:
        return SerialEnv(case.lanes, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))

    collector = MultiAsyncCollector([env] * WORKERS, policy, frames_per_batch=case.frames)
    actions: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "update": collector.update_policy_weights_,
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    batches, rounds = iter(collector), 2 if quick else 40
    try:
        for r in range(3 + rounds):
            next(batches)  # the workers have something to do
            for name in sorted(actions, reverse=bool(r % 2)):
                began = time.perf_counter()
                actions[name]()
                if r >= 3:
                    seconds[name].append(time.perf_counter() - began)
        copied, updated = (statistics.median(seconds[name]) for name in ("copy", "update"))
        speed = hammered(collector, actions, case.frames, rounds=3, seconds=copied)
    finally:
        collector.shutdown()
    beside = ratio(zip(seconds["update"], seconds["copy"]), 1.5, at_most=True)
    share = (
        speed["update"] / speed["copy"]
    )  # a process that copies as many bytes for itself takes as much of the machine
    size = f"{source.numel() / 1e6:.0f}M parameters"
    return [
        Row(
            *(GROUP, f"update_policy_weights_(), {size}", "ms"),
            {"one copy": copied * 1e3, REAP: updated * 1e3},
            {"one copy": beside},
            rounds,
        ),
        Row(
            *(GROUP, "workers while weights are updated again and again", "frames/s"),
            {REAP: speed["update"], "beside copies": speed["copy"], "undisturbed": speed["nothing"]},
            {"beside copies": Ratio(share, share, share)},
            3,
        ),
    ]


def hammered(
    collector: Any, actions: dict[str, Callable[[], Any]], frames: int, *, rounds: int, seconds: float
) -> dict[str, float]:
    """Frames per second of workers that never wait, while this process does something half of the time."""
    batches, ahead, count = iter(collector), 4 * WORKERS, 8
    for _ in range(ahead):
        next(batches)
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    repeats = max(1, round((time.perf_counter() - began) / count / 2 / seconds))
    told: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, act in ({"nothing": lambda: None} | actions).items():
            for n in range(ahead + count):
                if n == ahead:
                    began = time.perf_counter()
                for _ in range(repeats):
                    act()
                next(batches)
            told.setdefault(name, []).append(count * frames / (time.perf_counter() - began))
    return {name: statistics.median(speeds) for name, speeds in told.items()}


# ---- start-up and rest ----------------------------------------------------------------------------------------------

FIRST_BATCH = """
import time; began = time.perf_counter()
import torch, tensordict, gymnasium; imported = time.perf_counter()
from reap.collectors import Collector
next(iter(Collector("CartPole-v1", frames_per_batch=100)))
done = time.perf_counter(); print(imported - began, done - imported)
"""


def first_batch(budget: Budget, workload: Workload) -> list[Row]:
    """Seconds from a bare interpreter to the first batch: what is imported anyway, and reap's own."""
    command = [sys.executable, "-c", FIRST_BATCH]
    told = []
    for _ in range(1 if budget.scale < 1 else 3):
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        told.append([1e3 * float(word) for word in out.split()])
    imports, own = (statistics.median(each) for each in zip(*told))
    beside = ratio(((b, a) for a, b in told), at_most=True)
    return [Row(GROUP, workload.name, "ms", {"imports": imports, REAP: own}, {"imports": beside}, len(told))]


def start_up(budget: Budget, workload: Workload) -> list[Row]:
    """From the call of the constructor to the first batch: without the fork server that forks workers, and with it."""
    told: dict[tuple[int, str], list[float]] = {}
    policy = CARTPOLE.policy(probabilistic=False)
    rounds = 1 if budget.scale < 1 else 3
    for _ in range(rounds):
        for count in (1, 8):
            kept = kept_fork_server()
            if kept is not None:
                os.kill(kept[0], signal.SIGKILL)
                while kept_fork_server() is not None:
                    time.sleep(REST)
            for kind in ("cold", "warm"):
                began = time.perf_counter()
                collector = MultiSyncCollector(["CartPole-v1"] * count, policy, frames_per_batch=8 * count)
                next(iter(collector))
                told.setdefault((count, kind), []).append(time.perf_counter() - began)
                collector.shutdown()
    rows = []
    for kind, words, aim in (("cold", "first collector", 1.5), ("warm", "later ones", None)):
        figures = {who: 1e3 * statistics.median(told[count, kind]) for who, count in (("one", 1), (REAP, 8))}
        beside = ratio(zip(told[8, kind], told[1, kind]), aim, at_most=True)
        rows.append(Row(GROUP, f"{workload.name}, {words}", "ms", figures, {"one": beside}, rounds))
    return rows


def idle(budget: Budget, workload: Workload) -> list[Row]:
    """What workers use while the consumer sleeps: after a batch (sync), with all slots full (async)."""
    rows, seconds = [], 0.5 if budget.scale < 1 else 2.0
    for kind in ("sync", "async"):
        before = descendants()
        one = reap(replace(CARTPOLE, steps=32), kind)
        try:
            one.run()
            rest()
            workers = descendants() - before
            used = cpu_seconds(workers)
            time.sleep(seconds)
            share = (cpu_seconds(workers) - used) / seconds
        finally:
            one.close()
        told = {"a core": Ratio(share, share, share, 0.01, at_most=True)}
        rows.append(Row(GROUP, f"{workload.name}, {KINDS[kind]}", "cores", {REAP: share}, told, 1))
    return rows


# ---- the table ------------------------------------------------------------------------------------------------------


def workloads() -> list[Workload]:
    return [
        Probe(GROUP, "from a bare interpreter to the first batch", measure=first_batch),
        Probe(GROUP, "start-up of 8 workers beside 1", {"one": 1.5}, measure=start_up),
        plain(CARTPOLE, "sync", 0.85, 4, peers=True),
        plain(replace(CARTPOLE, steps=256), "async", 0.90, 6, peers=True),
        plain(CARTPOLE, "central", 0.80, 2, peers=True),
        plain(CHEETAH, "sync", 0.90, 2, board=False),
        plain(CHEETAH, "async", 0.90, 6, board=False),
        plain(PONG, "sync", 0.90, 1, board=False),
        plain(PONG, "async", 0.90, 4, board=False),
        with_actors(CARTPOLE, "sync", 12.0, 4),
        with_actors(replace(CARTPOLE, steps=256), "async", 12.0, 6),
        Probe(GROUP, "CartPole-v1, 2 × 16 lanes, peers elsewhere", board=False, measure=elsewhere),
        Probe(GROUP, "update of weights", {"one copy": 1.5}, measure=weights),
        that_restarts(CARTPOLE, "sync", 4),
        that_restarts(replace(CARTPOLE, steps=256), "async", 6),
        Probe(GROUP, "a worker that was killed delivers again", {"a second": 1.0}, measure=replaced),
        Probe(GROUP, "idle workers", {"a core": 0.01}, measure=idle),
    ]
