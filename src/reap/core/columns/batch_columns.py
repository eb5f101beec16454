"""Batch columns: which columns a batch gets from env, policy and collector, and which names are reserved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from reap.core.policy import Policy, RandomActions
from reap.core.slot import FLAGS, FRAME, MASK, TRAJ_IDS, VERSION, Layout
from reap.errors import SpecMismatch
from reap.spec import LANE_AT, EnvSpec, Key, Leaf, show


def current_for(observation: Mapping[Key, Leaf], lanes: int) -> list[np.ndarray[Any, Any]]:
    """Return memory for one observation of every lane."""
    return [leaf.column(lanes) for leaf in observation.values()]


RESERVED = {*FLAGS, "reward", "next", "collector", "policy_version", FRAME[-1]}


def check_names(spec: EnvSpec, more: Collection[Key] = ()) -> None:
    """Raise SpecMismatch if an observation has a name that a batch uses for something else, or one of `more`."""
    taken = [key for key in spec.observation if key[0] in RESERVED or key in spec.action or key in more]
    if taken:
        raise SpecMismatch(
            f"the env's observation {show(taken[0])} has a name that a batch uses for something else; rename it"
        )


def layout_by_hand(spec: EnvSpec, action: Mapping[Key, Leaf], steps: int = 1) -> Layout:
    """Return the layout for steps made by hand, outside the loop: only the columns the env reads and writes."""
    return Layout(columns_of(spec, RandomActions(action)), steps, spec.lanes, batched=spec.batched)


def columns_of(
    spec: EnvSpec,
    policy: Policy,
    *,
    ids: bool = False,
    mask: bool = False,
    version: bool = False,
    compact: bool = False,
    more: Mapping[Key, Leaf] | None = None,
) -> dict[Key, Leaf]:
    """Return every column of a batch, flags first so that they lie side by side. `more`: additional columns."""
    check_names(spec, {LANE_AT} if spec.ready_of is None else ())
    ours = (RESERVED | {key[0] for key in spec.side if key not in policy.inputs}) - {"next"}
    taken = [key for key in policy.outputs if key[0] in ours and key not in spec.action and key != VERSION]
    if taken:
        raise SpecMismatch(f"policy writes {show(taken[0])}, a name that a batch uses for something else; rename it")
    flag = Leaf((1,), torch.bool)
    columns: dict[Key, Leaf] = {(*root, f): flag for root in ((), ("next",)) for f in FLAGS}
    columns.update(spec.observation)
    columns.update(policy.outputs)
    columns.update({("next", *key): leaf for key, leaf in spec.observation.items() if not compact or leaf.loose})
    columns.update({("next", *key): leaf for key, leaf in spec.reward.items()})
    whole = Leaf((), torch.int64)
    said = policy.outputs.get(VERSION, whole)
    if (said.shape, said.dtype) != ((), torch.int64):
        raise SpecMismatch(
            f"policy writes {show(VERSION)} as {said}; under that name a batch has the version of the weights "
            f"that acted, an int64 for each lane: write that, or rename it"
        )
    if ids:
        columns[TRAJ_IDS] = whole
    if mask or spec.rows != "whole":
        columns[MASK] = Leaf((), torch.bool)
    columns.update(more or {})
    if version:
        columns[VERSION] = columns[("next", *VERSION)] = whole
    return columns
