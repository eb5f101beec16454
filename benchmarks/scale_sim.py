"""How far it goes: workers by the thousand, simulated event by event with costs that were measured.

    worker: make a rollout ─► slot ─► network (into the learner's machine) ─► consumer ─► slot is free again
    weights: learner ─► network (out of its machine) ─► all workers, one by one, down a tree, or node by node

    python -m benchmarks.scale_sim [--most 10000] [--picture docs/scaling.png] [--calibrate]

A rollout waits where something is busy: nothing here is a formula for throughput. `--calibrate` measures the costs of
this machine again, in seconds of CPU, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes. The defaults are what `--calibrate` found, and a network of 10 Gb/s."""

    per_batch: float = 1300e-6  # of the consumer's CPU, whatever is in the batch
    per_byte: float = 0.4e-9  # of the consumer's CPU: receiving
    network: float = 1.2e9  # bytes per second, each way, of every machine
    latency: float = 100e-6  # of the network, one way


@dataclass(frozen=True)
class Work:
    """What is collected."""

    frame_bytes: int = 100
    frames: int = 2048  # of a rollout
    rate: float = 10_000.0  # frames per second of a worker that never waits
    weights: int = 40_000_000  # bytes
    update_every: float = 1.0  # seconds between two versions
    slots: int = 4  # of a worker


@dataclass(frozen=True)
class Shape:
    """Who is connected to whom."""

    name: str
    node: int = 1  # workers that deliver one batch together, and get weights together
    fan_out: int | None = None  # to how many everybody sends weights; None: the learner sends to all
    learners: int = 1  # machines that learn together, each with a collector and its share of the nodes

    def depth_times(self, receivers: int, costs: Costs, size: int) -> tuple[float, float]:
        """Seconds until the last has a version, and those the learner's machine is busy with sending it."""
        one = size / costs.network
        if self.fan_out is None:
            return receivers * one + costs.latency, receivers * one
        return arrival(receivers, self.fan_out, one, costs.latency), min(self.fan_out, receivers) * one


STAR = Shape("each by itself")
TREE = Shape("weights down a tree", fan_out=2)
NODES = Shape("64 workers a node, tree", node=64, fan_out=2)
LEARNERS = Shape("the same, 8 learners", node=64, fan_out=2, learners=8)
SHAPES = (STAR, TREE, NODES, LEARNERS)


def arrival(receivers: int, fan_out: int, one: float, latency: float) -> float:
    """When the last of a tree has what takes `one` second to send; everybody sends to one below it after the other."""
    last = 0.0
    free: list[tuple[float, int]] = [(0.0, 0)]  # who can send next, and to how many it has sent
    for _ in range(receivers):
        at, sent = heapq.heappop(free)
        there = at + one + latency
        last = max(last, there)
        if sent + 1 < fan_out:
            heapq.heappush(free, (at + one, sent + 1))
        heapq.heappush(free, (there, 0))
    return last


class Server:
    """Serves one after the other, in the order in which they come."""

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def serve(self, at: float, seconds: float) -> float:
        """When it is done."""
        self.free = max(at, self.free) + seconds
        self.busy += seconds
        return self.free


def total_busy(servers: Sequence[Server]) -> float:
    """Seconds of work they were given."""
    return sum(server.busy for server in servers)


@dataclass(frozen=True)
class Result:
    """What came of it."""

    frames_per_second: float
    consumer: float  # share of the time it was busy
    network_in: float
    network_out: float
    delay: float  # seconds until every worker has a version
    wall: str  # what is full, or the workers

    def lag(self, work: Work) -> float:
        """Versions that are under way while one arrives."""
        return self.delay / work.update_every


