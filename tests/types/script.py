"""A user's script, as type checkers see it: not a word about types from reap is needed to write it."""

from __future__ import annotations

import gymnasium as gym
import torch

import reap
from reap.data import LazyTensorStorage, ReplayBuffer, record
from reap.loggers import CSVLogger


def make_env() -> gym.Env[object, object]:
    return gym.make("CartPole-v1")


def returns(policy: torch.nn.Module, frames: int) -> float:
    total = 0.0
    with reap.Collector(
        "CartPole-v1", policy, frames_per_batch=200, total_frames=frames, exploration_type="random", device="cpu"
    ) as collector:
        collector.set_seed(0)
        for batch in collector:
            total += float(batch["next", "reward"].sum())
            print(batch.reshape(-1).batch_size, collector.stats()["frames"])
            collector.update_policy_weights_()
    return total


def off_policy(policy: torch.nn.Module) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
    collector = reap.MultiSyncCollector(
        make_env, policy, num_workers=3, frames_per_batch=[100, 100, 100], replay_buffer=buffer, on_failure="restart"
    )
    collector.start()
    sample = buffer.sample()
    print(sample["action"].shape)
    collector.async_shutdown()


def watched(policy: torch.nn.Module) -> None:
    evaluator = reap.Evaluator(make_env, policy, num_trajectories=5, logger=CSVLogger("somewhere"))
    collector = reap.AsyncBatchedCollector([make_env] * 8, policy, frames_per_batch=200, max_batch_size=8)
    for batch in collector.progress(1000):
        print(batch.batch_size, evaluator.evaluate()["eval/reward"])


def recorded(policy: torch.nn.Module) -> None:
    collector = reap.Collector("CartPole-v1", policy, frames_per_batch=200, total_frames=1000)
    print(collector.next()["observation"].shape)
    for batch in record(collector, "somewhere", format="npz"):
        print(batch["action"].shape)
