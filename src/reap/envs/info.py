"""Info columns: leaves for the entries of an env's info dict that the user has declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from reap.errors import UsageError, WrongArgument
from reap.spec import AnyKey, Key, Leaf, as_key, show_keys, torch_dtype

InfoKeys = Sequence[AnyKey] | Mapping[AnyKey, Any]
_RECORDED = ("r", "l", "t")  # what Gymnasium's RecordEpisodeStatistics reports when an episode ends


def info_leaves(info_keys: InfoKeys, taken: Mapping[Key, Leaf], env: Any = None) -> dict[Key, Leaf]:
    """Return a leaf for each declared info key: float32 for a bare name; else its dtype, (dtype, shape) or space.

    A tuple names an entry of a dict inside the info. `taken` holds the leaves the env has already. If `env` is wrapped
    in Gymnasium's RecordEpisodeStatistics, the key "episode" stands for all entries that wrapper reports.
    """
    if isinstance(info_keys, str):
        raise WrongArgument(f"info_keys must be a list of names or a mapping, got the string {info_keys!r}")
    declared = dict(info_keys) if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys, np.float32)
    if "episode" in declared and records_episodes(env):
        kind = declared.pop("episode")
        declared.update({("episode", entry): kind for entry in _RECORDED})
    leaves: dict[Key, Leaf] = {}
    for name, what in declared.items():
        if isinstance(what, gym.Space):
            if what.dtype is None:
                raise UsageError(f"info_keys: {name!r} has the space {what}, which has no tensor form")
            dtype, shape = what.dtype, what.shape or ()
        else:
            dtype, shape = what if isinstance(what, tuple) else (what, ())
        leaves[as_key(name)] = Leaf(tuple(shape), dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype))
    clash = [key for key in leaves if key in taken]
    if clash:
        raise UsageError(f"info_keys {show_keys(clash)} are observation keys already")
    return leaves


def info_entry(info: Any, key: Key) -> Any:
    """Return the info dict's value under a nested key, or None if it has none."""
    for part in key:
        info = info.get(part) if isinstance(info, Mapping) else None
    return info


def recorded_at_end(info: Mapping[str, Any], key: Key) -> bool:
    """Whether the key names an entry that Gymnasium's RecordEpisodeStatistics has added at an episode's end."""
    found = info.get(key[0])
    return len(key) == 2 and isinstance(found, Mapping) and {*_RECORDED} <= found.keys()


def records_episodes(env: Any) -> bool:
    """Whether an env, or the first env of a vector env, is wrapped in Gymnasium's RecordEpisodeStatistics."""
    while env is not None:
        if type(env).__name__ == "RecordEpisodeStatistics":
            return True
        inner = getattr(env, "envs", None)  # of a vector env
        env = inner[0] if inner else getattr(env, "env", None)
    return False
