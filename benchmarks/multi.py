"""`make bench`, third part: two worker processes. reap beside an expert's hand-written loop, TorchRL and other peers.

    MultiSync, MultiAsync, ParallelEnv: reap / hand-written, and reap / each peer that is installed
    weights: one update / one copy of their bytes       start-up: 8 workers / 1       idle workers: seconds of CPU

Contenders take turns inside one run; what is printed are medians of paired ratios. Before the turn of one whose workers
run ahead, what lies ready is taken away; after it, everybody waits until all workers rest.

python -m benchmarks.multi [--rounds 31] [--only cartpole] [--no-torchrl] [--no-peers] [--quick]
                           [--sample-factory /path/to/python] [--pufferlib /path/to/python]

The last two name interpreters that have those libraries, which ask for an older gymnasium and numpy than reap is tested
with. They do not rest between their turns, so they run alone, after reap.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import torch

from benchmarks import by_hand, peers
from benchmarks.interpreters import opened
from benchmarks.peers import VECTOR_ENVS, Contender
from benchmarks.single import RESULTS
from benchmarks.workloads import Case, LargePolicy
from reap.children import kept_seedbed
from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import GymEnv, ParallelEnv, SerialEnv

WORKERS = 2
REST = 0.03  # seconds without work after which a worker is taken to rest

# ---- contenders -----------------------------------------------------------------------------------------------------


def hand(case: Case, kind: str) -> Contender:
    if kind == "async":
        loop = by_hand.Async(case, WORKERS)
        return Contender(loop, loop.close, case.frames, 2 * WORKERS)
    made = (by_hand.Sync if kind == "sync" else by_hand.Central)(case, WORKERS)
    return Contender(made, made.close, WORKERS * case.frames)


def reap(case: Case, kind: str, *, probabilistic: bool = False) -> Contender:
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
        collector = multi([lambda: SerialEnv(lanes, lane)] * WORKERS, policy, frames_per_batch=frames)
    return Contender(iter(collector).__next__, collector.shutdown, frames, 4 * WORKERS if kind == "async" else 0)


# ---- who works, and for how long ------------------------------------------------------------------------------------


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


def race(runs: dict[str, Contender], rounds: int, batches: int) -> dict[str, list[float]]:
    """Seconds per frame of every contender, round by round, each round in another order."""
    for one in runs.values():
        for _ in range(one.turn or 3):  # every slot has been used once
            one.run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            for name in names[r % len(names) :] + names[: r % len(names)]:
                one = runs[name]
                rest()
                for _ in range(one.ahead):
                    one.run()
                turn = one.turn or batches
                began = time.perf_counter()
                for _ in range(turn):
                    one.run()
                seconds[name].append((time.perf_counter() - began) / (turn * one.frames))
    finally:
        gc.enable()
    return seconds


# ---- throughput -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One case with two processes; `case.lanes` are those of each."""

    case: Case
    kind: str  # "sync", "async": the policy in the workers; "central": here
    target: float
    batches: int = 2  # of one turn; where workers run ahead, as many of each
    torchrl: float | None = None
    vector_envs: bool = False

    @property
    def name(self) -> str:
        what = {"sync": "MultiSync", "async": "MultiAsync", "central": "ParallelEnv"}[self.kind]
        return f"{self.case.name}, 2×{self.case.lanes}, {what}"


CARTPOLE = Case("CartPole-v1", "CartPole-v1", 16, 128)
CHEETAH = Case("HalfCheetah-v5", "HalfCheetah-v5", 4, 128, continuous=True)
PONG = Case("Pong 84×84×4", "ALE/Pong-v5", 4, 64)
PAIRS = [
    Pair(CARTPOLE, "sync", 0.85, 4, torchrl=12.0),
    Pair(replace(CARTPOLE, steps=256), "async", 0.90, 6, torchrl=12.0),
    Pair(CARTPOLE, "central", 0.80, vector_envs=True),
    Pair(CHEETAH, "sync", 0.90),
    Pair(CHEETAH, "async", 0.90, 6),
    Pair(PONG, "sync", 0.90, 1),
    Pair(PONG, "async", 0.90, 4),
]


def others(pair: Pair, case: Case, *, torchrl: bool, vector_envs: bool) -> Iterator[tuple[str, Contender | str]]:
    """Peers, or why they are not there."""
    if torchrl and pair.torchrl is not None:
        try:
            yield "TorchRL", peers.torchrl(case, WORKERS, sync=pair.kind == "sync")
        except ImportError as missing:
            yield "TorchRL", f"not installed ({missing})"
    if vector_envs and pair.vector_envs:
        for name, build in VECTOR_ENVS.items():
            try:
                yield name, build(case, WORKERS)
            except ImportError as missing:
                yield name, f"not installed ({missing})"


