"""PPO that nothing stops: killed at any moment and started again, it goes on as if nothing had happened.

    python examples/resume_ppo.py --run run          kill it (Ctrl-C, kill -9, a power cut), and call it again

It is `ppo_cartpole.py` with a checkpoint after each update: policy, critic, optimizer, the collector with its 16 games
in the middle, every random generator, and the curve so far. What is learned after a restart is, bit for bit, what would
have been learned without one; the last line has a checksum of the weights to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import torch
from ppo_cartpole import BATCH, LANES, LEARNING_RATE, learn, make_policy, mlp

from reap import checkpoint
from reap.collectors import Collector
from reap.envs import GymEnv, SerialEnv


def main() -> int:
    """Learn for so many updates in all, however often it is started."""
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1 that goes on where it was killed.")
    parser.add_argument("--run", default="run", help="where checkpoints are (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=60, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    policy, critic = make_policy(), mlp(1, last_gain=1.0)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    env = SerialEnv(LANES, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    collector = Collector(env, policy, frames_per_batch=BATCH, total_frames=args.updates * BATCH)
    collector.set_seed(args.seed)
    parts = {"policy": policy, "critic": critic, "optimizer": optimizer, "collector": collector}

    curve: list[float] = []  # mean return after each update
    if checkpoint.newest(args.run) is not None:
        # The games are kept as pickles, which are executed when they are read: these files are our own.
        curve = list(checkpoint.load(args.run, trusted=True, **parts).values["curve"])
        print(f"goes on after update {len(curve)}", flush=True)
    for batch in collector:
        learn(batch, policy, critic, optimizer)
        collector.update_policy_weights_()
        curve.append(collector.stats()["mean_return"] or 0.0)
        checkpoint.save(args.run, curve=curve, **parts)
        print(f"update {len(curve):3}  mean return {curve[-1]:5.1f}", flush=True)
    collector.shutdown()

    weights = b"".join(value.detach().numpy().tobytes() for part in (policy, critic) for value in part.parameters())
    print("curve", *(repr(mean) for mean in curve))
    print("weights", hashlib.sha256(weights).hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
