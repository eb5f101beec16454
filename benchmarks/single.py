"""`make bench`: one process. Contenders take turns inside one run; what is printed are medians of paired ratios.

python -m benchmarks.single [--rounds 7] [--only cartpole] [--no-torchrl]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Run, hand_written, with_reap, with_torchrl
from benchmarks.workloads import CASES, Case

RESULTS = Path("bench-results")
START_UP = """
import time; began = time.perf_counter()
import torch, tensordict, gymnasium; imported = time.perf_counter()
from reap.collectors import Collector
next(iter(Collector("CartPole-v1", frames_per_batch=100)))
done = time.perf_counter(); print(imported - began, done - imported)
"""


def race(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds per batch of every contender, round by round, each round in another order."""
    for run in runs.values():
        for _ in range(3):  # every slot has been used once
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            for name in names[r % len(names) :] + names[: r % len(names)]:
                began = time.perf_counter()
                kept = runs[name]()
                seconds[name].append(time.perf_counter() - began)
                del kept
    finally:
        gc.enable()
    return seconds


def calls(run: Run) -> int:
    """Python function calls of one batch: exact, whatever the machine is doing."""
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def measure(case: Case, *, probabilistic: bool, rounds: int, torchrl: bool) -> dict[str, Any]:
    runs: dict[str, Run] = {
        "hand": hand_written(case, probabilistic=probabilistic),
        "reap": with_reap(case, probabilistic=probabilistic),
    }
    theirs = with_torchrl(case, probabilistic=probabilistic) if torchrl else None
    fast = race(runs, max(rounds * 3, 15)) if theirs is not None else None
    if theirs is not None:
        runs["torchrl"] = theirs
    seconds = race(runs, rounds)
    if fast is not None:  # the fast pair also raced alone: more rounds, less drift between them
        seconds["hand"] += fast["hand"]
        seconds["reap"] += fast["reap"]
    paired = zip(seconds["hand"], seconds["reap"])
    result: dict[str, Any] = {
        "case": case.name,
        "policy": "probabilistic" if probabilistic else "plain",
        "frames": case.frames,
        "reap_to_hand": statistics.median(h / r for h, r in paired),
        "frames_per_second": {n: case.frames / statistics.median(s) for n, s in seconds.items()},
        "calls_per_frame": {n: calls(run) / case.frames for n, run in runs.items()},
    }
    result["calls_per_step_over_hand"] = (
        result["calls_per_frame"]["reap"] - result["calls_per_frame"]["hand"]
    ) * case.lanes
    if "torchrl" in runs:
        result["reap_to_torchrl"] = statistics.median(
            t / r for t, r in zip(seconds["torchrl"], seconds["reap"][: len(seconds["torchrl"])])
        )
    return result


def start_up() -> dict[str, float]:
    """Seconds from a bare interpreter to the first batch, medians of three."""
    runs = [
        [
            float(x)
            for x in subprocess.run(
                [sys.executable, "-c", START_UP], capture_output=True, text=True, check=True
            ).stdout.split()
        ]
        for _ in range(3)
    ]
    return {
        "importing torch, tensordict, gymnasium": statistics.median(r[0] for r in runs),
        "importing reap, building, first batch": statistics.median(r[1] for r in runs),
    }


def show(result: dict[str, Any]) -> str:
    fps, counted = result["frames_per_second"], result["calls_per_frame"]
    theirs = f"{result['reap_to_torchrl']:7.1f}×" if "reap_to_torchrl" in result else "      – "
    return (
        f"{result['case']:26} {result['policy']:13} {result['reap_to_hand']:8.2f} {theirs:>10}  "
        f"{fps['hand']:10,.0f} {fps['reap']:10,.0f} {fps.get('torchrl', 0):9,.0f}  "
        f"{counted['hand']:7.1f} {counted['reap']:7.1f} {counted.get('torchrl', 0):8.1f} "
        f"{result['calls_per_step_over_hand']:+8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-torchrl", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'case':26} {'policy':13} {'reap/hand':>8} {'reap/TorchRL':>10}  "
        f"{'hand fps':>10} {'reap fps':>10} {'TorchRL':>9}  "
        f"{'calls per frame: hand, reap, TorchRL':>24}  per step"
    )
    results = []
    for case in CASES:
        if args.only.lower() not in case.name.lower():
            continue
        for probabilistic in (False, True):
            result = measure(case, probabilistic=probabilistic, rounds=max(args.rounds, 5), torchrl=not args.no_torchrl)
            results.append(result)
            print(show(result), flush=True)
    starting = start_up()
    for what, seconds in starting.items():
        print(f"{what}: {seconds:.2f} s")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "single.json").write_text(json.dumps({"results": results, "start_up": starting}, indent=1))
    from benchmarks.chart import draw

    draw(results, RESULTS / "single.png")
    print(f"{RESULTS}/single.json, {RESULTS}/single.png")


if __name__ == "__main__":
    main()
