"""TorchRL's own envs beside `env.rollout`: what a collector adds to, or saves of, the env's own time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import actors
from benchmarks.board import REAP, TORCHRL, Contender, Race

GROUP = "TorchRL's envs beside env.rollout"
FRAMES = 800


def cart() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def envs() -> dict[str, tuple[Callable[[], Any], int]]:
    """By name: a factory, and the width of the observation."""
    from torchrl.envs import (
        CatFrames,
        Compose,
        InitTracker,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
        VecNorm,
    )

    def counted(env: Any) -> Any:
        return TransformedEnv(env, Compose(RewardSum(), StepCounter(), InitTracker()))

    return {
        "GymEnv": (cart, 4),
        "SerialEnv of 8 GymEnvs": (lambda: SerialEnv(8, cart), 4),
        "RewardSum, StepCounter, InitTracker": (lambda: counted(cart()), 4),
        "VecNorm": (lambda: TransformedEnv(cart(), VecNorm(in_keys=["observation"])), 4),
        "CatFrames": (lambda: TransformedEnv(cart(), CatFrames(4, dim=-1, in_keys=["observation"])), 16),
        "8 lanes with RewardSum, StepCounter, InitTracker": (lambda: counted(SerialEnv(8, cart)), 4),
    }


def build(make: Callable[[], Any], policy: Callable[[], nn.Module], scale: float) -> dict[str, Contender]:
    """The same env and policy, driven in three ways."""
    import torchrl.collectors

    import reap.collectors

    torch.manual_seed(0)
    env, acting, frames = make(), policy(), max(40, int(FRAMES * scale))
    steps = frames // max(1, env.batch_size.numel())

    def rollout() -> None:
        with torch.no_grad():
            env.rollout(steps, acting, break_when_any_done=False)

    kinds = {TORCHRL: torchrl.collectors.Collector, REAP: reap.collectors.Collector}
    made = {name: kind(make(), acting, frames_per_batch=frames, total_frames=-1) for name, kind in kinds.items()}
    runs = {name: Contender(iter(one).__next__, frames, one.shutdown) for name, one in made.items()}
    return runs | {"env.rollout": Contender(rollout, frames, partial(env.close, raise_if_closed=False))}


def workloads() -> list[Race]:
    found = []
    for name, (make, width) in envs().items():
        policies: dict[str, Callable[[], nn.Module]] = {
            "ProbabilisticActor": lambda w=width: actors.categorical(actors.network(w, 2)),  # type: ignore[misc]
            "code on TensorDicts": lambda w=width: actors.OnTensorDicts(w, 2),  # type: ignore[misc]
        }
        for who, policy in policies.items():
            found.append(Race(GROUP, f"{name}; {who}", board=False, build=partial(build, make, policy)))
    return found
