"""Action masks: find the masks of an env's discrete actions, and draw random actions among those a mask allows."""

from __future__ import annotations

import gymnasium as gym
import torch
from torch import Tensor

from reap.spec import EnvSpec, Key


def legal_choice(mask: Tensor) -> Tensor:
    """Draw uniformly one of the choices that each mask `[…, n]` allows; if a mask allows none, one of all."""
    allowed = mask.bool()
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    return torch.rand(allowed.shape, device=mask.device).masked_fill(~allowed, -1).argmax(-1)


def action_masks(spec: EnvSpec) -> dict[Key, Key]:
    """Return the key of each discrete action's mask: an observation "action_mask" beside it, with a flag per choice."""
    found = {}
    for key, leaf in spec.action.items():
        mask = spec.observation.get((*key[:-1], "action_mask"))
        if mask is None or not isinstance(leaf.space, gym.spaces.Discrete) or mask.dtype is None:
            continue
        kind = not (mask.dtype.is_floating_point or mask.dtype.is_complex)
        lanes = leaf.shape[:-1] if leaf.one_hot else leaf.shape  # one entry per agent, if there are several
        if kind and mask.shape == (*lanes, leaf.n):
            found[key] = (*key[:-1], "action_mask")
    return found
