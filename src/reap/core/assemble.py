"""Assemble: turns the columns of a full slot into the batch that the consumer receives.

arrays `[T, N, …]` ──► tensors `[N, T, …]` by key ──► TensorDict, last dimension named "time"

These functions keep no state. They copy nothing unless the layout asks for contiguous batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from reap.core.slot import Layout
from reap.spec import Key


def assemble(arrays: Mapping[Key, np.ndarray[Any, Any]], layout: Layout) -> TensorDict:
    """Return a batch of views of `arrays`, or of copies if the layout asks for contiguous batches."""
    size = torch.Size(layout.batch_size)
    names = [None] * (len(size) - 1) + ["time"]
    return _branch(tree_of(layout.tensors(arrays)), size, names, (), layout.look.inner)


def tree_of(leaves: Mapping[Key, Any]) -> dict[str, Any]:
    """Return `leaves`, which are given by nested key, as nested dicts."""
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = leaf
    return tree


def _branch(
    tree: dict[str, Any], size: torch.Size, names: list[Any], at: Key, inner: Mapping[Key, tuple[int, ...]]
) -> TensorDict:
    """Return the TensorDict for the branch at key `at`.

    `inner` gives the extra batch dimensions of some branches, which follow the dimensions of the batch.
    """
    leaves = {k: _branch(v, size, names, (*at, k), inner) if isinstance(v, dict) else v for k, v in tree.items()}
    own = inner.get(at, ())
    return TensorDict(leaves, batch_size=[*size, *own], names=[*names, *[None] * len(own)])
