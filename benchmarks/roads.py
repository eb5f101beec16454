"""Far roads against shared memory: the same workers and envs, in one interleaved run.

    python -m benchmarks.roads [--seconds 2] [--rounds 3] [--only process distributed rpc ray]

Two workers with 16 CartPole lanes each, first come first served. Ratios are to the workers in processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import MultiAsyncCollector
from reap.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from reap.envs import GymEnv, SerialEnv

LANES, STEPS, WORKERS = 16, 128, 2
ROADS: dict[str, Any] = {
    "process": MultiAsyncCollector,
    "distributed": DistributedCollector,
    "rpc": RPCCollector,
    "ray": RayCollector,
}
EXTRA: dict[str, dict[str, Any]] = {
    "ray": {
        "ray_init_config": {"num_cpus": WORKERS, "object_store_memory": 200 * 2**20, "log_to_driver": False},
    }
}


class Greedy(nn.Module):
    """A small policy, so that what is measured is the way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def make_env() -> Any:
    return SerialEnv(LANES, [lambda: GymEnv("CartPole-v1")] * LANES)


def speed(collector: Any, seconds: float) -> float:
    """Frames per second over so many seconds, after two batches that do not count."""
    for _ in range(2):
        collector.next()
    began, frames = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        frames += collector.next().numel()
    return frames / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(ROADS), choices=list(ROADS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    policy = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    speeds: dict[str, list[float]] = {name: [] for name in args.only}
    for _ in range(args.rounds):
        for name in args.only:
            options = {"frames_per_batch": LANES * STEPS, **EXTRA.get(name, {})}
            with ROADS[name]([make_env] * WORKERS, policy, **options) as collector:
                speeds[name].append(speed(collector, args.seconds))
    usual = statistics.median(speeds.get("process") or [float("nan")])
    for name, each in speeds.items():
        middle = statistics.median(each)
        print(f"{name:12} {middle:10,.0f} frames/s   {middle / usual:5.2f} of processes   ({len(each)} rounds)")


if __name__ == "__main__":
    main()
