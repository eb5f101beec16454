"""Action masks: which choices an env allows at a step, and one of them at random."""

from __future__ import annotations

import gymnasium as gym
import torch
from torch import Tensor

from reap.spec import EnvSpec, Key


def legal_choice(mask: Tensor) -> Tensor:
    """One of the choices that each mask `[…, n]` allows, all of them equally likely; where it allows none, of all."""
    allowed = mask.bool()
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    return torch.rand(allowed.shape, device=mask.device).masked_fill(~allowed, -1).argmax(-1)


def action_masks(spec: EnvSpec) -> dict[Key, Key]:
    """The masks an env shows of its discrete actions: an observation "action_mask" beside one, a flag per choice."""
    found = {}
    for key, leaf in spec.action.items():
        mask = spec.observation.get((*key[:-1], "action_mask"))
        if mask is None or not isinstance(leaf.space, gym.spaces.Discrete) or mask.dtype is None:
            continue
        kind = not (mask.dtype.is_floating_point or mask.dtype.is_complex)
        lanes = leaf.shape[:-1] if leaf.one_hot else leaf.shape  # of several agents
        if kind and mask.shape == (*lanes, leaf.n):
            found[key] = (*key[:-1], "action_mask")
    return found
