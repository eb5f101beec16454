"""reap collect: run an env and record whole episodes.

reap collect CartPole-v1 --frames 10000 --out runs/cartpole
reap collect my_env.py:make --policy my_policy.py:make --weights run/ --workers 4 --out data --format minari
"""

from __future__ import annotations

import argparse
from typing import Any

from reap.cli.named import add_policy_arguments, env_factory, in_lanes, policy_of
from reap.collectors import Collector, MultiSyncCollector
from reap.data import load, record
from reap.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("env", metavar="ENV", help="a Gymnasium id, or FILE.py:MAKE")
    add_policy_arguments(parser)
    parser.add_argument("--frames", type=int, default=10_000, help="how many to play (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="processes that play; 0: this one (default)")
    parser.add_argument("--lanes", type=int, default=1, help="copies of the env in each (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first lane; the others follow from it")
    parser.add_argument("--out", metavar="PATH", required=True, help="a new directory, or a file for .hdf5 and .npz")
    parser.add_argument("--format", help="minari, parquet, lerobot, hdf5, npz or memmap; as PATH ends, else memmap")


def run(args: argparse.Namespace) -> int:
    """Collect with a progress bar, and print what was written. Return 1 if no episode ended."""
    if args.frames < 1:
        raise UsageError(f"--frames must be at least 1, got {args.frames}")
    make, policy = env_factory(args.env), policy_of(args)
    lanes = in_lanes(args.lanes, make)
    count = max(args.workers, 1) * args.lanes
    batch = min(max(args.frames, count), 100 * count)
    per_batch = -(-batch // count) * count
    total = -(-args.frames // per_batch) * per_batch
    options: dict[str, Any] = {"frames_per_batch": per_batch, "total_frames": total}
    collector = (
        MultiSyncCollector([lanes] * args.workers, policy, **options)
        if args.workers
        else Collector(lanes, policy, **options)
    )
    with collector:
        if args.seed is not None:
            collector.set_seed(args.seed)
        about = {"env": None if ":" not in args.env else args.env, "seed": args.seed}
        with record(collector, args.out, args.format, **about) as recording:
            for _ in collector.progress():
                pass
    if not recording.episodes:
        print(f"no episode ended within {total:,} frames: nothing was written")
        return 1
    print(load(recording.path, recording.format))
    return 0
