"""Envs and policies as a command line names them: a Gymnasium id, or `file.py:make` and `package.module:make`."""

from __future__ import annotations

import argparse
import functools
import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reap import checkpoint
from reap.envs import GymEnv, SerialEnv
from reap.errors import UsageError


def object_at(name: str) -> Any:
    """What `file.py:name` or `package.module:name` is."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UsageError(f"{name!r} must be FILE.py:NAME or MODULE:NAME")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"{name!r}: there is no file {place}")
        found = runpy.run_path(place).get(attribute)
    else:
        sys.path.insert(0, "")  # what lies here can be named, as with `python -m`
        try:
            found = getattr(importlib.import_module(place), attribute, None)
        except ImportError as cause:
            raise UsageError(f"{name!r}: {cause}") from cause
        finally:
            sys.path.remove("")
    if not callable(found):
        raise UsageError(f"{name!r}: {place} has no function or class {attribute!r}")
    return found


def _made(name: str) -> Any:
    return object_at(name)()


def _lanes(count: int, make: Callable[[], Any]) -> Any:
    return SerialEnv(count, make)


def in_lanes(count: int, make: Callable[[], Any]) -> Callable[[], Any]:
    """A factory of so many copies of an env as lanes of one; of one, the env itself."""
    return make if count == 1 else functools.partial(_lanes, count, make)


def env_factory(name: str) -> Callable[[], Any]:
    """A factory of the env with this name, which reaches other processes."""
    if ":" not in name:
        return functools.partial(GymEnv, name)
    object_at(name)  # what is wrong with it is told now, and here
    return functools.partial(_made, name)


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """--policy and --weights."""
    parser.add_argument(
        "--policy",
        metavar="FILE.py:MAKE",
        help="a function that makes the policy, or a class; without it: random actions",
    )
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="its weights: a directory of reap.checkpoint, or a state_dict that torch.save wrote",
    )


def _load_weights(policy: nn.Module, path: str) -> None:
    try:
        policy.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except OSError:
        raise
    except Exception as cause:  # torch tells each thing that does not fit in a line of its own
        told = " ".join(str(cause).split())
        raise UsageError(f"--weights {path} does not fit the policy: {told}") from cause


def policy_of(args: argparse.Namespace) -> Any:
    """The policy that was named, with its weights; None: random actions."""
    if args.policy is None:
        if args.weights is not None:
            raise UsageError("--weights are for a policy; name the function that makes it by --policy FILE.py:MAKE")
        return None
    policy = object_at(args.policy)()
    if args.weights is not None:
        if not isinstance(policy, nn.Module):
            raise UsageError(f"--weights are for a module; {args.policy} made {type(policy).__name__}")
        if Path(args.weights).is_dir():
            checkpoint.load(args.weights, policy=policy)
        else:
            _load_weights(policy, args.weights)
    return policy
