"""reap bench: measure how fast an env and a policy are, and which collector setting is fastest for them.

    reap bench CartPole-v1
    reap bench my_env.py:make --policy my_policy.py:make --seconds 5

Prints frames per second of the env alone and of each setting, how the time of each was spent, and the fastest setting
as a line of code. `--plot` draws a chart.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from reap.cli.named import add_policy_arguments, env_factory, in_lanes, policy_of
from reap.cli.show import new_figure
from reap.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector

_STEPS = 64  # steps of each lane per batch
_WIDTH = 40


class Setting(NamedTuple):
    """One way to collect: its name, the function that makes its collector, and the code that a user writes."""

    name: str
    make: Callable[[], Any]
    code: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("env", metavar="ENV", help="a Gymnasium id, or FILE.py:MAKE")
    add_policy_arguments(parser)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes to try (default: as many as there are cores)")
    parser.add_argument("--plot", metavar="FILE", help="draw it, as a png, svg or pdf file (reap[demo])")


def run(args: argparse.Namespace) -> int:
    """Measure each setting for a while, and print the results."""
    make, policy = env_factory(args.env), policy_of(args)
    workers = args.workers or len(os.sched_getaffinity(0))
    written = f'"{args.env}"' if ":" not in args.env else args.env.rpartition(":")[2]
    found: dict[Setting, float] = {}
    shares: dict[Setting, str] = {}
    alone, _ = _rate(lambda: Collector(make, None, frames_per_batch=10 * _STEPS), args.seconds)
    print(f"  {'env with random actions':28} {alone:12,.0f} frames/s")
    if policy is not None:
        both, _ = _rate(lambda: Collector(make, policy, frames_per_batch=10 * _STEPS), args.seconds)
        share = max(0.0, 1 - both / alone)
        print(f"  {'env and policy':28} {both:12,.0f} frames/s: the policy takes {share:.0%} of the time with one lane")
    print()
    for way in _ways(make, policy, workers, written):
        found[way], shares[way] = _rate(way.make, args.seconds)
    best = max(found, key=lambda way: found[way])
    for way, rate in found.items():
        bar = "█" * max(1, round(_WIDTH * rate / found[best]))
        print(f"  {way.name:28} {rate:12,.0f} frames/s  {bar}{' ◄ best' if way is best else ''}")
        print(f"  {'':28} {shares[way]}")
    if args.plot is not None:
        _draw(args.plot, args.env, {way.name: rate for way, rate in found.items()})
    print(f"\n{best.code}")
    return 0


def _rate(make: Callable[[], Any], seconds: float) -> tuple[float, str]:
    """Return frames per second after the first batch, and how the workers' time was spent, as text."""
    with make() as collector:
        collector.next()
        before, began = collector.stats()["frames"], time.perf_counter()
        while time.perf_counter() - began < seconds:
            collector.next()
        ended, stats = time.perf_counter(), collector.stats()
    spent = {name: stats[f"{name}_seconds"] or 0.0 for name in ("env", "policy", "transport", "loop")}
    whole = max(sum(spent.values()), 1e-9)
    shares = " · ".join(f"{name} {part / whole:.0%}" for name, part in spent.items())
    return (stats["frames"] - before) / (ended - began), shares


def _draw(path: str, env: str, rates: dict[str, float]) -> None:
    figure = new_figure(8, 0.5 * len(rates) + 1.2)
    axes = figure.subplots()
    bars = axes.barh(list(rates), list(rates.values()))
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="frames per second", title=env)
    figure.tight_layout()
    figure.savefig(path)


def _ways(make: Callable[[], Any], policy: Any, workers: int, env: str) -> list[Setting]:
    """Return the settings to measure. `env` is the env's name in the printed code."""
    act = "None" if policy is None else "policy"
    factory = f"lambda: GymEnv({env})" if env.startswith('"') else env
    ways: list[Setting] = []
    made: Callable[[], Any]
    for lanes in (1, 8, 32):
        frames = lanes * _STEPS
        text = factory if lanes == 1 else f"SerialEnv({lanes}, {factory})"
        made = functools.partial(Collector, in_lanes(lanes, make), policy, frames_per_batch=frames)
        code = f"Collector({text}, {act}, frames_per_batch={frames})"
        ways.append(Setting(f"this process, {lanes} lane{'s' * (lanes > 1)}", made, code))
    for lanes in (1, 8):
        frames = workers * lanes * _STEPS
        text = factory if lanes == 1 else f"lambda: SerialEnv({lanes}, {factory})"
        made = functools.partial(MultiSyncCollector, [in_lanes(lanes, make)] * workers, policy, frames_per_batch=frames)
        code = f"MultiSyncCollector([{text}] * {workers}, {act}, frames_per_batch={frames})"
        ways.append(Setting(f"{workers} processes, {lanes} lane{'s' * (lanes > 1)} each", made, code))
    if policy is not None:
        count, frames = 4 * workers, 4 * workers * _STEPS
        made = functools.partial(AsyncBatchedCollector, [make] * count, policy, frames_per_batch=frames)
        code = f"AsyncBatchedCollector([{factory}] * {count}, {act}, frames_per_batch={frames})"
        ways.append(Setting(f"{count} envs, one batched policy", made, code))
    return ways
