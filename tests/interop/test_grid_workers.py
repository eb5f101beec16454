"""The parity grid with worker processes: TorchRL's envs in MultiSync, MultiAsync and AsyncCollector of both."""

import pytest
import torch

from tests.worlds.scenarios import ENVS, assert_same, policy_for
from tests.worlds.worker_groups import build, renumbered, take

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(60)]

SYNC, ASYNC, ONE = "MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector"
QUICK = [
    (SYNC, "gym with counters", {}),
    (SYNC, "counters over lanes", {}),
    (SYNC, "groups over lanes", {}),
    (SYNC, "matrix of lanes", {}),
    (ONE, "counters over lanes", {}),
    (ONE, "nested", {}),
    (ONE, "heterogeneous", {}),
]
LONG = [
    (SYNC, "gym", {}),
    (SYNC, "gym lanes", {}),
    (SYNC, "counters", {"cat_results": 0}),
    (SYNC, "counters over lanes", {"cat_results": 0}),
    (SYNC, "counters over lanes", {"cat_results": -1}),
    (SYNC, "lanes of lanes", {"cat_results": -1}),
    (SYNC, "moving norm", {}),
    (SYNC, "primer", {"max_frames_per_traj": 3}),
    (SYNC, "counting", {"reset_at_each_iter": True}),
    (SYNC, "nested", {}),
    (SYNC, "groups", {"cat_results": 0}),
    (ONE, "gym lanes", {}),
    (ONE, "frame stack", {}),
    (ONE, "lanes of lanes", {}),
    (ONE, "counting", {"max_frames_per_traj": 2}),
]


def name(case):
    what, kind, options = case
    return f"{what}-{kind}-{'-'.join(f'{k}={v}' for k, v in options.items())}"


def batches(library, what, kind, options):
    torch.manual_seed(0)
    policy = policy_for(kind)
    each = 8 * max(1, ENVS[kind]().batch_size.numel())
    envs = ENVS[kind] if what == ONE else [ENVS[kind]] * 2
    frames = each if what == ONE else 2 * each
    collector = build(library, what, envs, policy, frames_per_batch=frames, total_frames=3 * frames, **options)
    try:
        return renumbered(take(collector))
    finally:
        collector.shutdown()


def compare(case):
    want, got = (batches(library, *case) for library in ("torchrl", "reap"))
    assert len(got) == len(want) == 3
    drop = ["collector"] if "groups" in case[1] else []
    for i, (ours, theirs) in enumerate(zip(got, want)):
        assert_same(ours.exclude(*drop), theirs.exclude(*drop), f"batch {i}")


@pytest.mark.parametrize("case", QUICK, ids=name)
def test_workers(case):
    compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=name)
def test_workers_in_every_way(case):
    compare(case)


def test_two_asynchronous_workers():
    """Who comes first is chance; every worker's own batches are what one worker alone delivers."""
    kind = "counters over lanes"
    alone = batches("torchrl", ONE, kind, {})
    frames = alone[0].numel()
    collector = build(
        "reap", ASYNC, [ENVS[kind]] * 2, policy_for(kind), frames_per_batch=frames, total_frames=6 * frames
    )
    streams = {0: [], 1: []}
    try:
        for batch in collector:
            streams[batch.origin.worker].append(batch.clone())
    finally:
        collector.shutdown()
    assert sum(map(len, streams.values())) == 6
    for stream in streams.values():
        for ours, theirs in zip(renumbered(stream), alone):
            assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["text", "tensorclass"])
def test_text_of_workers_is_of_its_own_batch(kind):
    """TorchRL's workers deliver the first batch's texts with every batch; here it is as without workers."""
    policy = policy_for(kind)
    alone = take(build("reap", "Collector", ENVS[kind], policy, frames_per_batch=8, total_frames=24))
    for ours, theirs in zip(batches("reap", ONE, kind, {}), renumbered(alone), strict=True):
        assert_same(ours, theirs)
    both = batches("reap", SYNC, kind, {})
    assert [batch.batch_size for batch in both] == [(2, 8)] * 3
    for ours, theirs in zip(both, alone, strict=True):
        for worker in range(2):
            assert_same(ours[worker].exclude("collector"), theirs.exclude("collector"))
