"""Far roads against shared memory: the same workers and envs, in one interleaved run.

    python -m benchmarks.roads [--rounds 3] [--only process distributed rpc ray] [--case lanes pixels weights]

lanes    two workers with 16 CartPole lanes each, first come first served; ratios are to the workers in processes
pixels   two workers with 32 lanes of 64×64×3 pixels each; bytes per second
weights  10 million parameters to one worker and to four, until all have acted with them; the ratio of the two
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.workloads import Greedy
from reap.collectors import MultiAsyncCollector, MultiCollector
from reap.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from reap.envs import GymEnv, SerialEnv
from reap.testing import CountingEnv

LANES, STEPS, WORKERS = 16, 128, 2
SCREENS, SIDE = 32, 64
ROADS: dict[str, Any] = {
    "process": MultiAsyncCollector,
    "distributed": DistributedCollector,
    "rpc": RPCCollector,
    "ray": RayCollector,
}
EXTRA: dict[str, dict[str, Any]] = {
    "ray": {
        "ray_init_config": {"num_cpus": 4, "object_store_memory": 500 * 2**20, "log_to_driver": False},
    }
}
CASES = ("lanes", "pixels", "weights")


class Still(nn.Module):
    """Always the same action, whatever it sees and however many parameters it has."""

    def __init__(self, parameters: int = 0, width: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self._width = width

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        lanes = observation.shape[: observation.ndim - (3 if observation.dtype is torch.uint8 else 1)]
        if self._width is not None:
            return torch.zeros(*lanes, self._width)
        return torch.zeros(lanes, dtype=torch.int64)


class Screens(gym.vector.VectorEnv[Any, Any, Any]):
    """Lanes of pixels that cost nothing to draw."""

    def __init__(self) -> None:
        self.num_envs = SCREENS
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, SCREENS)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, SCREENS)
        self._bank = np.random.default_rng(0).integers(0, 255, (4, SCREENS, SIDE, SIDE, 3)).astype(np.uint8)
        self._none, self._t = np.zeros(SCREENS, bool), 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._bank[0], {}

    def step(self, actions: Any) -> Any:
        self._t += 1
        return self._bank[self._t % 4], np.zeros(SCREENS, np.float32), self._none, self._none, {}


def make_env() -> Any:
    return SerialEnv(LANES, [lambda: GymEnv("CartPole-v1")] * LANES)


def wrapped(module: nn.Module, seen: str = "observation") -> TensorDictModule:
    return TensorDictModule(module, in_keys=[seen], out_keys=["action"])


def speed(collector: Any, seconds: float, size: Callable[[Any], int]) -> float:
    """So much of what `size` counts per second, after a few batches that do not count."""
    for _ in range(4):
        collector.next()
    began, amount = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        amount += size(collector.next())
    return amount / took


def lanes(road: str, seconds: float) -> float:
    """Frames per second."""
    options = {"frames_per_batch": LANES * STEPS, **EXTRA.get(road, {})}
    with ROADS[road]([make_env] * WORKERS, wrapped(Greedy()), **options) as collector:
        return speed(collector, seconds, lambda batch: int(batch.numel()))


def pixels(road: str, seconds: float) -> float:
    """Bytes per second."""
    options = {"frames_per_batch": SCREENS * 16, **EXTRA.get(road, {})}
    with ROADS[road]([Screens] * WORKERS, wrapped(Still(), "pixels"), **options) as collector:
        return speed(collector, seconds, lambda batch: 2 * batch.numel() * SIDE * SIDE * 3)


def weights(road: str, workers: int, updates: int = 12, parameters: int = 10_000_000) -> float:
    """Seconds from an update until all have acted with it, less those of a batch without one; the median."""
    options: dict[str, Any] = {"frames_per_batch": workers, "sync": True, **EXTRA.get(road, {})}
    kind = ROADS[road] if road != "process" else MultiCollector
    policy = wrapped(Still(parameters, width=1))
    with kind([lambda: CountingEnv((1000,), 0)] * workers, policy, **options) as collector:
        took: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * updates + 4):
            began = time.perf_counter()
            if turn % 2:
                collector.update_policy_weights_()
            collector.next()
            if turn >= 4:
                took[bool(turn % 2)].append(time.perf_counter() - began)
    return statistics.median(took[True]) - statistics.median(took[False])


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(ROADS), choices=list(ROADS))
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=CASES)
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, list[float]]] = {case: {road: [] for road in args.only} for case in args.case}
    for _ in range(args.rounds):
        for case in args.case:
            for road in args.only:
                if case == "weights":
                    found[case][road] += [weights(road, 1), weights(road, 4)]
                else:
                    found[case][road].append((lanes if case == "lanes" else pixels)(road, args.seconds))
    for case, roads in found.items():
        usual = statistics.median(roads.get("process") or [float("nan")])
        for road, each in roads.items():
            middle = statistics.median(each)
            if case == "lanes":
                told = f"{middle:10,.0f} frames/s   {middle / usual:5.2f} of processes"
            elif case == "pixels":
                told = f"{middle / 1e9:10.2f} GB/s       {middle / usual:5.2f} of processes"
            else:
                one, four = statistics.median(each[::2]), statistics.median(each[1::2])
                told = f"{one * 1e3:6.0f} ms to one, {four * 1e3:4.0f} ms to four   {four / one:5.2f} times"
            print(f"{case:8} {road:12} {told}   ({args.rounds} rounds)")
    return found


if __name__ == "__main__":
    main()
