"""SAC learns to swing up a pendulum: Pendulum-v1, with two processes that play while this one learns.

    python examples/sac_pendulum.py

                    ┌ worker 0: 4 lanes ─┐
    weights ──────► │                    ├──► replay buffer ──► sample ──► learn ─┐
       ▲            └ worker 1: 4 lanes ─┘                                        │
       └──────────────────────────────────────────────────────────────────────────┘

The actor is rewarded for its return and for staying undecided; how much the latter counts is learned too. A limiter
keeps playing and learning in proportion. Now and then the mean action plays 20 episodes of 200 steps; once their mean
return (0 would be perfect, -1,200 is a pendulum that hangs) is high enough, 100 more have the last word.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from reap.collectors import Collector, MultiAsyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
from reap.envs import GymEnv, SerialEnv

WORKERS, LANES, STEPS = 2, 4, 16  # processes, pendulums in each, steps of each between two looks at the weights
FRAMES = 400 * LANES * STEPS  # the budget; most seeds need half of it
BUFFER, WARM_UP = 50_000, 1_024
BATCH, SAMPLES_PER_FRAME = 128, 64
LEARNING_RATE, GAMMA, FOLLOW = 1e-3, 0.98, 0.01  # FOLLOW: how fast the slow critics follow the others
LARGEST = 2.0  # torque
LEARNED = -250.0


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class Actor(nn.Module):
    """A normal distribution, squashed into the torques there are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 2)

    def both(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the deviation."""
        mean, log_std = self.net(observation).chunk(2, -1)
        return mean, log_std.clamp(-5.0, 2.0)

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """An action and its log-probability, both with gradients."""
        mean, log_std = self.both(observation)
        noise = torch.randn_like(mean)
        raw = mean + noise * log_std.exp()
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        squashed = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # log(1 - tanh²), without overflow
        return LARGEST * raw.tanh(), log_prob - squashed - math.log(LARGEST)

    def forward(self, observation: Tensor) -> Tensor:
        return self.draw(observation)[0]


class Learner:
    """Actor, two critics, their slow followers, and how much indecision is worth."""

    def __init__(self) -> None:
        self.actor, self.critics = Actor(), nn.ModuleList([mlp(4, 1), mlp(4, 1)])
        self.slow = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.of_critics = torch.optim.Adam(self.critics.parameters(), lr=LEARNING_RATE)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), lr=LEARNING_RATE)
        self.of_alpha = torch.optim.Adam([self.log_alpha], lr=LEARNING_RATE)

    def worth(self, critics: nn.ModuleList, observation: Tensor, action: Tensor) -> list[Tensor]:
        both = torch.cat([observation, action], -1)
        return [critic(both) for critic in critics]

    def learn(self, frames: TensorDictBase) -> None:
        after, alpha = frames["next"], self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = self.actor.draw(after["observation"])
            future = torch.min(*self.worth(self.slow, after["observation"], action)) - alpha * log_prob
            # Only cut off after 200 steps, never over: `terminated` is False there, and the future counts.
            target = after["reward"] / 10 + GAMMA * future * ~after["terminated"]
        found = self.worth(self.critics, frames["observation"], frames["action"])
        loss = torch.stack([(one - target).square().mean() for one in found]).sum()
        step(self.of_critics, loss)

        action, log_prob = self.actor.draw(frames["observation"])
        worth = torch.min(*self.worth(self.critics, frames["observation"], action))
        step(self.of_actor, (alpha * log_prob - worth).mean())
        step(self.of_alpha, -(self.log_alpha.exp() * (log_prob.detach() - 1.0)).mean())  # entropy wanted: -1
        with torch.no_grad():
            for mine, theirs in zip(self.slow.parameters(), self.critics.parameters()):
                mine.lerp_(theirs, FOLLOW)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def mean_return(actor: Actor, lanes: int = 20) -> float:
    """Of the mean action, one episode in each lane."""
    with Collector(
        SerialEnv(lanes, lambda: GymEnv("Pendulum-v1")),
        lambda observation: LARGEST * actor.both(observation)[0].tanh(),
        frames_per_batch=lanes * 200,  # an episode is 200 steps
    ) as collector:
        batch = collector.next()
    assert batch is not None
    return float(batch["next", "reward"].sum() / lanes)


def main() -> int:
    """Learn, say how it went; 1 if the full budget was not enough."""
    parser = argparse.ArgumentParser(description="SAC learns Pendulum-v1 from a replay buffer that fills by itself.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=FRAMES, help="stop after this many (default: %(default)s)")
    parser.add_argument("--target", type=float, default=-180.0, help="stop at this mean return (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    learner = Learner()
    warm_up = min(WARM_UP, args.frames // 4)
    limiter = SamplesPerInsert(SAMPLES_PER_FRAME, tolerance=256 * SAMPLES_PER_FRAME, min_size=warm_up)
    buffer = ReplayBuffer(storage=LazyTensorStorage(BUFFER), batch_size=BATCH, limiter=limiter)
    collector = MultiAsyncCollector(
        [lambda: SerialEnv(LANES, lambda: GymEnv("Pendulum-v1"))] * WORKERS,
        learner.actor,
        frames_per_batch=LANES * STEPS,
        total_frames=args.frames,
        init_random_frames=warm_up // (LANES * STEPS) * LANES * STEPS,
        replay_buffer=buffer,
    )
    collector.set_seed(args.seed)
    collector.start()

    update, begin = 0, time.perf_counter()
    for sample in buffer.sample_while(collector):
        learner.learn(sample)
        update += 1
        if update % 10 == 0:
            collector.update_policy_weights_()
        if update % 500 == 0:
            mean = mean_return(learner.actor)
            speed = buffer.write_count / (time.perf_counter() - begin)
            print(f"{buffer.write_count:9,} frames  {speed:7,.0f} frames/s  mean return {mean:8.1f}", flush=True)
            if mean >= args.target:
                break
    frames = collector.stats()["frames"]
    collector.async_shutdown()

    mean, seconds = mean_return(learner.actor, lanes=100), time.perf_counter() - begin
    learned = mean >= LEARNED
    print(
        f"{'solved' if learned else 'not learned'}: mean return {mean:.0f} of 100 episodes after {frames:,} frames and "
        f"{update:,} updates in {seconds:.0f} s"
    )
    return 0 if learned or args.frames < FRAMES else 1  # a smaller budget is a try-out, not a failure


if __name__ == "__main__":
    sys.exit(main())
