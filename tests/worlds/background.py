"""Collectors of every kind on worlds that can be predicted, and what their rows must be."""

from __future__ import annotations

import numpy as np
import torch

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.data import LazyTensorStorage, TensorDictReplayBuffer
from reap.envs import SerialEnv
from reap.testing import CountingEnv, EchoPolicy

IN_STEP = ["single", "sync", "async"]  # as many frames of each lane of a worker in every batch
KINDS = [*IN_STEP, "ready"]
LENGTHS = ((3, 1, 5), (2, 7), (4,), (6, 2, 2))  # episodes of each lane; two lanes to a worker
MIX = torch.tensor([3.0, 5.0, 7.0])


def lanes(first=0, env=CountingEnv):
    """Two lanes, which say in their observations who they are."""
    return lambda: SerialEnv(2, [lambda i=i: env(LENGTHS[i], i) for i in (first, first + 1)])


def make(kind, buffer, policy=None, env=CountingEnv, **options):
    options = {"frames_per_batch": 20, "total_frames": -1, "replay_buffer": buffer, **options}
    policy = policy or EchoPolicy()
    if kind == "single":
        return Collector(lanes(env=env), policy, **options)
    if kind == "ready":
        return AsyncBatchedCollector([lambda i=i: env(LENGTHS[i], i) for i in range(4)], policy, **options)
    many = MultiSyncCollector if kind == "sync" else MultiAsyncCollector
    return many([lanes(0, env), lanes(2, env)], policy, **options)


def buffer(rows=10_000, size=16, **options):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=size, **options)


def episode(lane, step):
    """Episode and place in it of a lane's frame number `step`."""
    lengths, number = LENGTHS[lane], 0
    while step >= lengths[number % len(lengths)]:
        step -= lengths[number % len(lengths)]
        number += 1
    return number, step


def frame_numbers(lane, seen):
    """The inverse of `episode`, of many observations of a lane."""
    lengths = np.array(LENGTHS[lane])
    rounds, number = np.divmod(seen[:, 1], len(lengths))
    return rounds * lengths.sum() + (np.cumsum(lengths) - lengths)[number] + seen[:, 2]


def check_end(memory):
    """A buffer that nobody writes to now, wrapped around or not: its rows follow each other, and so did all before."""
    rows, count = memory[:], memory.write_count
    turn = count % len(rows) if count > len(rows) else 0
    rows = torch.cat([rows[turn:], rows[:turn]])
    check_rows(rows, 1.0)
    seen, made = rows["observation"].long().numpy(), 0
    for lane in np.unique(seen[:, 0]).tolist():
        frames = frame_numbers(lane, seen[seen[:, 0] == lane])
        assert (np.diff(frames) == 1).all(), f"lane {lane}"
        made += int(frames[-1]) + 1
    assert made == count, "no frame is missing, none is there twice"


def check_rows(rows, weight=None):
    """Every row is one that its world can have made, in itself. `weight`: of the policy, if there was one only."""
    seen, after = rows["observation"], rows["next", "observation"]
    assert torch.equal(after - seen, torch.tensor([0.0, 0.0, 1.0]).expand_as(seen))
    if weight is not None:
        assert torch.equal(rows["action"], (seen * MIX).sum(-1, keepdim=True) * weight)
    assert torch.allclose(rows["next", "reward"], after[:, 2:] + rows["action"] / 8)
    lane, number, step = seen.long().unbind(-1)
    ends = torch.tensor([LENGTHS[k][n % len(LENGTHS[k])] for k, n in zip(lane.tolist(), number.tolist())])
    assert torch.equal(rows["next", "done"][:, 0], step + 1 == ends)


def check_streams(rows, weight=1.0, whole=False):
    """Each lane's rows are its frames from the first one on, without a hole; returns how many each has."""
    check_rows(rows, weight)
    counts = {}
    seen = rows["observation"].long().numpy()
    for lane in np.unique(seen[:, 0]).tolist():
        own = seen[seen[:, 0] == lane]
        assert own[:, 1:].tolist() == [list(episode(lane, i)) for i in range(len(own))], f"lane {lane}"
        ids = rows["collector", "traj_ids"][torch.from_numpy(seen[:, 0] == lane)]
        assert ((ids[1:] != ids[:-1]).numpy() == (own[1:, 1] != own[:-1, 1])).all()
        if whole:
            assert bool(rows["next", "done"][torch.from_numpy(seen[:, 0] == lane)][-1])
        counts[lane] = len(own)
    return counts