def simulate(workers: int, shape: Shape, work: Work, costs: Costs, rollouts: int = 12) -> Result:
    """So many rollouts of each node, those of the first quarter not counted."""
    nodes = max(1, math.ceil(workers / shape.node))
    per_node = workers / nodes
    frames = work.frames * per_node
    size, make = frames * work.frame_bytes, work.frames / work.rate
    learners = min(shape.learners, nodes)
    consumers, ways_in = [Server() for _ in range(learners)], [Server() for _ in range(learners)]
    delay, sending = shape.depth_times(-(-nodes // learners), costs, work.weights)
    # Nodes do not begin all at once: each is somewhere in its first rollout.
    events = [(make * (i + 1) / nodes, i) for i in range(nodes)]
    heapq.heapify(events)
    back: list[list[float]] = [[] for _ in range(nodes)]  # when the slots of a node that are under way come back
    made, total = 0, nodes * rollouts
    start, counted, end = 0.0, 0, 0.0
    while made < total:
        at, node = heapq.heappop(events)  # a rollout is made
        there = ways_in[node % learners].serve(at, size / costs.network) + costs.latency
        done = consumers[node % learners].serve(there, costs.per_batch + size * costs.per_byte)
        made += 1
        end = max(end, done)
        if made == total // 4:
            start, begun = done, (total_busy(consumers), total_busy(ways_in))
        elif made > total // 4:
            counted += 1
        under_way = back[node]
        heapq.heappush(under_way, done + costs.latency)
        free = at if len(under_way) < work.slots else max(at, heapq.heappop(under_way))
        heapq.heappush(events, (free + make, node))
    took = end - start
    now = (total_busy(consumers), total_busy(ways_in))
    consumer, inwards = ((b - a) / took / learners for a, b in zip(begun, now))
    busy = (consumer, inwards, sending / work.update_every)
    names = ("consumer", "network in", "network out")
    fullest = max(range(3), key=lambda i: busy[i])
    wall = names[fullest] if busy[fullest] > 0.95 else "workers"
    return Result(counted * frames / took, *busy, delay, wall)


def calibrate(batches: int = 200) -> Costs:
    """Of this machine: seconds of this process's CPU for a batch, and for a byte of one, over torch.distributed."""
    import warnings

    from benchmarks.remote import SCREENS, SIDE, Screens, Still, wrapped
    from reap.collectors.distributed import DistributedCollector
    from reap.testing import CountingEnv

    def cpu(makers: Sequence[Any], policy: Any, frames: int) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with DistributedCollector(makers, policy, frames_per_batch=frames) as collector:
                for _ in range(10):
                    collector.next()
                began = time.process_time()
                for _ in range(batches):
                    collector.next()
                return (time.process_time() - began) / batches

    small = cpu([lambda: CountingEnv((1000,), 0)], wrapped(Still(width=1)), 16)
    large = cpu([Screens], wrapped(Still(), "pixels"), SCREENS * 16)
    return replace(Costs(), per_batch=small, per_byte=max(0.0, large - small) / (2 * SCREENS * 16 * SIDE * SIDE * 3))


def counts(most: int) -> list[int]:
    """10, 30, 100 … up to so many."""
    found = [n for power in range(1, 8) for n in (10**power, 3 * 10**power) if n <= most]
    return found or [most]


CASES = {
    "vectors (100 bytes a frame)": Work(),
    "pixels (24 kB a frame)": Work(frame_bytes=24_600, frames=512, rate=2_000.0),
}


def sweep(most: int, costs: Costs) -> list[dict[str, Any]]:
    """Every case, shape and number of workers."""
    return [
        {"case": case, "shape": shape.name, "workers": n, "result": simulate(n, shape, work, costs)}
        for case, work in CASES.items()
        for shape in SHAPES
        for n in counts(most)
    ]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Frames per second and the delay of weights, by the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    colors = dict(zip((shape.name for shape in SHAPES), ("#c46a3a", "#4a6fa5", "#2f7d4f", "#8a5fa8")))
    for panel, case in zip(axes, CASES):
        work = CASES[case]
        for shape in SHAPES:
            mine = [r for r in rows if r["case"] == case and r["shape"] == shape.name]
            x, y = [r["workers"] for r in mine], [r["result"].frames_per_second for r in mine]
            panel.plot(x, y, "o-", ms=3, color=colors[shape.name], label=shape.name)
        n = sorted({r["workers"] for r in rows})
        panel.plot(n, [k * work.rate for k in n], "k--", lw=0.8, label="nobody waits")
        panel.set(xscale="log", yscale="log", xlabel="workers", ylabel="frames per second", title=case)
    case = next(iter(CASES))
    for shape in SHAPES:
        mine = [r for r in rows if r["case"] == case and r["shape"] == shape.name]
        axes[2].plot(
            [r["workers"] for r in mine], [r["result"].delay for r in mine], "o-", ms=3, color=colors[shape.name]
        )
    axes[2].axhline(CASES[case].update_every, color="black", lw=0.8, ls="--")
    axes[2].set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds", title="until all have 40 MB of weights")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10_000)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    args = parser.parse_args(arguments)
    costs = calibrate() if args.calibrate else Costs()
    print(f"consumer: {costs.per_batch * 1e6:.0f} µs a batch, {costs.per_byte * 1e9:.2f} ns a byte", end="; ")
    print(f"network: {costs.network / 1e9:.1f} GB/s, {costs.latency * 1e6:.0f} µs")
    rows = sweep(args.most, costs)
    for row in rows:
        r = row["result"]
        print(
            f"{row['case']:28} {row['shape']:24} {row['workers']:6,} workers {r.frames_per_second:14,.0f} frames/s   "
            f"consumer {r.consumer:4.0%}  in {r.network_in:4.0%}  out {r.network_out:6.0%}  "
            f"weights after {r.delay:8.3f} s   wall: {r.wall}"
        )
    if args.picture is not None:
        draw(rows, args.picture)
    return rows


if __name__ == "__main__":
    main()
