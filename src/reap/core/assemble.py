"""Assemble: the bytes of a full slot as the batch a consumer receives. Pure: no copy, no state.

block ──► tensors `[N, T, …]` by key ──► TensorDict, last dimension named "time"
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from reap.core.slot import Layout


def assemble(block: torch.Tensor, layout: Layout, *, device: torch.device | None = None) -> TensorDict:
    """A batch on `block`. `device` is the one the caller asked for; the bytes are already there."""
    size = torch.Size(layout.batch_size)
    names = [None] * (len(size) - 1) + ["time"]
    tree: dict[str, Any] = {}
    for key, tensor in layout.tensors(block).items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = tensor
    return _branch(tree, size, names, device)


def _branch(tree: dict[str, Any], size: torch.Size, names: list[Any], device: torch.device | None) -> TensorDict:
    leaves = {k: _branch(v, size, names, device) if isinstance(v, dict) else v for k, v in tree.items()}
    return TensorDict(leaves, batch_size=size, names=names, device=device)
