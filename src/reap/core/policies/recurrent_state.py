"""RecurrentState: store what a recurrent policy carries from step to step as columns beside the observations.

    row t      hidden, is_init ──► policy ──► ("next", hidden)
                    ▲                              │
    row t+1         └────────── copied ◄───────────┘      in a lane that was reset: the first carry again, is_init True

To the loop a carry is one more observation: `RecurrentState` wraps the env and adds the leaves, the policy writes
their `next`. So every frame is delivered with the state its action was computed from, and a trajectory can be replayed
offline from its own rows.

A policy declares its carry as an attribute that maps keys to one lane's first value:

    class Recurrent(nn.Module):
        carry = {"hidden": torch.zeros(32)}
        def forward(self, observation, hidden):
            ...
            return action, hidden            # actions first, then anything else, the new carry last
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reap.core.env import Env, Rows
from reap.core.slot import Row
from reap.core.wrapped import Wrapped
from reap.errors import UsageError, WrongArgument
from reap.spec import LANE_AT, EnvSpec, Key, Leaf, as_key, show

IS_INIT: Key = ("is_init",)


def carry_of(policy: Any) -> dict[Key, Tensor]:
    """Return the carry a policy and its parts declare, key → one lane's first value; empty if they carry nothing."""
    parts: list[Any] = list(policy.modules()) if isinstance(policy, nn.Module) else [policy]
    found: dict[Key, Tensor] = {}
    for part in parts:
        declared = getattr(part, "carry", None)
        if isinstance(declared, Mapping):
            for key, first in declared.items():
                if not isinstance(first, Tensor):
                    raise WrongArgument(f"carry {key!r} must be a tensor, one lane's first value; got {first!r}")
                found[as_key(key)] = first.detach().cpu()
        # TorchRL's recurrent modules.
        elif callable(getattr(part, "make_tensordict_primer", None)) and _writes_next(part):
            primers = part.make_tensordict_primer().primers
            for key in primers.keys(True, True):
                found[as_key(key)] = primers[key].zero().detach().cpu()
    return found


def _writes_next(part: Any) -> bool:
    """Return whether a module writes a next value; others with a primer (for a dropout mask) write it back as is."""
    return any(as_key(key)[0] == "next" for key in getattr(part, "out_keys", ()))


def with_recurrent_state(env: Env, policy: Any, carry: Mapping[Key, Tensor]) -> Env:
    """Return `env` with columns for the carry and, if the policy reads it, `is_init`; or `env` if it needs neither."""
    return RecurrentState(env, carry) if needs_recurrent_state(env.spec, policy, carry) else env


def needs_recurrent_state(spec: EnvSpec, policy: Any, carry: Mapping[Key, Tensor]) -> bool:
    """Return whether a policy carries something from step to step, or reads `is_init`, which the env lacks."""
    parts: list[Any] = list(policy.modules()) if isinstance(policy, nn.Module) else [policy]
    asks = any(as_key(key) == IS_INIT for part in parts for key in getattr(part, "in_keys", ()))
    return bool(carry) or (asks and IS_INIT not in spec.observation)


def with_carry(spec: EnvSpec, carry: Mapping[Key, Tensor]) -> EnvSpec:
    """Return `spec` with `is_init`, unless it has that, and the leaves of the carry after its own observations."""
    own = spec.observation
    clash = [key for key in carry if key in own]
    if clash:
        raise UsageError(f"the policy's carry {show(clash[0])} is already an observation of the env; rename it")
    added: dict[Key, Leaf] = {} if IS_INIT in own else {IS_INIT: Leaf((1,), torch.bool)}
    added.update({key: Leaf(tuple(first.shape), first.dtype) for key, first in carry.items()})
    return dataclasses.replace(spec, observation={**own, **added}, side=spec.side | added.keys())


class RecurrentState(Wrapped):
    """Adds `is_init` and the carry's leaves to an env's observations."""

    def __init__(self, env: Env, carry: Mapping[Key, Tensor]) -> None:
        own, spec = env.spec.observation, with_carry(env.spec, carry)
        for key, first in carry.items():
            if first.dtype is torch.bfloat16:
                raise UsageError(f"the carry {show(key)} is bfloat16, which NumPy cannot hold; keep it as float32")
        super().__init__(env, spec)
        added = {key: leaf for key, leaf in spec.observation.items() if key not in own}
        self._env_leaves = len(own)
        self._first = [True] * (IS_INIT in added) + [first.numpy() for first in carry.values()]
        self._init_column = self._env_leaves if IS_INIT in added else None
        # Each lane's carry, used only if a step may make no frame of a lane. With asynchronous lanes such a step was a
        # reset, so that the lane always finds the first carry there.
        shapes = [(spec.lanes, *leaf.shape) for leaf in added.values()]
        self._carry_now = [np.broadcast_to(first, shape).copy() for first, shape in zip(self._first, shapes)]
        self._may_skip_frames = spec.rows != "whole"
        self._lane_column = list(own).index(LANE_AT) if LANE_AT in own else None
        self.has_after_step = env.has_after_step or self._lane_column is not None
        self._lane_at = np.zeros(0, np.int64)
        self._carry_by_lane = [np.repeat(first[None], spec.all_lanes, 0) for first in self._carried(self._first)]

    def _carried(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return leaves[self._init_column is not None :]

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into[: self._env_leaves], seeds)
        chosen = list(lanes)
        for array, now, first in zip(into[self._env_leaves :], self._carry_now, self._first):
            array[chosen] = now[chosen] = first
        if self._lane_column is not None:
            self._lane_at = into[self._lane_column].copy()

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        if self._init_column is not None:
            row.next[self._init_column][...] = False
        if self._lane_column is None:
            ended = self._env.step(lanes, row)
        else:  # other lanes come back than were sent: keep the carry by lane, and look it up
            there = self._lane_at >= 0  # some positions may hold no lane
            for kept, new in zip(self._carry_by_lane, self._carried(row.next[self._env_leaves :])):
                kept[self._lane_at[there]] = new[there]
            ended = self._env.step(lanes, row)
            self._lane_at = row.next[self._lane_column].copy()
            for kept, new in zip(self._carry_by_lane, self._carried(row.next[self._env_leaves :])):
                new[...] = kept[self._lane_at]
        if self._may_skip_frames and row.mask is not None:
            absent = ~row.mask  # no frame was made of these lanes: the policy finds the same carry again
            for array, now in zip(row.next[self._env_leaves :], self._carry_now):
                array[absent] = now[absent]
                if self._lane_column is None:
                    now[...] = array
        return ended

    def open_state(self) -> Any:
        return {"env": self._env.open_state(), "carry": [torch.from_numpy(now.copy()) for now in self._carry_now]}

    def load_open_state(self, state: Any) -> None:
        self._env.load_open_state(state["env"])
        for now, kept in zip(self._carry_now, state["carry"]):
            now[...] = kept

    def after_step(self, row: Row) -> None:
        if self._env.has_after_step:
            self._env.after_step(row)
        if self._lane_column is not None and row.done.any():  # the loop does not reset these lanes
            for after, first in zip(row.after[self._env_leaves :], self._first):
                after[row.done] = first