# Peers with interpreters of their own: their scripts, and what they are measured beside.
ELSEWHERE = {"Sample Factory": ("sample_factory_sampler", "async"), "PufferLib": ("pufferlib_vector", "central")}


def apart(name: str, python: str, reap: Contender, rounds: int, frames: int) -> dict[str, list[float]]:
    """Seconds per frame: first reap's turns, then the peer's."""
    seconds = race({"reap": reap}, rounds, max(1, frames // reap.frames))
    with opened(python, ELSEWHERE[name][0]) as ask:
        return seconds | {name: [float(ask(str(frames))) / frames for _ in range(rounds)]}


def measure(
    pair: Pair, *, rounds: int, quick: bool, torchrl: bool, vector_envs: bool, pythons: dict[str, str]
) -> list[dict[str, Any]]:
    case = replace(pair.case, steps=max(4, pair.case.steps // 16)) if quick else pair.case
    batches = min(pair.batches, 2) if quick else pair.batches
    results: list[dict[str, Any]] = []
    fast = {"hand": hand(case, pair.kind)}
    try:
        fast["reap"] = reap(case, pair.kind)
        seconds = race(fast, rounds, batches)
        results.append(compared(pair.name, "hand", pair.target, seconds))
        for name, peer in others(pair, case, torchrl=torchrl, vector_envs=vector_envs):
            if isinstance(peer, str):
                print(f"    {name}: {peer}", flush=True)
                continue
            try:
                seconds = race({"reap": fast["reap"], name: peer}, min(rounds, 3), batches)
            finally:
                peer.close()
            results.append(compared(pair.name, name, None, seconds))
        for name, python in pythons.items() if pair.case.name == CARTPOLE.name else ():
            if ELSEWHERE[name][1] == pair.kind:
                seconds = apart(name, python, fast["reap"], min(rounds, 5), 16 if quick else 16_384)
                results.append(compared(pair.name, name, None, {n: [statistics.median(s)] for n, s in seconds.items()}))
        if torchrl and pair.torchrl is not None:
            results.append(with_tensordicts(pair, case, rounds=min(rounds, 3), batches=batches))
    finally:
        for one in fast.values():
            one.close()
    return results


def with_tensordicts(pair: Pair, case: Case, *, rounds: int, batches: int) -> dict[str, Any]:
    """The same with TensorDictModules and log-probabilities, as TorchRL's users write policies."""
    sync = pair.kind == "sync"
    both = {"reap": reap(case, pair.kind, probabilistic=True)}
    try:
        both["TorchRL"] = peers.torchrl(case, WORKERS, sync=sync, probabilistic=True)
        seconds = race(both, rounds, batches)
    finally:
        for one in both.values():
            one.close()
    return compared(f"{pair.name}, probabilistic", "TorchRL", pair.torchrl, seconds)


def compared(case: str, over: str, target: float | None, seconds: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "case": case,
        "over": over,
        "target": target,
        "ratio": statistics.median(t / r for t, r in zip(seconds[over], seconds["reap"])),
        "frames_per_second": {name: 1 / statistics.median(s) for name, s in seconds.items()},
    }


# ---- weights --------------------------------------------------------------------------------------------------------


def weights(*, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """One update against one copy of the bytes, and what many updates cost the workers, who go on meanwhile."""
    case = replace(CARTPOLE, steps=8 if quick else 256)
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
    batches = iter(collector)
    try:
        for r in range(3 + 2 * rounds):
            next(batches)  # the workers have something to do
            for name in sorted(actions, reverse=bool(r % 2)):
                began = time.perf_counter()
                actions[name]()
                if r >= 3:
                    seconds[name].append(time.perf_counter() - began)
        copied, updated = (statistics.median(seconds[name]) for name in ("copy", "update"))
        speed = hammered(collector, actions, case.frames, rounds=3 if quick else max(3, rounds // 3), seconds=copied)
    finally:
        collector.shutdown()
    size = f"{source.numel() / 1e6:.0f}M parameters"
    return [
        {
            "case": f"update_policy_weights_(), {size}",
            "over": "one copy",
            "target": 1.5,
            "at_most": True,
            "ratio": statistics.median(u / c for u, c in zip(seconds["update"], seconds["copy"])),
            "milliseconds": {"one copy": copied * 1e3, "reap": updated * 1e3},
        },
        {
            "case": "workers while weights are updated again and again",
            "over": "copies",  # a process that copies as many bytes for itself takes as much of the machine
            "target": None,
            "ratio": speed["update"] / speed["copy"],
            "frames_per_second": {"reap": speed["update"], "copies": speed["copy"], "undisturbed": speed["nothing"]},
        },
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


def start_up(*, rounds: int) -> list[dict[str, Any]]:
    """From the call of the constructor to the first batch: without the seedbed that forks workers, and with it."""
    told: dict[tuple[int, str], list[float]] = {}
    policy = CARTPOLE.policy(probabilistic=False)
    for _ in range(rounds):
        for count in (1, 8):
            kept = kept_seedbed()
            if kept is not None:
                os.kill(kept[0], signal.SIGKILL)
                while kept_seedbed() is not None:
                    time.sleep(REST)
            for kind in ("cold", "warm"):
                began = time.perf_counter()
                collector = MultiSyncCollector(["CartPole-v1"] * count, policy, frames_per_batch=8 * count)
                next(iter(collector))
                told.setdefault((count, kind), []).append(time.perf_counter() - began)
                collector.shutdown()
    middle = {key: 1e3 * statistics.median(seconds) for key, seconds in told.items()}
    return [
        {
            "case": f"start-up of 8 workers, {kind}",
            "over": "one",
            "target": 1.5,
            "at_most": True,
            "ratio": statistics.median(b / a for a, b in zip(told[1, kind], told[8, kind])),
            "milliseconds": {"one": middle[1, kind], "reap": middle[8, kind]},
        }
        for kind in ("cold", "warm")
    ]


def idle(*, seconds: float) -> list[dict[str, Any]]:
    """What workers use while the consumer sleeps: after a batch (sync), with all slots full (async)."""
    results = []
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
        results.append(
            {"case": f"idle workers, {kind}", "over": "a core", "target": 0.01, "at_most": True, "ratio": share}
        )
    return results


# ---- the table ------------------------------------------------------------------------------------------------------


def good(result: dict[str, Any]) -> bool:
    ratio, target = result["ratio"], result["target"]
    return target is None or (ratio <= target if result.get("at_most") else ratio >= target)


def show(result: dict[str, Any]) -> str:
    bound = "" if result["target"] is None else f"{'≤' if result.get('at_most') else '≥'} {result['target']:.2f}"
    line = f"{result['case']:50} {result['over']:>10} {result['ratio']:8.3f} {bound:>8} "
    line += f"{'' if result['target'] is None else 'ok' if good(result) else 'missed':7}"
    for unit, told in (("frames_per_second", "frames/s"), ("milliseconds", "ms")):
        if unit in result:
            line += f" {', '.join(f'{name} {value:,.0f}' for name, value in result[unit].items())} {told}"
    return line


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--no-torchrl", action="store_true")
    parser.add_argument("--no-peers", action="store_true", help="neither TorchRL nor the others")
    parser.add_argument("--quick", action="store_true", help="short batches, few rounds: does it run?")
    parser.add_argument("--sample-factory", help="an interpreter that has it")
    parser.add_argument("--pufferlib", help="an interpreter that has it")
    args = parser.parse_args(arguments)
    given = {"Sample Factory": args.sample_factory, "PufferLib": args.pufferlib}
    pythons = {name: python for name, python in given.items() if python is not None}
    rounds = 2 if args.quick else max(args.rounds, 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []

    def wanted(name: str) -> bool:
        return args.only.lower() in name.lower()

    def tell(told: list[dict[str, Any]]) -> None:
        results.extend(told)
        print("\n".join(map(show, told)), flush=True)

    print(f"{'case':50} {'against':>10} {'ratio':>8} {'target':>8}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if wanted("start-up"):
                tell(start_up(rounds=1 if args.quick else 3))
            for pair in PAIRS:
                if not wanted(pair.name):
                    continue
                try:
                    pair.case.make().close()
                except (ImportError, gym.error.Error) as missing:
                    print(f"{pair.name}: not installed ({missing})")
                    continue
                torchrl = not (args.no_torchrl or args.no_peers)
                whom: dict[str, Any] = {"torchrl": torchrl, "vector_envs": not args.no_peers, "pythons": pythons}
                tell(measure(pair, rounds=rounds, quick=args.quick, **whom))
            if wanted("weights"):
                tell(weights(rounds=rounds, quick=args.quick))
            if wanted("idle"):
                tell(idle(seconds=0.5 if args.quick else 2.0))
    finally:
        torch.set_num_threads(threads)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "multi.json").write_text(json.dumps({"quick": args.quick, "results": results}, indent=1))
    from benchmarks.chart import draw_multi

    draw_multi(results, RESULTS / "multi.png")
    print(f"{RESULTS}/multi.json, {RESULTS}/multi.png")
    return results


if __name__ == "__main__":
    main()
