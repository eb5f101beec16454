"""Envs and policies by their names on the command line: a Gymnasium id, `file.py:make` or `package.module:make`."""

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
    """Return the function or class that `file.py:name` or `package.module:name` refers to."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UsageError(f"{name!r} must be FILE.py:NAME or MODULE:NAME")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"{name!r}: there is no file {place}")
        found = runpy.run_path(place).get(attribute)
    else:
        sys.path.insert(0, "")  # modules in the working directory can be imported, as with `python -m`
        try:
            found = getattr(importlib.import_module(place), attribute, None)
        except ImportError as cause:
            raise UsageError(f"{name!r}: {cause}") from cause
        finally:
            sys.path.remove("")
    if not callable(found):
        raise UsageError(f"{name!r}: {place} has no function or class {attribute!r}")
    return found


def _build(name: str) -> Any:
    return object_at(name)()


def _serial_env(count: int, make: Callable[[], Any]) -> Any:
    return SerialEnv(count, make)


def in_lanes(count: int, make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a factory of an env with `count` lanes; for one lane, `make` itself."""
    return make if count == 1 else functools.partial(_serial_env, count, make)


def env_factory(name: str) -> Callable[[], Any]:
    """Return a factory of the env with this name, which can be sent to other processes."""
    if ":" not in name:
        return functools.partial(GymEnv, name)
    object_at(name)  # raises errors now, in this process
    return functools.partial(_build, name)


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --policy and --weights."""
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
    except Exception as cause:  # torch's message has a line per mismatch
        message = " ".join(str(cause).split())
        raise UsageError(f"--weights {path} does not fit the policy: {message}") from cause


def policy_of(args: argparse.Namespace) -> Any:
    """Return the policy named in the arguments, with its weights; None: random actions."""
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
