"""Remote workers beside workers that share memory, and peers on Ray.

    lanes     two workers with 16 CartPole lanes each, first come first served
    pixels    two workers with 32 lanes of 64×64×3 pixels each, in bytes per second
    weights   10 million parameters to one worker and to four, until all have acted with them: four beside one

Peers are TorchRL's RayCollector and RLlib's env runners. RLlib asks for an older gymnasium than reap is tested with:
`REAP_RLLIB` names an interpreter that has it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.board import REAP, Budget, Probe, Row, Workload, ratio
from benchmarks.envs_and_policies import Greedy
from benchmarks.interpreters import opened
from reap.collectors import MultiAsyncCollector, MultiCollector
from reap.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from reap.envs import GymEnv, SerialEnv
from reap.testing import CountingEnv

LANES, STEPS, WORKERS = 16, 128, 2
GROUP = "remote workers"
SCREENS, SIDE = 32, 64
TRANSPORTS: dict[str, Any] = {
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


def lanes(transport: str, seconds: float) -> float:
    """Frames per second."""
    options = {"frames_per_batch": LANES * STEPS, **EXTRA.get(transport, {})}
    with TRANSPORTS[transport]([make_env] * WORKERS, wrapped(Greedy()), **options) as collector:
        return speed(collector, seconds, lambda batch: int(batch.numel()))


def pixels(transport: str, seconds: float) -> float:
    """Bytes per second."""
    options = {"frames_per_batch": SCREENS * 16, **EXTRA.get(transport, {})}
    with TRANSPORTS[transport]([Screens] * WORKERS, wrapped(Still(), "pixels"), **options) as collector:
        return speed(collector, seconds, lambda batch: 2 * batch.numel() * SIDE * SIDE * 3)


def weights(transport: str, workers: int, updates: int = 12, parameters: int = 10_000_000) -> float:
    """Seconds from an update until all have acted with it, less those of a batch without one; the median."""
    options: dict[str, Any] = {"frames_per_batch": workers, "sync": True, **EXTRA.get(transport, {})}
    kind = TRANSPORTS[transport] if transport != "process" else MultiCollector
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


def torchrl_on_ray(seconds: float) -> float:
    """Frames per second of TorchRL's RayCollector."""
    from torchrl.collectors.distributed import RayCollector as Theirs
    from torchrl.envs import GymEnv as TheirEnv
    from torchrl.envs import SerialEnv as TheirLanes

    def made() -> Any:
        return TheirLanes(LANES, lambda: TheirEnv("CartPole-v1", categorical_action_encoding=True))

    options = {"frames_per_batch": LANES * STEPS, "total_frames": 10**9, "remote_configs": {"num_cpus": 0.1}}
    collector = Theirs([made] * WORKERS, wrapped(Greedy()), sync=False, **options)
    batches = iter(collector)
    try:
        next(batches)
        began, amount = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            amount += next(batches).numel()
        return amount / took
    finally:
        collector.shutdown()


def rllib(seconds: float) -> float:
    """Frames per second of RLlib's env runners, in an interpreter of its own."""
    with opened(os.environ["REAP_RLLIB"], "rllib_runners") as ask:
        ask(str(seconds))  # the first is for warming up
        return float(ask(str(seconds)))


def throughput(transport: str, kind: str, budget: Budget, workload: Workload) -> list[Row]:
    """A transport beside processes that share memory, in turns; on Ray beside peers too."""
    measure, unit = (lanes, "frames/s") if kind == "lanes" else (pixels, "bytes/s")
    seconds, rounds = (0.2, 1) if budget.scale < 1 else (2.0, 3)
    systems: dict[str, Callable[[float], float]] = {
        REAP: partial(measure, transport),
        "processes": partial(measure, "process"),
    }
    if transport == "ray" and kind == "lanes" and budget.peers:
        systems["TorchRL, Ray"] = torchrl_on_ray
        if "REAP_RLLIB" in os.environ:
            systems["RLlib"] = rllib
        else:
            print("    RLlib: REAP_RLLIB names no interpreter", flush=True)
    told: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            told[name].append(system(seconds))
    ratios = {
        name: ratio(zip(told[REAP], each), workload.aims.get(name)) for name, each in told.items() if name != REAP
    }
    speeds = {name: statistics.median(each) for name, each in told.items()}
    return [Row(GROUP, workload.name, unit, speeds, ratios, rounds)]


def travel(transport: str, budget: Budget, workload: Workload) -> list[Row]:
    """Weights to four workers beside weights to one."""
    small = {"updates": 3, "parameters": 1000} if budget.scale < 1 else {}
    pairs = [(weights(transport, 4, **small), weights(transport, 1, **small)) for _ in range(1 if small else 3)]
    four, one = (1e3 * statistics.median(each) for each in zip(*pairs))
    told = {"one": ratio(pairs, workload.aims.get("one"), at_most=True)}
    return [Row(GROUP, workload.name, "ms", {"one": one, REAP: four}, told, len(pairs))]


def workloads() -> list[Workload]:
    found: list[Workload] = []
    for transport, kind in TRANSPORTS.items():
        name = kind.__name__
        if transport == "process":
            continue
        found += [
            Probe(
                GROUP, f"{name}, CartPole, 2 × 16 lanes", board=False, measure=partial(throughput, transport, "lanes")
            ),
            Probe(GROUP, f"{name}, pixels 64×64×3", board=False, measure=partial(throughput, transport, "pixels")),
            Probe(GROUP, f"{name}, 10M parameters to 4 workers", board=False, measure=partial(travel, transport)),
        ]
    return found
