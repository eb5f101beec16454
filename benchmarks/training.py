"""End to end: the same training script with TorchRL's collector and with reap's, until the same frames.

Everything else is TorchRL's in both: env, transforms, actor, loss, advantage, buffer. The curves must be the same
numbers, or the line fails: what differs is the time. By default they are short; as long as one trains:

    python -m benchmarks --only "end to end" "PPO, HalfCheetah" --frames 1000000      six minutes
    python -m benchmarks --only "end to end" "SAC" --frames 200000                    five minutes
    python -m benchmarks --only "end to end" "recurrent" --frames 200000
    python -m benchmarks --only "end to end" "Pong" --frames 20000                    two lines
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from benchmarks import actors
from benchmarks.board import REAP, TORCHRL, Budget, Probe, Row, Workload, ratio
from benchmarks.scripts import ppo_cheetah, ppo_env, sac_env
from benchmarks.scripts_more import ACTIONS, GAMES, LANES, nature, pong, recurrent_env, recurrent_policy

GROUP = "end to end"
THREADS = torch.get_num_threads()
Told = tuple[list[float], dict[str, float]]  # mean reward and loss of each batch, and where the time went


def descend(optimizer: torch.optim.Optimizer, losses: Any, *names: str) -> Tensor:
    """One step down the sum of these losses, which is returned."""
    loss: Tensor = sum(losses[name] for name in names)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def ppo_learner(actor: nn.Module, critic: nn.Module, *, part: int) -> Callable[[Any], float]:
    """Two passes over each batch, in parts of so many rows."""
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_of = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=3e-4)

    def learn(batch: Any) -> float:
        with torch.no_grad():
            advantage(batch)
        rows = batch.reshape(-1)
        for _ in range(2):
            for some in rows[torch.randperm(len(rows))].split(part):
                loss = descend(optimizer, loss_of(some), "loss_objective", "loss_critic", "loss_entropy")
        return loss.item()

    return learn


def ppo(kind: Any, frames: int) -> Told:
    """PPO on HalfCheetah-v5, 8 lanes."""
    from torchrl.modules import ValueOperator

    torch.manual_seed(0)
    actor, critic = ppo_cheetah(), ValueOperator(actors.network(17, 1), in_keys=["observation"])
    learn = ppo_learner(actor, critic, part=256)
    env = ppo_env("HalfCheetah-v5", 8)
    env.set_seed(0)
    return train(kind(env, actor, frames_per_batch=min(1024, frames), total_frames=frames), learn)


def ppo_pong(kind: Any, frames: int) -> Told:
    """PPO on Pong, the games in processes (ParallelEnv)."""
    from torchrl.modules import ValueOperator

    torch.manual_seed(0)
    actor = actors.categorical(nature(ACTIONS), key="pixels")
    learn = ppo_learner(actor, ValueOperator(nature(1), in_keys=["pixels"]), part=64)
    env = pong(GAMES, 0, processes=True)  # processes draw the numbers of random first steps: no two runs have the same
    env.set_seed(0)
    return train(kind(env, actor, frames_per_batch=min(GAMES * 32, frames), total_frames=frames), learn)


def dqn_pong(kind: Any, frames: int) -> Told:
    """DQN on Pong, 8 lanes, with a replay buffer; one update of 32 frames for every 64."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.objectives import DQNLoss, HardUpdate

    torch.manual_seed(0)
    policy: Any = actors.greedy_q(nature(ACTIONS), ACTIONS, key="pixels", one_hot=False)
    loss_of = DQNLoss(policy[0], delay_value=True, action_space="categorical")
    loss_of.make_value_estimator(gamma=0.99)
    target = HardUpdate(loss_of, value_network_update_interval=50)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=1e-4)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(min(frames, 2000)), batch_size=32)
    env = pong(LANES)
    env.set_seed(0)
    per_batch = min(LANES * 16, frames)

    def learn(batch: Any) -> float:
        buffer.extend(batch.reshape(-1))
        for _ in range(max(1, per_batch // 64)):
            loss = descend(optimizer, loss_of(buffer.sample()), "loss")
            target.step()
        return loss.item()

    return train(kind(env, policy, frames_per_batch=per_batch, total_frames=frames), learn)


def recurrent_dqn(kind: Any, frames: int) -> Told:
    """Recurrent DQN on CartPole-v1, 8 lanes, trained on the sequences of each lane."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.modules import set_recurrent_mode
    from torchrl.objectives import DQNLoss, SoftUpdate

    torch.manual_seed(0)
    policy: Any = recurrent_policy()
    loss_of = DQNLoss(TensorDictSequential(*policy[:4]), delay_value=True, action_space="one-hot")
    loss_of.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_of, eps=0.95)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=1e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(400), batch_size=8)
    env = recurrent_env()
    env.set_seed(0)

    def learn(batch: Any) -> float:
        buffer.extend(batch)
        for _ in range(2):
            with set_recurrent_mode(True):
                losses = loss_of(buffer.sample())
            loss = descend(optimizer, losses, "loss")
        target.step()
        return loss.item()

    return train(kind(env, policy, frames_per_batch=min(LANES * 50, frames), total_frames=frames), learn)


def sac(kind: Any, frames: int) -> Told:
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
            loss = descend(optimizer, loss_of(buffer.sample()), "loss_actor", "loss_qvalue", "loss_alpha")
            target.step()
        return loss.item()

    return train(kind(env, actor, frames_per_batch=per_batch, total_frames=frames), learn)


def train(collector: Any, learn: Callable[[Any], float]) -> Told:
    """Collect and learn by turns."""
    curve, spent = [], {"collecting": 0.0, "learning": 0.0}
    torch.set_num_threads(THREADS)  # TorchRL's ParallelEnv leaves fewer; with others, gradients have other last bits
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
    scripts: dict[str, tuple[Callable[..., Told], int]] = {
        "PPO, HalfCheetah-v5, 8 lanes": (ppo, 8192),
        "SAC, HalfCheetah-v5, 1 lane": (sac, 2000),
        "DQN, Pong, 8 lanes": (dqn_pong, 1024),
        "PPO, Pong, ParallelEnv of 4": (ppo_pong, 1024),
        "recurrent DQN, CartPole-v1, 8 lanes": (recurrent_dqn, 3200),
    }
    return [
        Probe(GROUP, name, board=False, measure=partial(measure, script, frames))
        for name, (script, frames) in scripts.items()
    ]
