"""FrameStack: the policy sees the last k frames; a slot, a batch and a buffer hold each frame once.

    env ──► frame ──► ("frame", "pixels") of the row: kept            batch ──► restore ──► "pixels" [N, T, k, …]
                 └──► stack of the last k ──► "pixels": room for the latest only, read by the policy

A lane that was reset sees its first frame k times. Each batch also carries the stacks that the policy saw at its first
row, so that `restore` can stack the frames of episodes that began before the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from reap.arguments import whole
from reap.core.env import Env, Rows
from reap.core.slot import FIRST, TRAJ_IDS, Row
from reap.envs.transforms.base import Transform, TransformLanes, chosen_keys
from reap.errors import UsageError
from reap.spec import AnyKey, Key, Leaf, as_key

Array = np.ndarray[Any, Any]
_BEFORE = -(2**40)  # a row before any batch
FRAME_KEY = "frame"  # the branch of a batch that holds the frames that stacks are made of


class FrameStack(Transform):
    """Show the policy the last `size` frames as one observation, without storing a frame more than once.

    >>> stack = FrameStack(4)
    >>> env = TransformedEnv(SerialEnv(8, make_atari), GrayscaleResize(), stack)
    >>> collector = Collector(env, policy, frames_per_batch=1024, postproc=stack.restore)

    The policy sees stacks under the observation's own key. Batches hold single frames, `("frame", key)`; `restore`
    makes stacks of them where they are needed: as `postproc`, or on sampled batches.

    Args:
        size: how many frames to stack.
        keys: which observations to stack; None: all tensors except counters and infos.
    """

    def __init__(self, size: int, keys: Collection[AnyKey] | AnyKey | None = None) -> None:
        self.size, self.keys = int(whole("size", size, least=1) or 1), keys

    def around(self, env: Env) -> Env:
        return _FrameStackLanes(env, self)

    def restore(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch `[…, T]` with stacks in place of frames, at its root and under "next".

        If an episode began before the batch and the batch lacks the stacks of its first row (a sampled batch does),
        the batch's first frame stands in for the missing ones.
        """
        frames = batch.get(FRAME_KEY, None)
        if frames is None:
            raise UsageError(f"restore: the batch has no {FRAME_KEY!r}; is FrameStack the last transform of its env?")
        start = _episode_starts(batch)
        first = batch.get(FIRST, None)
        out = batch.exclude(FRAME_KEY, ("next", FRAME_KEY), FIRST)
        for key in frames.keys(True, True):
            key = as_key(key)
            before = None if first is None else first.get(key)
            roots, following = self._stacked(batch, key, start, before)
            out.set(key, roots)
            out.set(("next", *key), following)
        return out

    def _stacked(self, batch: TensorDictBase, key: Key, start: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        frames, following = batch.get((FRAME_KEY, *key)), batch.get(("next", FRAME_KEY, *key))
        lead, steps, shape = batch.batch_size[:-1], batch.batch_size[-1], frames.shape[batch.ndim :]
        lanes = int(np.prod(lead, dtype=np.int64))
        frames, following = (one.reshape(lanes, steps, *shape) for one in (frames, following))
        size = self.size
        if first is None:
            history = frames[:, :1].expand(lanes, size - 1, *shape)
        else:  # every row holds the same value
            history = first.select(batch.ndim - 1, 0).reshape(lanes, size, *shape)[:, : size - 1]
        row = torch.arange(steps, device=frames.device)
        offsets = torch.arange(1 - size, 1, device=frames.device)
        at = torch.maximum(row[:, None] + offsets, start.reshape(lanes, steps, 1)) + size - 1  # in history and frames
        every = torch.cat([history, frames], 1)
        lane = torch.arange(lanes, device=frames.device)[:, None, None]
        roots = every[lane, at]
        after = torch.cat([roots[:, :, 1:], following[:, :, None]], 2)
        out = stacked_shape(size, tuple(shape))
        return roots.reshape(*lead, steps, *out), after.reshape(*lead, steps, *out)


def stacked_shape(size: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a stack's shape: images `[C, H, W]` are joined along channels, others get a leading dimension."""
    return (size * shape[0], *shape[1:]) if len(shape) == 3 and shape[0] in (1, 3) else (size, *shape)


def _episode_starts(batch: TensorDictBase) -> Tensor:
    """Return the row in which each row's episode began, or `_BEFORE` if it began before the batch."""
    ids = batch.get(TRAJ_IDS, None)
    steps = batch.batch_size[-1]
    if ids is not None:
        new = ids[..., 1:] != ids[..., :-1]
    else:
        new = batch.get(("next", "done"))[..., :-1, 0]
    row = torch.arange(1, steps, device=new.device)
    marked = torch.where(new, row, _BEFORE)
    before = torch.full((*new.shape[:-1], 1), _BEFORE, device=new.device)
    return torch.cat([before, marked], -1).cummax(-1).values


class _FrameStackLanes(TransformLanes):
    def __init__(self, env: Env, transform: FrameStack) -> None:
        spec, name = env.spec, "FrameStack"
        keys = chosen_keys(name, transform.keys, spec)
        if spec.rows != "whole":
            raise UsageError(
                f"{name}: this env makes steps that are not frames, which cannot be stacked; it must reset single "
                f"lanes when asked to, without a step"
            )
        frames = {(FRAME_KEY, *key): leaf for key, leaf in spec.observation.items() if key in keys}
        clash = [key for key in frames if key in spec.observation]
        if clash or any(key[0] == FRAME_KEY for key in spec.observation):
            raise UsageError(
                f"{name} stores frames under {FRAME_KEY!r}, which this env has already; rename that observation"
            )
        size, shapes = transform.size, {key: spec.observation[key].shape for key in keys}
        stacks = {key: Leaf(stacked_shape(size, shapes[key]), spec.observation[key].dtype, once=True) for key in keys}
        super().__init__(env, name)
        named = {(FRAME_KEY, *key) if key in keys else key: leaf for key, leaf in spec.observation.items()}
        hidden = spec.look.hidden | {*keys, *(("next", *key) for key in keys)}
        self.spec = dataclasses.replace(
            spec,
            observation={**named, **stacks},
            side=spec.side | frames.keys(),
            look=dataclasses.replace(spec.look, hidden=frozenset(hidden)),
        )
        places, lanes = list(spec.observation), spec.lanes
        # For each key: the index of its frames in a row, the index of its stacks, and the stacks' shape frame by frame.
        self._parts = [
            (places.index(key), self._inner_leaves + n, (lanes, size, *shapes[key])) for n, key in enumerate(keys)
        ]
        self._last_stacks: list[Array] = []  # the stacks that the policy read last

    def _on_reset(self, lanes: list[int], raw: Rows, into: Rows) -> None:
        for at, stack, shape in self._parts:
            into[stack].reshape(shape)[lanes] = raw[at][lanes][:, None]
        self._last_stacks = [into[stack] for _, stack, _ in self._parts]

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        chosen: Any = slice(None) if len(lanes) == self.spec.lanes else list(lanes)
        for (at, stack, shape), last in zip(self._parts, self._last_stacks):
            new, old = row.next[stack].reshape(shape), last.reshape(shape)
            new[chosen, :-1] = old[chosen, 1:]
            new[chosen, -1] = raw[at][chosen]
        self._last_stacks = [row.after[stack] for _, stack, _ in self._parts]
        return ended
