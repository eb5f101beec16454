"""Ray's road: beside workers in processes, TorchRL's RayCollector and RLlib's env runners, in one interleaved run.

    frames    2 actors × 16 CartPole lanes × 128 steps, first come first served; ratios to reap on Ray
    pixels    batches of 64×64 colour frames from 2 actors to this process, in bytes per second
    weights   10M parameters until every actor has acted with them: 4 actors beside 1

python -m benchmarks.on_ray [--only frames pixels weights] [--seconds 1] [--rounds 5] [--rllib /path/to/python]

`--rllib` names an interpreter that has RLlib: it asks for an older gymnasium than reap is tested with.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.interpreters import opened
from benchmarks.workloads import Greedy
from reap.collectors import MultiAsyncCollector
from reap.collectors.distributed import RayCollector
from reap.envs import GymEnv, SerialEnv

CASES = ("frames", "pixels", "weights")
ACTORS, LANES, STEPS = 2, 16, 128
AHEAD = 8  # batches that may be ready before anybody asks
SIDE, PIXEL_LANES, PIXEL_STEPS = 64, 32, 16  # 12 MB of frames a batch: each as observation, and as successor
PARAMETERS = 10_000_000
SMALL = {"num_cpus": 0.1}


def cartpoles() -> Any:
    return SerialEnv(LANES, [lambda: GymEnv("CartPole-v1")] * LANES)


class Film(gym.vector.VectorEnv):
    """Many lanes of the same frames: as fast as memory."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self) -> None:
        self.num_envs = PIXEL_LANES
        self.single_observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, PIXEL_LANES)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, PIXEL_LANES)
        self._frames = np.zeros((PIXEL_LANES, SIDE, SIDE, 3), np.uint8)
        self._never, self._reward = np.zeros(PIXEL_LANES, bool), np.zeros(PIXEL_LANES)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._frames, {}

    def step(self, actions: Any) -> Any:
        return self._frames, self._reward, self._never, self._never, {}


class Heavy(nn.Module):
    """Ten million parameters to carry, none to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETERS))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (observation[..., 0] > self.one).long()


def per_second(collect: Callable[[], float], seconds: float) -> float:
    """How much comes in a second, over so many."""
    began, found = time.perf_counter(), 0.0
    while time.perf_counter() - began < seconds:
        found += collect()
    return found / (time.perf_counter() - began)


def of(collector: Any) -> Callable[[float], float]:
    """Frames per second of a collector of reap's, without what it made while others were measured."""

    def measure(seconds: float) -> float:
        for _ in range(AHEAD):
            collector.next()
        return per_second(lambda: collector.next().numel(), seconds)

    return measure


def torchrl_collector() -> Any:
    from torchrl.collectors.distributed import RayCollector as Theirs
    from torchrl.envs import GymEnv as TheirEnv
    from torchrl.envs import SerialEnv as TheirLanes

    def lanes() -> Any:
        return TheirLanes(LANES, lambda: TheirEnv("CartPole-v1", categorical_action_encoding=True))

    policy = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    return Theirs(
        [lanes] * ACTORS, policy, frames_per_batch=LANES * STEPS, total_frames=10**9, remote_configs=SMALL, sync=False
    )


@contextlib.contextmanager
def rllib(python: str) -> Iterator[Callable[[float], float]]:
    """Its env runners, in another interpreter: frames per second, over so many seconds."""
    with opened(python, "rllib_runners") as ask:
        yield lambda seconds: float(ask(str(seconds)))


def frames(seconds: float, rounds: int, peers: bool, python: str | None) -> dict[str, float]:
    policy = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    options: dict[str, Any] = {"frames_per_batch": LANES * STEPS}
    measures: dict[str, Callable[[float], float]] = {}
    with contextlib.ExitStack() as open_ones:
        ours = open_ones.enter_context(RayCollector([cartpoles] * ACTORS, policy, remote_configs=SMALL, **options))
        near = open_ones.enter_context(MultiAsyncCollector([cartpoles] * ACTORS, policy, **options))
        measures["reap, Ray"], measures["reap, processes"] = of(ours), of(near)
        if peers:
            theirs = torchrl_collector()
            open_ones.callback(theirs.shutdown)
            batches = iter(theirs)
            measures["TorchRL, Ray"] = lambda s: per_second(lambda: next(batches).numel(), s)
        if python:
            measures["RLlib, env runners"] = open_ones.enter_context(rllib(python))
        speeds: dict[str, list[float]] = {name: [] for name in measures}
        for turn in range(rounds + 1):
            for name, measure in measures.items():
                found = measure(seconds)
                if turn:  # the first is for warming up
                    speeds[name].append(found)
    base = speeds["reap, Ray"]
    for name, each in speeds.items():
        ratio = statistics.median(ray_speed / other for ray_speed, other in zip(base, each))
        print(f"frames   {name:20} {statistics.median(each):12,.0f} frames/s   reap on Ray is {ratio:6.2f} ×")
    return {name: statistics.median(a / b for a, b in zip(base, each)) for name, each in speeds.items()}


def pixels(seconds: float, rounds: int) -> float:
    size = PIXEL_LANES * PIXEL_STEPS
    with RayCollector([Film] * ACTORS, None, frames_per_batch=size, remote_configs=SMALL) as collector:
        size *= 2 * SIDE * SIDE * 3
        for _ in range(4):
            collector.next()

        def one() -> float:
            collector.next()
            return float(size)

        speeds = [per_second(one, seconds) for _ in range(rounds)]
    print(f"pixels   {size / 2**20:.0f} MiB a batch     {statistics.median(speeds) / 1e9:12.2f} GB/s")
    return statistics.median(speeds)


def weights(rounds: int) -> float:
    policy = TensorDictModule(Heavy(), in_keys=["observation"], out_keys=["action"])
    times: dict[int, list[float]] = {1: [], 4: []}
    with contextlib.ExitStack() as open_ones:
        collectors = {
            count: open_ones.enter_context(
                RayCollector(["CartPole-v1"] * count, policy, sync=True, frames_per_batch=count, remote_configs=SMALL)
            )
            for count in times
        }
        for turn in range(2 * rounds + 1):
            for count, collector in collectors.items():
                began = time.perf_counter()
                collector.update_policy_weights_()
                collector.next()  # one step of each: made by these weights
                if turn:
                    times[count].append(time.perf_counter() - began)
    ratio = statistics.median(four / one for one, four in zip(times[1], times[4]))
    for count, each in times.items():
        print(f"weights  {count} actors             {1000 * statistics.median(each):12.0f} ms")
    print(f"weights  4 actors take {ratio:.2f} × as long as 1")
    return ratio


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--rllib", help="an interpreter that has it")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=ACTORS,
            object_store_memory=600 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
        )
    found: dict[str, Any] = {}
    if "frames" in args.only:
        found["frames"] = frames(args.seconds, args.rounds, not args.no_peers, args.rllib)
    if "pixels" in args.only:
        found["pixels"] = pixels(args.seconds, args.rounds)
    if "weights" in args.only:
        found["weights"] = weights(args.rounds)
    ray.shutdown()
    return found


if __name__ == "__main__":
    main()
