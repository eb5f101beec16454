"""Info columns: entries of an env's info dict that the user declared, as leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from reap.errors import UsageError, WrongArgument
from reap.spec import Key, Leaf, show_keys, torch_dtype

InfoKeys = Sequence[str] | Mapping[str, Any]


def info_leaves(info_keys: InfoKeys, taken: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
    """Declared info keys as leaves: a bare name is a float32 number; a mapping gives dtype, (dtype, shape), space."""
    if isinstance(info_keys, str):
        raise WrongArgument(f"info_keys must be a list of names or a mapping, got the string {info_keys!r}")
    declared = dict(info_keys) if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys, np.float32)
    leaves: dict[Key, Leaf] = {}
    for name, what in declared.items():
        if isinstance(what, gym.Space):
            if what.dtype is None:
                raise UsageError(f"info_keys: {name!r} has the space {what}, which has no tensor form")
            dtype, shape = what.dtype, what.shape or ()
        else:
            dtype, shape = what if isinstance(what, tuple) else (what, ())
        leaves[(name,)] = Leaf(tuple(shape), dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype))
    clash = [key for key in leaves if key in taken]
    if clash:
        raise UsageError(f"info_keys {show_keys(clash)} are observation keys already")
    return leaves
