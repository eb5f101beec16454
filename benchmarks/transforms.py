"""Transforms beside a loop written by hand that does the same: normalised observations and rewards, stacks of four.

Both keep each frame once, with its successor, and count every observation once, step by step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.board import HAND, REAP, Contender, Race
from benchmarks.by_hand import Array, SerialLanes

GROUP = "transforms"
STEPS, STACK = 40, 4


class RunningMeanStd:
    """As Gymnasium and Stable-Baselines3 have it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, values: Array) -> None:
        mean, var, count = values.mean(0), values.var(0), len(values)
        delta, total = mean - self.mean, self.count + count
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, squares / total, total


class Loop:
    """What an expert would write for exactly these envs and transforms."""

    def __init__(self, lanes: SerialLanes, policy: nn.Module, steps: int, *, stack: int) -> None:
        self.lanes, self.policy, self.steps, self.size = lanes, policy, steps, stack
        n, shape = len(lanes.raw), lanes.raw.shape[1:]
        self.seen, self.earned = RunningMeanStd(shape), RunningMeanStd(())
        self.total, self.ids, self.next_id = np.zeros(n), np.arange(n), n
        self.frames, self.successors = (np.zeros((steps, n, *shape), np.float32) for _ in range(2))
        self.reward, self.traj = np.zeros((steps, n), np.float32), np.zeros((steps, n), np.int64)
        self.terminated, self.truncated, self.done = (np.zeros((steps, n), np.bool_) for _ in range(3))
        self.action = np.zeros((steps, n), np.int64)
        self.stack = np.repeat(self.norm(lanes.raw)[:, None], stack, 1)
        self.shown = torch.from_numpy(self.stack if stack > 1 else self.stack[:, 0])

    def norm(self, raw: Array) -> Array:
        values = raw.astype(np.float64)
        self.seen.update(values)
        normal: Array = ((values - self.seen.mean) / np.sqrt(self.seen.var + 1e-8)).astype(np.float32)
        return normal

    def __call__(self) -> Array:
        lanes, stack, frames, successors = self.lanes, self.stack, self.frames, self.successors
        for flag in (self.terminated, self.truncated, self.done):
            flag[...] = False
        with torch.inference_mode():
            for t in range(self.steps):
                frames[t], self.traj[t] = stack[:, -1], self.ids
                self.action[t] = self.policy(self.shown).numpy()
                reward = self.reward[t]
                ended = lanes.step(self.action[t], reward, self.terminated[t], self.truncated[t])
                self.total *= 0.99
                self.total += reward
                self.earned.update(self.total)
                reward /= np.sqrt(self.earned.var + 1e-8)
                successors[t] = self.norm(lanes.raw)
                stack[:, :-1] = stack[:, 1:]
                stack[:, -1] = successors[t]
                if ended:
                    self.done[t, ended] = True
                    stack[ended] = self.norm(lanes.fresh[ended])[:, None]
                    self.total[ended] = 0
                    self.ids[ended] = np.arange(self.next_id, self.next_id + len(ended))
                    self.next_id += len(ended)
        return frames


class Policy(nn.Module):
    """A small network on the stacked observations."""

    def __init__(self, stack: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(4 * stack, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: Tensor) -> Tensor:
        found: Tensor = self.net(observation).argmax(-1)
        return found


def build(lanes: int, stack: int, scale: float) -> dict[str, Contender]:
    """The same by hand and by reap."""
    from reap.collectors import Collector
    from reap.envs import GymEnv, SerialEnv
    from reap.envs.transforms import FrameStack, NormalizeObservation, NormalizeReward, TransformedEnv

    torch.manual_seed(0)
    policy, frames = Policy(stack), lanes * STEPS
    hand = Loop(SerialLanes([gym.make("CartPole-v1") for _ in range(lanes)]), policy, STEPS, stack=stack)
    transforms: list[Any] = [NormalizeObservation(), NormalizeReward(0.99), *([FrameStack(stack)] if stack > 1 else [])]
    env = SerialEnv(lanes, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))
    collector = Collector(TransformedEnv(env, transforms), policy, frames_per_batch=frames)
    return {
        REAP: Contender(collector.next, frames, collector.shutdown),
        HAND: Contender(hand, frames, hand.lanes.close),
    }


def workloads() -> list[Race]:
    found = []
    for stack, what in ((1, "normalised"), (STACK, "normalised and stacked")):
        for lanes in (8, 32):
            aims = {HAND: 0.95} if lanes == 32 else {}
            found.append(
                Race(GROUP, f"{what}, CartPole-v1, {lanes} lanes", aims=aims, build=partial(build, lanes, stack))
            )
    return found
