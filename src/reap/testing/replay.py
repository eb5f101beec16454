"""Reproduces a failure that a collector recorded in a file, under pdb or in a test of its fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from reap.core.columns.batch_columns import current_for, layout_by_hand
from reap.core.env import Env
from reap.core.failure_record import FORMAT
from reap.core.resume import unpacked
from reap.core.slot import RowKeys, Slot
from reap.envs import as_env
from reap.errors import CorruptState, UsageError, WrongState
from reap.spec import Leaf


def replay_failure(path: str | Path, *, trusted: bool = False, env: Callable[[], Any] | None = None) -> None:
    """Step a fresh env to the point where one failed, and let it fail there: the same error is raised.

    >>> replay_failure("failures/reap-failure-20260102-030405-0a1b2c3d.pt", trusted=True)      # under pdb

    Args:
        path: the file that an error names; it also has it as `failure_file`.
        trusted: give True for files of your own; the env's factory is a pickle in the file, and is executed.
        env: a factory of the env, where the file holds none, or to try another one.
    """
    if not trusted:
        raise UsageError(f"{path} holds pickles, which are executed: give trusted=True if the file is your own")
    about = _read(path)
    lanes = _fresh_env(about, env)
    try:
        _replay(about, lanes)
    finally:
        lanes.close()
    sure = "" if about["exact"] else "; its episode depends on those before it, which are not recorded"
    raise WrongState(f"the env raised nothing this time; the recorded failure was: {about['error']}{sure}")


def _read(path: str | Path) -> Mapping[str, Any]:
    try:
        about = torch.load(path, weights_only=True)
        if about["format"] != FORMAT:
            raise CorruptState(f"{path} has format {about['format']!r:.40}, this reap reads {FORMAT}")
        return dict(about)
    except (FileNotFoundError, CorruptState):
        raise
    except Exception as error:
        raise CorruptState(f"{path} is not a failure that a collector has written: {error!r:.200}") from error


def _fresh_env(about: Mapping[str, Any], make: Callable[[], Any] | None) -> Env:
    if make is not None:
        return as_env(make)
    if about["env"] is None:
        raise UsageError("the env could not be pickled when this was written; give env=, a factory of it")
    found: Env = unpacked(about["env"])()
    return found


def _replay(about: Mapping[str, Any], env: Env) -> None:
    spec, lane = env.spec, about["lane"]
    if lane >= spec.lanes:
        raise UsageError(f"lane {lane} failed, but this env has only {spec.lanes} lanes")
    action = {tuple(key): Leaf(tuple(shape), dtype) for key, shape, dtype in about["action"]}
    env.expect(action)
    current = current_for(spec.observation, spec.lanes)
    seeds = None if about["seed"] is None else [about["seed"]] * spec.lanes
    if about["start"] is None or about["seed"] is not None:  # else skip the reset, which may raise: its state is loaded
        env.reset(range(spec.lanes), current, seeds)
    if about["start"] is not None:
        env.load_lane_state(lane, about["start"])
    slot = Slot(layout_by_hand(spec, action))
    env.set_policy_keys(list(action))
    acting = [lane] if spec.single_steps else range(spec.lanes)
    for t in range(about["steps"]):
        slot.clear_flags()
        (row,) = slot.cut(RowKeys(spec), current)
        for array, values in zip(row.action, about["actions"]):
            array[...] = values[t].numpy()  # of all lanes, where they are stepped together
        env.step(acting, row)
    if about["during"] == "reset":
        env.reset([lane] if spec.single_resets else range(spec.lanes), current)
