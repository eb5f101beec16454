"""LagLimit: what goes on after a dropped rollout is another trajectory than what came before it."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from reap.backends.base import Rollout
from reap.collectors.parts.arrangements import LagLimit

LATER = 300 * 2**32 + 5  # an id of a worker that has joined after three hundred others


def seen(limit, ids, version):
    """The ids of a rollout `[2, 3]` as it is delivered, made with weights of this version; None if it is dropped."""
    batch = TensorDict({("collector", "traj_ids"): torch.tensor(ids)[:, None].expand(2, 3).clone()}, [2, 3])
    limit.rename(batch, 0)
    kept = limit.admits(batch, Rollout({}, None, 6, version), 10)
    return batch["collector", "traj_ids"][:, 0].tolist() if kept else None


def test_each_piece_has_an_id_of_its_own_whatever_the_workers_count_to():
    limit = LagLimit(0)
    own = [LATER % 2**40, LATER]
    pieces = [seen(limit, own, version) for version in (10, 9, 10, 10, 9, 9, 10)]
    assert [piece is None for piece in pieces] == [False, True, False, False, True, True, False]
    first, second, again, third = (piece for piece in pieces if piece is not None)
    assert first == own
    assert second == again
    assert len({*first, *second, *third}) == 6
    assert limit.dropped_frames == 18


def test_rows_that_are_no_frames_keep_their_mark():
    limit = LagLimit(0)
    assert seen(limit, [-1, 7], 9) is None
    mark, own = seen(limit, [-1, 7], 10)
    assert mark == -1
    assert own != 7
