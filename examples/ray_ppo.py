"""PPO learns CartPole-v1 from games that Ray actors play, on this machine or on every machine of a cluster.

    python examples/ray_ppo.py                      # starts a cluster here, and ends it
    python examples/ray_ppo.py --address auto       # uses the one that runs (`ray start --head`)

Each actor plays some copies of the game with the current policy. A batch holds a rollout of every actor, all made by
the same weights; they are put into Ray's object store once per update, and every actor pulls them from there. An actor
that dies is replaced, and learning goes on.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from reap.collectors.distributed import RayCollector
from reap.envs import GymEnv, SerialEnv

ACTORS, LANES, STEPS = 2, 8, 128  # who plays, how many games each, and steps of each game in a batch
BATCH = ACTORS * LANES * STEPS
FRAMES = 200 * BATCH  # the budget; most seeds need a third of it
EPOCHS, MINIBATCH, LEARNING_RATE = 8, 256, 1e-3
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.005
LEARNED = 450.0  # a mean return that counts as having learned


def make_env() -> SerialEnv:
    return SerialEnv(LANES, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


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
def add_advantages(batch: TensorDictBase, critic: nn.Module) -> None:
    """How much better each action was than the critic expected (GAE), and the returns it should have expected."""
    after = batch["next"]
    value, next_value = critic(batch["observation"]).squeeze(-1), critic(after["observation"]).squeeze(-1)
    reward, done, terminated = (after[key].squeeze(-1) for key in ("reward", "done", "terminated"))
    surprise = reward + GAMMA * next_value * ~terminated - value  # only a fallen pole has no future
    advantage, running = torch.empty_like(surprise), torch.zeros(len(surprise))
    for t in reversed(range(surprise.shape[1])):
        running = surprise[:, t] + GAMMA * LAMBDA * running * ~done[:, t]  # what follows is another game
        advantage[:, t] = running
    batch["target"] = advantage + value
    batch["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def learn(
    batch: TensorDictBase,
    policy: ProbabilisticTensorDictSequential,
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Improve policy and critic with one batch `[lanes, time]`."""
    add_advantages(batch, critic)
    data = batch.select("observation", "action", "action_log_prob", "advantage", "target").reshape(-1)
    for _ in range(EPOCHS):
        for part in data[torch.randperm(len(data))].split(MINIBATCH):
            distribution = policy.get_dist(part)
            ratio = (distribution.log_prob(part["action"]) - part["action_log_prob"]).exp()
            gain = torch.min(ratio * part["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantage"]).mean()
            value_loss = (critic(part["observation"]).squeeze(-1) - part["target"]).square().mean()
            loss = value_loss - gain - ENTROPY * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
            optimizer.step()


def main() -> int:
    """Learn, and say how it went; 1 if the full budget was not enough."""
    parser = argparse.ArgumentParser(description="PPO learns CartPole-v1 with Ray actors.")
    parser.add_argument("--address", help="of a cluster that runs: 'auto', or host:port (default: one is started)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=FRAMES, help="stop after this many (default: %(default)s)")
    parser.add_argument("--target", type=float, default=475.0, help="stop at this mean return (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    policy, critic = make_policy(), mlp(1, last_gain=1.0)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    cluster = {"address": args.address} if args.address else {"address": "local", "num_cpus": ACTORS}

    collector = RayCollector(
        [make_env] * ACTORS,
        policy,
        sync=True,
        cat_results=0,  # the actors' lanes as lanes of one batch
        frames_per_batch=BATCH,
        total_frames=-(-args.frames // BATCH) * BATCH,  # whole batches
        restart=True,
        ray_init_config={"log_to_driver": False, **cluster},
    )
    collector.set_seed(args.seed)
    mean, start = 0.0, time.perf_counter()
    for update, batch in enumerate(collector):
        learn(batch, policy, critic, optimizer)
        collector.update_policy_weights_()
        stats = collector.stats()
        mean = stats["mean_return"] or mean  # None until a first episode has ended
        if update % 10 == 0:
            speed = stats["frames"] / (time.perf_counter() - start)
            print(f"{stats['frames']:9,} frames  {speed:7,.0f} frames/s  mean return {mean:5.1f}", flush=True)
        if stats["episodes"] >= 100 and mean >= args.target:
            break
    stats, seconds = collector.stats(), time.perf_counter() - start
    collector.shutdown()

    learned = mean >= min(LEARNED, args.target)
    print(
        f"{'solved' if learned else 'not learned'}: mean return {mean:.0f} after {stats['frames']:,} frames "
        f"in {seconds:.0f} s, {stats['restarts']} actors replaced"
    )
    return 0 if learned or args.frames < FRAMES else 1  # a smaller budget is a try-out, not a failure


if __name__ == "__main__":
    sys.exit(main())
