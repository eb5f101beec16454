"""DQN learns to balance a pole from memory: CartPole-v1, with two processes that play while this one learns.

    python examples/dqn_cartpole.py

                    ┌ worker 0: 8 games ─┐
    weights ──────► │                    ├──► replay buffer ──► sample ──► learn ─┐
       ▲            └ worker 1: 8 games ─┘                                        │
       └──────────────────────────────────────────────────────────────────────────┘

The workers write into the buffer by themselves: there is no loop over batches here. A limiter keeps them in proportion:
so many frames learned from for each frame played, however fast either side is. Now and then the greedy policy plays 20
games; once their mean return (at most 500) is high enough, 100 more have the last word.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from reap.collectors import Collector, MultiAsyncCollector
from reap.data import LazyTensorStorage, MultiStep, ReplayBuffer, SamplesPerInsert
from reap.envs import GymEnv, SerialEnv

WORKERS, LANES, STEPS = 2, 8, 16  # processes, games in each, steps of each game between two looks at the weights
FRAMES = 600 * LANES * STEPS  # the budget; seeds 0 to 2 need less than half of it, and keep what they learned
BUFFER, WARM_UP = FRAMES, 2_000  # nothing is forgotten: one who only remembers balancing forgets what falling is like
BATCH, SAMPLES_PER_FRAME = 128, 13
LEARNING_RATE, FOLLOW = 1e-3, 0.01  # FOLLOW: how fast the slow network follows the other
GAMMA, AHEAD = 0.99, 3  # AHEAD: steps of reward that count before a value is asked
EPSILON_LAST, EPSILON_FRAMES = 0.05, 20_000
UNIT = 0.05  # what a step is worth: values are then a few units, which networks like
LEARNED = 400.0


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Scale(nn.Module):
    """Position, speed, angle and its speed, each about as large as the others."""

    by: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor([0.5, 0.5, 5.0, 0.5]))

    def forward(self, observation: Tensor) -> Tensor:
        return observation * self.by


class EpsilonGreedy(nn.Module):
    """The best action, but for a share `epsilon` of random ones."""

    epsilon: Tensor

    def __init__(self, values: nn.Module) -> None:
        super().__init__()
        self.values = values
        self.register_buffer("epsilon", torch.tensor(1.0))  # a buffer: it travels with the weights

    def forward(self, observation: Tensor) -> Tensor:
        best = self.values(observation).argmax(-1)
        return torch.where(torch.rand(best.shape) < self.epsilon, torch.randint_like(best, 2), best)


def learn(frames: TensorDictBase, values: nn.Module, slow: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step: values of what was done, towards what it brought and what the best of what follows is worth."""
    after = frames["next"]
    with torch.no_grad():
        best = values(after["observation"]).argmax(-1, keepdim=True)
        future = slow(after["observation"]).gather(-1, best) * ~after["terminated"]  # a game cut off would have gone on
        target = UNIT * after["reward"] + frames["gamma"].unsqueeze(-1) * future
    done = values(frames["observation"]).gather(-1, frames["action"].unsqueeze(-1))
    loss = nn.functional.smooth_l1_loss(done, target)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(values.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for mine, theirs in zip(slow.parameters(), values.parameters()):
            mine.lerp_(theirs, FOLLOW)


def mean_return(values: nn.Module, games: int = 20) -> float:
    """Of the greedy policy, one game in each lane."""
    with Collector(
        SerialEnv(games, make_env),
        lambda observation: values(observation).argmax(-1),
        frames_per_batch=games * 500,  # as long as a game can be
        reset_when_done=False,
    ) as collector:
        batch = collector.next()
    assert batch is not None
    return float(batch["next", "reward"][batch["collector", "mask"]].sum() / games)


def main() -> int:
    """Learn, say how it went; 1 if the full budget was not enough."""
    parser = argparse.ArgumentParser(description="DQN learns CartPole-v1 from a replay buffer that fills by itself.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=FRAMES, help="stop after this many (default: %(default)s)")
    parser.add_argument("--target", type=float, default=475.0, help="stop at this mean return (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    values = nn.Sequential(Scale(), nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    slow, policy = copy.deepcopy(values), EpsilonGreedy(values)
    optimizer = torch.optim.Adam(values.parameters(), lr=LEARNING_RATE)

    warm_up = min(WARM_UP, args.frames // 4)
    limiter = SamplesPerInsert(SAMPLES_PER_FRAME, tolerance=500 * SAMPLES_PER_FRAME, min_size=warm_up)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(BUFFER), batch_size=BATCH, limiter=limiter, transform=MultiStep(GAMMA, AHEAD)
    )
    collector = MultiAsyncCollector(
        [lambda: SerialEnv(LANES, make_env)] * WORKERS,
        policy,
        frames_per_batch=LANES * STEPS,
        total_frames=args.frames,
        replay_buffer=buffer,
    )
    collector.set_seed(args.seed)
    collector.start()

    update, begin = 0, time.perf_counter()
    for sample in buffer.sample_while(collector):
        learn(sample, values, slow, optimizer)
        update += 1
        if update % 10 == 0:
            done = min(buffer.write_count / EPSILON_FRAMES, 1.0)
            policy.epsilon.fill_(1.0 - done * (1.0 - EPSILON_LAST))
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(1.0 - buffer.write_count / args.frames, 0.0)
            collector.update_policy_weights_()
        if update % 500 == 0:
            mean = mean_return(values)
            speed = buffer.write_count / (time.perf_counter() - begin)
            print(f"{buffer.write_count:9,} frames  {speed:7,.0f} frames/s  mean return {mean:5.1f}", flush=True)
            if mean >= args.target:
                break
    frames = collector.stats()["frames"]
    collector.async_shutdown()

    mean, seconds = mean_return(values, games=100), time.perf_counter() - begin
    learned = mean >= LEARNED
    print(
        f"{'solved' if learned else 'not learned'}: mean return {mean:.0f} of 100 games after {frames:,} frames and "
        f"{update:,} updates in {seconds:.0f} s"
    )
    return 0 if learned or args.frames < FRAMES else 1  # a smaller budget is a try-out, not a failure


if __name__ == "__main__":
    sys.exit(main())
