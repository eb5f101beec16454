"""The parity grid: every kind of TorchRL env, every option that changes batches: the same batches in both libraries."""

import warnings

import pytest
import torch

from tests.worlds.pairs import LIBRARIES
from tests.worlds.scenarios import ENVS, GRID, OPTIONS, assert_same, policy_for

pytestmark = pytest.mark.filterwarnings("ignore")


def batches(library, kind, options, count=3):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        policy = policy_for(kind)
        env = ENVS[kind]()
        frames = 12 * max(1, env.batch_size.numel())
        torch.manual_seed(1)
        collector = LIBRARIES[library].collectors.Collector(env, policy, frames_per_batch=frames, **options)
        torch.manual_seed(2)
        found = []
        for batch in collector:
            found.append(batch.clone())
            if len(found) == count:
                break
        collector.shutdown()
    return found


def without(batch, kind):
    """What is said to differ left out: reap's memory of compact batches, ids of groups that end by themselves."""
    drop = [("collector", "final")]
    return batch.exclude(*drop, "collector") if kind.startswith("groups") else batch.exclude(*drop)


@pytest.mark.parametrize(("kind", "option"), GRID)
def test_grid(kind, option):
    want, got = (batches(library, kind, OPTIONS[option]) for library in ("torchrl", "reap"))
    assert len(got) == len(want) == 3
    for i, (ours, theirs) in enumerate(zip(got, want)):
        assert_same(without(ours, kind), without(theirs, kind), f"batch {i}")


def test_the_grid_is_large():
    assert len(GRID) >= 150
