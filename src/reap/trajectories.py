"""Trajectories: one batch of steps, cut where episodes end.

    [lanes, T]   0 0 0 1 1 2          padded [3, 3]   0 0 0      mask   1 1 1
                 3 3 3 3 4 4    ──►   …               1 1 ·             1 1 0
                                                      2 · ·             1 0 0
Whole-array arithmetic: one running sum finds the pieces, one scatter per leaf moves them.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from reap.errors import UsageError
from reap.spec import AnyKey, Key, as_key, show


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: AnyKey | None = None,
    trajectory_key: AnyKey | None = None,
    done_key: AnyKey | None = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """A batch `[…, T]` cut into trajectories: `[N, L]`, zero-padded, with a mask beside the ids.

    >>> split = split_trajectories(batch)
    >>> split["collector", "mask"]      # True where a frame is

    Args:
        rollout_tensordict: data whose last batch dimension is time.
        prefix: where ids and mask live; "collector" if that entry exists, else the root.
        trajectory_key: the ids' own key, in place of `prefix`.
        done_key: the flag under "next" to cut by when there are no ids; "done" by default.
        as_nested: nested tensors of every trajectory's own length in place of padding and mask.
    """
    td = rollout_tensordict
    if td.ndim < 1:
        raise UsageError("split_trajectories needs a time dimension; the batch size is []")
    ids_key, mask_key = _keys(td, prefix, trajectory_key)
    ids = td.get(ids_key, None)
    if ids is None:
        ids = _ids_from_done(td, as_key(done_key or "done"))
        td = td.copy().set(ids_key, ids)
    valid = td.get(mask_key, None)
    steps = td.batch_size[-1]
    lanes = ids.reshape(-1, steps)
    whole = valid is None and bool((lanes == lanes[:, :1]).all()) and len(lanes[:, 0].unique()) == len(lanes)
    if whole and not as_nested:
        out = td.copy() if td.ndim > 1 else td.copy().unsqueeze(0)
        return out.set(mask_key, torch.ones(out.batch_size, dtype=torch.bool, device=ids.device))

    flat = td.reshape(-1)
    begins = torch.ones_like(lanes, dtype=torch.bool)
    begins[:, 1:] = lanes[:, 1:] != lanes[:, :-1]
    begins = begins.reshape(-1)
    if valid is not None:  # rows without a frame do not belong to anyone
        keep = valid.reshape(-1)
        flat, begins = flat[keep], begins[keep]
    starts = begins.nonzero().squeeze(-1)
    ends = torch.cat([starts[1:], starts.new_tensor([len(begins)])])
    lengths = ends - starts
    if as_nested:
        return _nested(flat, lengths, mask_key)
    count, longest = len(starts), int(lengths.max()) if len(starts) else 0
    piece = begins.cumsum(0) - 1
    place = torch.arange(len(begins), device=starts.device) - starts[piece]
    index = piece * longest + place
    out = TensorDict({}, batch_size=[count, longest], device=td.device)
    for key, value in flat.items(True, True):
        padded = value.new_zeros((count * longest, *value.shape[1:]))
        padded.index_copy_(0, index, value)
        out.set(key, padded.reshape(count, longest, *value.shape[1:]))
    mask = torch.arange(longest, device=starts.device) < lengths.unsqueeze(1)
    return out.set(mask_key, mask)


def _keys(td: TensorDictBase, prefix: AnyKey | None, trajectory_key: AnyKey | None) -> tuple[Key, Key]:
    if trajectory_key is not None:
        ids = as_key(trajectory_key)
        return ids, (*ids[:-1], "mask")
    if prefix is None:
        root: Key = ("collector",) if td.get("collector", None) is not None else ()
    else:
        root = as_key(prefix)
    return (*root, "traj_ids"), (*root, "mask")


def _ids_from_done(td: TensorDictBase, done_key: Key) -> torch.Tensor:
    done = td.get(("next", *done_key), None)
    if done is None:
        raise UsageError(f"no trajectory ids and no {show(('next', *done_key))}: nothing says where episodes end")
    done = done.reshape(*td.batch_size, -1).any(-1)
    begins = torch.ones_like(done)
    begins[..., 1:] = done[..., :-1]
    return begins.reshape(-1).cumsum(0).reshape(td.batch_size) - 1


def _nested(flat: TensorDictBase, lengths: torch.Tensor, mask_key: Key) -> TensorDictBase:
    sizes = lengths.tolist()
    leaves: dict[Any, Any] = {
        key: torch.nested.nested_tensor(list(value.split(sizes)))
        for key, value in flat.items(True, True)
        if as_key(key) != mask_key
    }
    ragged = len(set(sizes)) > 1
    out = TensorDict({}, batch_size=[len(sizes), -1 if ragged else sizes[0]], device=flat.device)
    for key, value in leaves.items():
        out.set(key, value)
    return out
