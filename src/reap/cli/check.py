"""reap check: try an env, and report in plain words what is wrong with it.

reap check CartPole-v1
reap check my_env.py:make --steps 1000
"""

from __future__ import annotations

import argparse
import functools

import gymnasium as gym

from reap.cli.named import env_factory, object_at
from reap.testing import check_env


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("env", metavar="ENV", help="a Gymnasium id, or FILE.py:MAKE")
    parser.add_argument("--steps", type=int, default=200, help="how long to play (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Check the env. Return 0: an env that is wrong raises."""
    if ":" in args.env:
        make = object_at(args.env)
    else:
        env_factory(args.env)().close()  # raises reap's own error if the id is not registered
        make = functools.partial(gym.make, args.env)
    for remark in check_env(make, steps=args.steps):
        print(f"- {remark}")
    print(f"{args.env}: nothing is wrong")
    return 0
