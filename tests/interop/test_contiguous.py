"""Batches of TorchRL's envs lie in memory as TorchRL's do: `view(-1)` works, and a flat view is the batch itself."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.worlds.pairs import LIBRARIES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
    from torchrl.testing import mocking_classes as mocks

from reap import envs
from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.testing.backend import counting_lanes

pytestmark = pytest.mark.filterwarnings("ignore")


def lanes():
    return SerialEnv(2, lambda: GymEnv("CartPole-v1"))


ENVS = {
    "one": lambda: GymEnv("CartPole-v1"),
    "lanes": lanes,
    "transformed": lambda: TransformedEnv(lanes(), StepCounter(7)),
    "groups": lambda: mocks.MultiKeyCountingEnv(max_steps=3, batch_size=[2]),
    "two dimensions": lambda: mocks.CountingBatchedEnv(max_steps=torch.tensor([[3, 2], [2, 4]]), batch_size=[2, 2]),
    "kept whole": lambda: mocks.EnvWithTensorClass(max_steps=3),
}
OPTIONS = {
    "plain": {},
    "stored": {"storing_device": "cpu"},
    "same": {"return_same_td": True},
    "split": {"split_trajs": True},
    "copied": {"postproc": lambda batch: batch.clone()},
}


def flat(batch):
    """A flat view, and whether what is written to it reaches the batch."""
    leaves = dict(batch.items(True, True))
    torn = [key for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and not leaf.is_contiguous()]
    assert not torn
    view = batch.view(-1)
    view["next", "done"].fill_(True)
    batch.reshape(-1)["done"].fill_(True)
    return bool(batch["next", "done"].all()) and bool(batch["done"].all())


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("env", ["one", "lanes", "two dimensions"])
def test_what_a_hook_in_a_worker_changes_is_delivered(kind, env):
    def mark(batch):
        batch["next", "reward"].fill_(7)

    with kind([ENVS[env]] * 2, frames_per_batch=16, hooks_in_workers=True, post_collect_hook=mark) as collector:
        assert collector.next()["next", "reward"].unique().tolist() == [7]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["lanes", "transformed"])
def test_as_torchrls(kind, option):
    for library in LIBRARIES.values():
        c = library.collectors.Collector(ENVS[kind](), None, frames_per_batch=20, **OPTIONS[option])
        batches = iter(c)
        for _ in range(2):
            assert flat(next(batches))
        c.shutdown()


@pytest.mark.parametrize("kind", sorted(ENVS.keys() - {"lanes", "transformed", "groups", "two dimensions"}))
def test_every_kind_of_env(kind):
    assert flat(Collector(ENVS[kind](), None, frames_per_batch=24).next())


@pytest.mark.parametrize("kind", ["groups", "two dimensions"])
def test_nested_flags_and_many_dimensions(kind):
    batch = Collector(ENVS[kind](), None, frames_per_batch=24).next()
    assert all(leaf.is_contiguous() for leaf in batch.values(True, True))
    batch.view(-1)["collector", "traj_ids"].fill_(-7)
    assert (batch["collector", "traj_ids"] == -7).all()


def test_return_same_td_is_one_object_with_each_batch_in_turn():
    fresh = Collector(lanes(), None, frames_per_batch=20)
    fresh.set_seed(3)
    want = [fresh.next(), fresh.next()]
    same = Collector(lanes(), None, frames_per_batch=20, return_same_td=True)
    same.set_seed(3)
    first = same.next()
    assert torch.equal(first["observation"], want[0]["observation"])
    assert same.next() is first
    assert torch.equal(first["observation"], want[1]["observation"])


@pytest.mark.parametrize("cat", ["stack", 0, -1])
@pytest.mark.parametrize("env", [lanes, ENVS["one"]], ids=["lanes", "one"])
def test_workers_joined_in_every_way(cat, env):
    with MultiSyncCollector([env] * 2, None, frames_per_batch=24, cat_results=cat) as c:
        assert flat(c.next())


JOINED = {
    "gym": lambda: envs.SerialEnv(2, ENVS["one"]),
    "transformed": lambda: envs.SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(7))),
}


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("kind", JOINED)
def test_torchrls_envs_joined_by_ours(kind, limit):
    if kind == "gym" or limit is None:  # the other counts already
        c = Collector(JOINED[kind](), None, frames_per_batch=20, max_frames_per_traj=limit)
        assert flat(next(iter(c)))
        c.shutdown()


@pytest.mark.parametrize("cat", ["stack", 0, -1])
def test_torchrls_envs_joined_by_ours_in_workers(cat):
    c = MultiSyncCollector([JOINED["gym"]] * 2, None, frames_per_batch=40, cat_results=cat)
    assert flat(next(iter(c)))
    c.shutdown()


def test_lanes_of_workers_that_nothing_ends_are_split_into_themselves():
    """Eight frames hold no end: a batch of workers and lanes is as it was, and its last dimension is time."""
    c = MultiSyncCollector([lanes] * 2, None, frames_per_batch=16, split_trajs=True)
    batch = next(iter(c))
    c.shutdown()
    assert batch.names[-1] == "time"
    assert flat(batch)


def test_workers_one_by_one():
    with MultiAsyncCollector([lanes], None, frames_per_batch=24) as c:
        assert flat(c.next())


def test_either_way_on_request():
    theirs = Collector(lanes(), None, frames_per_batch=20, contiguous=False).next()
    ours = Collector(counting_lanes()(), None, frames_per_batch=24).next()
    for batch in (theirs, ours):
        assert not batch["observation"].is_contiguous()
        with pytest.raises(RuntimeError):
            batch.view(-1)["observation"]
    assert flat(Collector(counting_lanes()(), None, frames_per_batch=24, contiguous=True).next())
    with MultiSyncCollector([counting_lanes()] * 2, None, frames_per_batch=24, contiguous=True) as c:
        assert flat(c.next())
    with pytest.raises(TypeError, match="contiguous must be True, False or None, got 'yes'"):
        Collector(counting_lanes()(), None, frames_per_batch=24, contiguous="yes")


def test_the_memory_of_a_copied_rollout_is_filled_again_while_the_batch_is_kept():
    c = Collector(lanes(), None, frames_per_batch=20)
    kept = [c.next() for _ in range(4)]
    assert len({batch["observation"].data_ptr() for batch in kept}) == 4
    assert len(c._backend.worker.pool._slots) == 1


def test_what_goes_into_a_buffer_unseen_is_not_copied_twice():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    seen = []
    for options in ({}, {"post_collect_hook": seen.append}):
        c = Collector(lanes(), None, frames_per_batch=20, replay_buffer=buffer, **options)
        c.next()
        assert c._backend.worker.layout.look.contiguous is bool(options)
    assert flat(seen[0])
