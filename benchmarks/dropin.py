"""TorchRL's own envs in three hands: `env.rollout`, TorchRL's collector, reap's.

    python -m benchmarks.dropin             tensordict's probabilistic modules, which reap runs flat
    python -m benchmarks.dropin --custom    a module of the user's own that takes the whole TensorDict

For each env the three take turns, so that a busy machine is busy for all. Printed are medians of frames per second,
what reap adds to the env's own time (`env.rollout` with the same policy and no collector), and how much faster than
TorchRL's collector it is.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import nn

warnings.filterwarnings("ignore")


def envs() -> dict[str, tuple[Callable[[], Any], int, int]]:
    """By name: a factory, width of the observation, number of actions."""
    from torchrl.envs import (
        CatFrames,
        Compose,
        GymEnv,
        InitTracker,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
        VecNorm,
    )

    def cart() -> Any:
        return GymEnv("CartPole-v1", categorical_action_encoding=True)

    return {
        "GymEnv": (cart, 4, 2),
        "SerialEnv of 8 GymEnvs": (lambda: SerialEnv(8, cart), 4, 2),
        "TransformedEnv: counters": (
            lambda: TransformedEnv(cart(), Compose(RewardSum(), StepCounter(), InitTracker())),
            4,
            2,
        ),
        "TransformedEnv: VecNorm": (lambda: TransformedEnv(cart(), VecNorm(in_keys=["observation"])), 4, 2),
        "TransformedEnv: CatFrames": (
            lambda: TransformedEnv(cart(), CatFrames(4, dim=-1, in_keys=["observation"])),
            16,
            2,
        ),
        "8 transformed lanes": (
            lambda: TransformedEnv(SerialEnv(8, cart), Compose(RewardSum(), StepCounter(), InitTracker())),
            4,
            2,
        ),
    }


def policy(width: int, actions: int) -> ProbabilisticTensorDictSequential:
    """As TorchRL's users write them."""
    net = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, actions))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.Categorical,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )


class Custom(TensorDictModuleBase):  # type: ignore[misc]
    """Code of the user's own on the whole TensorDict: nothing is known of it."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, actions))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"] = self.net(tensordict["observation"]).argmax(-1)
        return tensordict


class Hands:
    """The same env and policy, driven in three ways; each call makes about `frames` frames."""

    def __init__(self, make: Callable[[], Any], acting: nn.Module, frames: int) -> None:
        import torchrl.collectors

        import reap.collectors

        self._env, self._policy = make(), acting
        self._lanes = max(1, self._env.batch_size.numel())
        self._frames = frames
        kinds = {"TorchRL": torchrl.collectors.Collector, "reap": reap.collectors.Collector}
        self._made = {
            name: kind(make(), acting, frames_per_batch=frames, total_frames=-1) for name, kind in kinds.items()
        }
        self._batches = {name: iter(collector) for name, collector in self._made.items()}

    def rollout(self) -> None:
        with torch.no_grad():
            self._env.rollout(self._frames // self._lanes, self._policy, break_when_any_done=False)

    def seconds(self, how: str) -> float:
        """For one batch of frames."""
        began = time.perf_counter()
        if how == "rollout":
            self.rollout()
        else:
            next(self._batches[how])
        return time.perf_counter() - began

    def close(self) -> None:
        for collector in self._made.values():
            collector.shutdown()
        self._env.close(raise_if_closed=False)


def measure(make: Callable[[], Any], acting: nn.Module, *, frames: int, rounds: int) -> dict[str, float]:
    """Median frames per second by hand, and the medians of the ratios within each round."""
    hands = Hands(make, acting, frames)
    ways = ("rollout", "TorchRL", "reap")
    for how in ways:
        hands.seconds(how)  # the first one warms up
    times: dict[str, list[float]] = {how: [] for how in ways}
    for _ in range(rounds):
        for how in ways:
            times[how].append(hands.seconds(how))
    hands.close()
    found = {how: frames / statistics.median(times[how]) for how in ways}
    found["adds"] = statistics.median(ours / alone - 1 for ours, alone in zip(times["reap"], times["rollout"]))
    found["faster"] = statistics.median(theirs / ours for theirs, ours in zip(times["TorchRL"], times["reap"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=800, help="frames per batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--custom", action="store_true", help="with a module that takes the whole TensorDict")
    parser.add_argument("--only", default="", help="envs whose name contains this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'frames per second':28}{'rollout':>10}{'TorchRL':>10}{'reap':>10}{'adds':>8}{'faster':>9}")
    for name, (make, width, actions) in envs().items():
        if given.only not in name:
            continue
        torch.manual_seed(0)
        acting = Custom(width, actions) if given.custom else policy(width, actions)
        found = measure(make, acting, frames=given.frames, rounds=given.rounds)
        speeds = "".join(f"{found[how]:10,.0f}" for how in ("rollout", "TorchRL", "reap"))
        print(f"{name:28}{speeds}{found['adds']:8.1%}{found['faster']:8.2f}×", flush=True)


if __name__ == "__main__":
    main()
