"""End to end: the same training script with TorchRL's collector and with reap's, until the same frames.

Everything else is TorchRL's in both: env, transforms, actor, loss, advantage, buffer. The curves must be the same
numbers, or the line fails: what differs is the time. By default they are short; as long as one trains, for a good hour:

    python -m benchmarks --only "end to end" --frames 1000000
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import actors
from benchmarks.board import REAP, TORCHRL, Budget, Probe, Row, Workload, ratio
from benchmarks.scripts import ppo_cheetah, ppo_env, sac_env

GROUP = "end to end"


def ppo(kind: Any, frames: int) -> tuple[list[float], dict[str, float]]:
    """PPO on HalfCheetah-v5, 8 lanes. Return the mean reward and the loss of each batch, and where the time went."""
    from torchrl.modules import ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(0)
    actor, critic = ppo_cheetah(), ValueOperator(actors.network(17, 1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_of = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=3e-4)
    env = ppo_env("HalfCheetah-v5", 8)
    env.set_seed(0)
    per_batch = min(1024, frames)

    def learn(batch: Any) -> float:
        with torch.no_grad():
            advantage(batch)
        rows = batch.reshape(-1)
        for _ in range(2):
            for part in rows[torch.randperm(len(rows))].split(256):
                losses = loss_of(part)
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return loss.item()

    return train(kind(env, actor, frames_per_batch=per_batch, total_frames=frames), learn)


def sac(kind: Any, frames: int) -> tuple[list[float], dict[str, float]]:
    """SAC on HalfCheetah-v5, one lane, with a replay buffer; one update for every 25 frames."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.modules import MLP, ValueOperator
    from torchrl.objectives import SACLoss, SoftUpdate

    torch.manual_seed(0)
    actor = actors.sac(17, 6)
    value = ValueOperator(
        MLP(in_features=23, out_features=1, num_cells=[64, 64], activation_class=nn.ReLU),
        in_keys=["action", "observation"],
    )
    loss_of = SACLoss(actor, value, num_qvalue_nets=2, target_entropy=-6.0)
    loss_of.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_of, eps=0.995)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=3e-4)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(frames), batch_size=64)
    env = sac_env(1)
    env.set_seed(0)
    per_batch = min(500, frames)

    def learn(batch: Any) -> float:
        buffer.extend(batch)
        for _ in range(per_batch // 25):
            losses = loss_of(buffer.sample())
            loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target.step()
        return loss.item()

    return train(kind(env, actor, frames_per_batch=per_batch, total_frames=frames), learn)


def train(collector: Any, learn: Callable[[Any], float]) -> tuple[list[float], dict[str, float]]:
    curve, spent = [], {"collecting": 0.0, "learning": 0.0}
    torch.manual_seed(1)  # TorchRL draws while it makes a collector
    began = time.perf_counter()
    for batch in collector:
        collected = time.perf_counter()
        curve += [batch["next", "reward"].mean().item(), learn(batch)]
        spent["collecting"] += collected - began
        began = time.perf_counter()
        spent["learning"] += began - collected
    collector.shutdown()
    return curve, spent


def measure(script: Callable[..., Any], frames: int, budget: Budget, workload: Workload) -> list[Row]:
    """Each in turn; the curves are compared."""
    import torchrl.collectors

    import reap.collectors

    kinds = {TORCHRL: torchrl.collectors.Collector, REAP: reap.collectors.Collector}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    curves: dict[str, list[float]] = {}
    learning: list[float] = []
    rounds = 1 if budget.scale < 1 or budget.frames is not None else 3
    frames = budget.frames or max(256, int(frames * budget.scale))
    # The first losses of a process have other last bits than all later ones: of two runs of TorchRL's alone, too.
    script(kinds[TORCHRL], 256)
    for _ in range(rounds):
        for name, kind in kinds.items():
            curves[name], spent = script(kind, frames)
            seconds[name].append(sum(spent.values()))
            learning.append(spent["learning"])
    ours, theirs = (torch.tensor(curves[name]) for name in (REAP, TORCHRL))
    if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6):
        raise AssertionError(f"{workload.name}: the curves differ\n{ours}\n{theirs}")
    figures = {name: statistics.median(each) for name, each in seconds.items()}
    figures["learning alone"] = statistics.median(learning)
    same = "the same curve, bit for bit" if ours.equal(theirs) else "the same curve within 1e-4"
    told = {TORCHRL: ratio(zip(seconds[TORCHRL], seconds[REAP]), workload.aims.get(TORCHRL))}
    return [Row(GROUP, f"{workload.name}, {frames:,} frames", "s", figures, told, rounds, note=same)]


def workloads() -> list[Workload]:
    return [
        Probe(GROUP, "PPO, HalfCheetah-v5, 8 lanes", board=False, measure=partial(measure, ppo, 8192)),
        Probe(GROUP, "SAC, HalfCheetah-v5, 1 lane", board=False, measure=partial(measure, sac, 2000)),
    ]
