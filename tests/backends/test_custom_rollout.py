"""A subclass with a rollout() of its own is heard; env.rand_step as a policy is random actions."""

from __future__ import annotations

import pytest
import torch

from reap.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector, RandomPolicy
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv, SerialEnv
from reap.errors import UsageError
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.testing.backend import LENGTHS, counting_lanes


class Marking(Collector):
    """Adds a column to every rollout."""

    def rollout(self):
        batch = super().rollout()
        return batch.set("twice", batch["observation"] * 2)


def test_batches_are_made_of_what_it_returns():
    c, world = Marking(counting_lanes()(), EchoPolicy(), frames_per_batch=12, total_frames=36), CountingWorld(LENGTHS)
    batches = list(c)
    assert len(batches) == 3
    for batch in batches:
        assert torch.equal(batch["twice"], batch["observation"] * 2)
        assert_same(batch.exclude("twice"), world.batch(4))
    assert c.stats()["frames"] == 36


def test_it_may_be_called_by_hand():
    c = Marking(counting_lanes()(), EchoPolicy(), frames_per_batch=12)
    assert "twice" in c.rollout()
    assert c.stats()["frames"] == 0


def test_with_what_comes_after_it():
    split = Marking(counting_lanes()(), EchoPolicy(), frames_per_batch=12, split_trajs=True).next()
    assert torch.equal(split["twice"], split["observation"] * 2)
    whole = Marking(counting_lanes()(), EchoPolicy(), frames_per_batch=12, trajs_per_batch=2, traj_format="cat").next()
    assert torch.equal(whole["twice"], whole["observation"] * 2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    Marking(counting_lanes()(), EchoPolicy(), frames_per_batch=12, replay_buffer=buffer).next()
    sample = buffer.sample()
    assert torch.equal(sample["twice"], sample["observation"] * 2)


def test_in_the_background():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    with Marking(counting_lanes()(), EchoPolicy(), frames_per_batch=12, total_frames=36, replay_buffer=buffer) as c:
        c.start()
        sample = buffer.sample()
    assert torch.equal(sample["twice"], sample["observation"] * 2)


def test_the_rules_for_all_batches_hold_for_it():
    kind = type("MarkingPool", (AsyncBatchedCollector,), {"rollout": lambda self: AsyncBatchedCollector.rollout(self)})
    with kind(["CartPole-v1"] * 2, RandomPolicy(), frames_per_batch=20, total_frames=30) as c:
        assert [len(batch) for batch in c] == [20, 10]
        assert c.stats()["frames"] == 30
    never = {"frames_per_batch": 3, "trajs_per_batch": 1, "reset_at_each_iter": True}
    with pytest.raises(UsageError, match="no episode ended within 3 steps in .* rollouts"):
        Marking(lambda: CountingEnv((50,), 0), EchoPolicy(), **never, total_frames=30_000).next()


class FromElsewhere(Collector):
    def rollout(self):
        return GymEnv("CartPole-v1").rollout(5, break_when_any_done=False)


def test_it_need_not_ask_for_the_collectors_own():
    batches = list(FromElsewhere("CartPole-v1", None, frames_per_batch=5, total_frames=10))
    assert [batch.batch_size for batch in batches] == [torch.Size([5])] * 2


class Nothing(Collector):
    def rollout(self):
        super().rollout()


def test_one_that_returns_nothing_is_named():
    with pytest.raises(UsageError, match=r"rollout\(\) of Nothing returned NoneType"):
        Nothing(counting_lanes()(), EchoPolicy(), frames_per_batch=12).next()


def test_of_workers():
    def rollout(self):
        batch = MultiSyncCollector.rollout(self)
        return batch.set("twice", batch["observation"] * 2)

    kind = type("MarkingWorkers", (MultiSyncCollector,), {"rollout": rollout})
    with kind([counting_lanes()], EchoPolicy(), frames_per_batch=12) as c:
        batch = c.next()
    assert torch.equal(batch["twice"], batch["observation"] * 2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    with pytest.raises(UsageError, match=r"MarkingWorkers overrides rollout\(\)"):
        kind([counting_lanes()], EchoPolicy(), frames_per_batch=12, replay_buffer=buffer)


@pytest.mark.parametrize("lanes", [None, 2])
def test_rand_step_of_an_env_is_random_actions(lanes):
    env = GymEnv("CartPole-v1") if lanes is None else SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    torch.manual_seed(0)
    got = Collector(env, env.rand_step, frames_per_batch=100)
    got.set_seed(3)
    batch = got.next()
    want = Collector(env, None, frames_per_batch=100)
    want.set_seed(3)
    assert (batch == want.next()).all()


def test_rand_step_of_another_env():
    other = GymEnv("CartPole-v1")
    with MultiSyncCollector(["CartPole-v1"], other.rand_step, frames_per_batch=50) as c:
        assert c.next()["action"].sum(-1).eq(1).all()
    with AsyncBatchedCollector(["CartPole-v1"] * 2, other.rand_step, frames_per_batch=50) as c:
        assert c.next()["action"].sum(-1).eq(1).all()
