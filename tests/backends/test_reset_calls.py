"""Calls after which workers begin anew: nothing that was made before is delivered after them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed.torchdist import DistributedAsyncCollector, DistributedSyncCollector
from reap.testing import CountingEnv
from tests.worlds.faults import ran_ahead

KINDS = pytest.mark.parametrize(
    "kind", [MultiSyncCollector, MultiAsyncCollector, DistributedSyncCollector, DistributedAsyncCollector]
)


class Marked(nn.Module):
    """Says with which weight it acted."""

    def __init__(self, mark: float = 0.0) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.tensor([mark]))

    def forward(self, observation):
        return observation[..., 2:], self.mark.expand(1).clone()


def made(kind, policy=None, **options):
    return kind([lambda: CountingEnv((100,))], policy or Marked(), frames_per_batch=5, **options)


@KINDS
def test_a_reset(kind):
    with made(kind) as c:
        seen = max(int(c.next()["collector", "traj_ids"].max()) for _ in range(3))
        ran_ahead(c)
        c.reset()
        for _ in range(6):
            assert int(c.next()["collector", "traj_ids"].min()) > seen


def broken_off(collector):
    """Take a batch that Ctrl-C stops in `postproc`; returns the highest trajectory id in it."""
    seen = []

    def interrupted(batch):
        seen.append(int(batch["collector", "traj_ids"].max()))
        raise KeyboardInterrupt

    collector.postproc = interrupted
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    collector.postproc = None
    return seen[0]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_reset_after_a_batch_that_was_broken_off(kind):
    with made(kind) as c:
        seen = broken_off(c)
        c.reset()
        assert int(c.next()["collector", "traj_ids"].min()) > seen


@KINDS
def test_a_state(kind):
    with made(kind, Marked(7.0)) as other:
        other.next()
        state = other.state_dict()
    with made(kind) as c:
        for _ in range(3):
            assert c.next()["output1"].unique().tolist() == [0.0]
        ran_ahead(c)
        c.load_state_dict(state)
        for _ in range(6):
            assert c.next()["output1"].unique().tolist() == [7.0]
        assert c.stats("per_worker")["worker_0/frames"] >= 7 * 5


@KINDS
@pytest.mark.parametrize("taken", [1, 2, 4])
def test_random_frames_are_counted_on(kind, taken):
    def is_random(batch):
        return not torch.equal(batch["action"], batch["observation"][..., 2:])

    with made(kind, init_random_frames=15) as c:
        assert [is_random(c.next()) for _ in range(taken)] == [True] * min(taken, 3) + [False] * (taken - 3)
        ran_ahead(c)
        state = c.state_dict()
        assert state["worker0"]["frames"] == state["frames"] == 5 * taken
    with made(kind, init_random_frames=15) as c:
        c.load_state_dict(state)
        assert [is_random(c.next()) for _ in range(3)] == [taken + n < 3 for n in range(3)]
        c.reset()
        assert is_random(c.next()) == (taken + 3 < 3)


@pytest.mark.parametrize("kind", [MultiAsyncCollector, DistributedAsyncCollector])
def test_a_reset_gives_back_what_nobody_took(kind):
    with made(kind, init_random_frames=10) as c:
        c.next()
        ran_ahead(c)
        c.reset()  # the second random rollout was made, and is dropped
        actions = [c.next()["action"].flatten().tolist() for _ in range(2)]
    assert actions[0] != [0, 1, 2, 3, 4]
    assert actions[1] == [5, 6, 7, 8, 9]
