"""TorchRL's EnvCreator: what its envs share, they share in workers."""

import functools
import warnings

import pytest
import torch

import reap.collectors
import reap.envs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.collectors
    from torchrl.envs import EnvCreator, GymEnv, TransformedEnv, VecNorm, VecNormV2

pytestmark = pytest.mark.filterwarnings("ignore")


def make(kind):
    return TransformedEnv(GymEnv("Pendulum-v1"), kind(in_keys=["observation"], decay=0.99))


def statistics(state):
    """The tensors of a VecNorm by their names, without what is the same in all."""
    inner = state.get("_extra_state", state)
    return {str(key): value.clone() for key, value in inner.items() if isinstance(value, torch.Tensor)}


def collect(collectors, kind):
    """The statistics after three batches of two workers: the creator's own, and each worker's."""
    creator = EnvCreator(functools.partial(make, kind))
    collector = collectors.MultiSyncCollector([creator] * 2, None, frames_per_batch=40, total_frames=120)
    try:
        assert len(list(collector)) == 3
        state = collector.state_dict()
        return [statistics(creator.state_dict()), *(statistics(state[w]["env_state_dict"]) for w in WORKERS)]
    finally:
        collector.shutdown()


WORKERS = ("worker0", "worker1")
# What TorchRL's workers come to: a reset and a step when the creator is made, then 2 resets and 120 steps.
COUNTS = {VecNorm: ("observation_count", 71.2417), VecNormV2: ("count.-|-.observation", 2 + 2 * 61)}


@pytest.mark.parametrize(
    "collectors", [reap.collectors, pytest.param(torchrl.collectors, marks=pytest.mark.slow)], ids=["reap", "torchrl"]
)
@pytest.mark.parametrize("kind", COUNTS)
def test_workers_share_the_statistics_of_a_vec_norm(kind, collectors):
    ours, *theirs = collect(collectors, kind)
    for worker in theirs:
        assert worker.keys() == ours.keys()
        assert all(worker[key].equal(ours[key]) for key in ours)
    name, count = COUNTS[kind]
    assert ours[name].item() == pytest.approx(count, abs=1e-3)


def test_lanes_of_a_parallel_env_share_the_statistics_of_a_vec_norm():
    creator = EnvCreator(functools.partial(make, VecNormV2))
    name, _ = COUNTS[VecNormV2]
    with reap.envs.ParallelEnv(2, creator):  # each lane is reset once, to see what it is like
        assert statistics(creator.state_dict())[name].item() == 2 + 2


def test_a_creator_that_is_asked_not_to_share_does_not():
    creator = EnvCreator(functools.partial(make, VecNormV2), share_memory=False)
    with reap.collectors.MultiSyncCollector([creator] * 2, None, frames_per_batch=40, total_frames=40) as collector:
        list(collector)
    assert statistics(creator.state_dict())[COUNTS[VecNormV2][0]].item() == 2
