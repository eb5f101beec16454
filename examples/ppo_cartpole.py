"""PPO learns to balance a pole: CartPole-v1, from random weights to a mean return of 475, in well under a minute.

    python examples/ppo_cartpole.py

A collector plays 16 copies of the game with the current policy and hands over batches `[lanes, time]`. This file does
the rest: it estimates how much better each action was than expected, improves the policy a little, and tells the
collector. The return is the length of an episode, at most 500. While it learns it shows frames, speed and the mean
return of the last 100 episodes; at the end it says whether it learned and draws the learning curve into `demo.png`.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical

from reap.collectors import Collector
from reap.envs import GymEnv, SerialEnv

LANES, STEPS = 16, 128  # games played side by side, and steps of each in a batch
BATCH = LANES * STEPS
FRAMES = 200 * BATCH  # the budget; most seeds need a fifth of it
EPOCHS, MINIBATCH = 8, 256
LEARNING_RATE = 1e-3
GAMMA, LAMBDA = 0.99, 0.95
CLIP, ENTROPY = 0.2, 0.005
LEARNED = 450.0  # a mean return that counts as having learned


def mlp(outputs: int, last_gain: float) -> nn.Sequential:
    """Two hidden layers; a small `last_gain` makes all outputs start out nearly equal."""
    first, second, last = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, gain in ((first, 2**0.5), (second, 2**0.5), (last, last_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def make_policy() -> ProbabilisticTensorDictSequential:
    """Reads "observation"; writes "logits", "action" and "action_log_prob"."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(2, last_gain=0.01), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


@torch.no_grad()
def advantages(batch: TensorDictBase, critic: nn.Module) -> tuple[Tensor, Tensor]:
    """How much better each action was than the critic expected (GAE), and the returns it should have expected."""
    after = batch["next"]
    value, next_value = critic(batch["observation"]).squeeze(-1), critic(after["observation"]).squeeze(-1)
    reward, done, terminated = (after[key].squeeze(-1) for key in ("reward", "done", "terminated"))
    # Only a fallen pole has no future. A game cut off at 500 steps, or by the end of the batch, would have gone on, and
    # ("next", "observation") is where it would have gone on from, never the first observation of the next game.
    surprise = reward + GAMMA * next_value * ~terminated - value
    advantage, running = torch.empty_like(surprise), torch.zeros(len(surprise))
    for t in reversed(range(surprise.shape[1])):
        # What follows a done step is another game: nothing of it may flow back.
        running = surprise[:, t] + GAMMA * LAMBDA * running * ~done[:, t]
        advantage[:, t] = running
    return advantage, advantage + value


def learn(
    batch: TensorDictBase,
    policy: ProbabilisticTensorDictSequential,
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Improve policy and critic with one batch."""
    advantage, target = advantages(batch, critic)
    data = batch.select("observation", "action", "action_log_prob")
    data["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    data["target"] = target
    data = data.reshape(-1)  # not view: a batch is laid out time first in memory
    for _ in range(EPOCHS):
        for part in data[torch.randperm(len(data))].split(MINIBATCH):
            distribution = policy.get_dist(part)
            ratio = (distribution.log_prob(part["action"]) - part["action_log_prob"]).exp()
            # The smaller of the two takes away the reward for moving far from the policy that collected the data.
            gain = torch.min(ratio * part["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantage"]).mean()
            value_loss = (critic(part["observation"]).squeeze(-1) - part["target"]).square().mean()
            loss = value_loss - gain - ENTROPY * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            # The critic's errors are far larger: clipped together, they would drown the policy's gradient.
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
            optimizer.step()


def draw(curve: list[tuple[int, float]], path: str) -> None:
    """The learning curve as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")  # without pyplot: PNGs come from Agg, no screen needed
    axes = figure.subplots()
    axes.axhline(LEARNED, color="0.55", linestyle="--", linewidth=1)
    beside = axes.get_yaxis_transform()  # x as a share of the width, y in returns
    axes.text(0.01, LEARNED - 8, f"learned: {LEARNED:.0f}", color="0.4", fontsize=9, va="top", transform=beside)
    axes.plot([frames for frames, _ in curve], [mean for _, mean in curve], color="#2a6f97", linewidth=2)
    axes.set(title="PPO on CartPole-v1", xlabel="frames", ylabel="mean return of the last 100 episodes")
    axes.set(xlim=(0, None), ylim=(0, 510))
    axes.xaxis.set_major_formatter(lambda frames, _: f"{frames / 1000:.0f}k" if frames else "0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Learn, say how it went, draw the curve; 1 if the full budget was not enough."""
    parser = argparse.ArgumentParser(description="PPO learns CartPole-v1.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=FRAMES, help="stop after this many (default: %(default)s)")
    parser.add_argument("--target", type=float, default=475.0, help="stop at this mean return (default: %(default)s)")
    parser.add_argument("--plot", default="demo.png", help="where the learning curve goes (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)  # networks this small lose more than they gain from a second thread
    torch.manual_seed(args.seed)  # initial weights
    policy, critic = make_policy(), mlp(1, last_gain=1.0)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)

    env = SerialEnv(LANES, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    budget = -(-args.frames // BATCH) * BATCH  # whole batches
    collector = Collector(env, policy, frames_per_batch=BATCH, total_frames=budget)
    collector.set_seed(args.seed)  # games, actions, and torch from here on

    curve: list[tuple[int, float]] = []
    stats = collector.stats()
    mean, tty, start = 0.0, sys.stdout.isatty(), time.perf_counter()
    for update, batch in enumerate(collector):
        learn(batch, policy, critic, optimizer)
        collector.update_policy_weights_()
        stats = collector.stats()
        if stats["mean_return"] is not None:  # None until a first episode has ended
            mean = stats["mean_return"]
            curve.append((stats["frames"], mean))
        speed = stats["frames"] / (time.perf_counter() - start)
        line = f"{stats['frames']:9,} frames  {speed:7,.0f} frames/s  mean return {mean:5.1f}"
        if tty:
            print(f"\r{line}", end="", flush=True)
        elif update % 10 == 0:
            print(line, flush=True)
        if stats["episodes"] >= 100 and mean >= args.target:
            break
    seconds = time.perf_counter() - start
    collector.shutdown()

    draw(curve, args.plot)
    print(f"{chr(10) if tty else ''}learning curve: {args.plot}")
    learned = mean >= min(LEARNED, args.target)
    print(
        f"{'solved' if learned else 'not learned'}: mean return {mean:.0f} over the last "
        f"{min(stats['episodes'], 100)} episodes after {stats['frames']:,} frames in {seconds:.0f} s"
    )
    return 0 if learned or args.frames < FRAMES else 1  # a smaller budget is a try-out, not a failure


if __name__ == "__main__":
    sys.exit(main())
