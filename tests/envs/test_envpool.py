"""EnvPool, for real, and the predictable world through a pool that behaves like one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import EnvPoolEnv
from reap.envs.adapters.envpool import EnvPoolLanes
from reap.errors import UsageError, WrongArgument
from reap.testing import CountingWorld, EchoPolicy, assert_same
from tests import example_count
from tests.worlds.envs import CountingPool, ReadyPool


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
)
@settings(max_examples=example_count(30), deadline=None)
def test_the_predictable_world(lengths, steps, limit):
    c = Collector(CountingPool(lengths), EchoPolicy(), frames_per_batch=steps * len(lengths), max_frames_per_traj=limit)
    world = CountingWorld(lengths, limit=limit)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


def test_resting_lanes_are_not_stepped():
    c = Collector(CountingPool([(2,), (6,)]), EchoPolicy(), frames_per_batch=8, reset_when_done=False)
    assert c.next()["collector", "mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert c.next()["observation"][:, 0].tolist() == [[0, 1, 0], [1, 0, 4]]


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=2, max_size=5),
    ready=st.integers(1, 4),
    steps=st.integers(1, 6),
    seed=st.integers(0, 9),
)
@settings(max_examples=example_count(80), deadline=None)
def test_ready_lanes_are_the_predictable_world(lengths, ready, steps, seed):
    pool = ReadyPool(lengths, min(ready, len(lengths) - 1), seed)
    c = Collector(pool, EchoPolicy(), frames_per_batch=steps * len(lengths), track_policy_version=True)
    world = CountingWorld(lengths)
    for _ in range(5):
        batch = c.next()
        assert (batch["policy_version"] == 0).all()
        assert_same(batch.exclude("policy_version", ("next", "policy_version")), world.batch(steps))
    before = c.stats()
    assert before["frames"] == 5 * steps * len(lengths)
    c.reset()  # every lane is called home first, wherever it is
    first = c.next()["observation"][:, 0]
    assert (first[:, 2] == 0).all()


def test_ready_lanes_say_which_weights_acted():
    policy = EchoPolicy()
    c = Collector(ReadyPool([(3,), (2, 4), (5,)], 1), policy, frames_per_batch=6, track_policy_version=True)
    for version in range(30):
        batch = c.next()
        weight = batch["policy_version"] + 1.0
        want = (batch["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1) * weight
        assert torch.equal(batch["action"].squeeze(-1), want)
        assert torch.equal(batch["policy_version"], batch["next", "policy_version"])
        c.update_policy_weights_({"weight": torch.tensor(version + 2.0), "mix": torch.tensor([3.0, 5.0, 7.0])})
    assert int(batch["policy_version"].max()) > 15  # frames of lanes that are ahead wait for the others


class Remembering(torch.nn.Module):
    """Its memory is the sum of what the lane has seen in this episode."""

    carry = {"sum": torch.zeros(3)}

    def forward(self, observation, sum):
        total = sum + observation
        return total.sum(-1, keepdim=True), total


def test_ready_lanes_keep_each_its_own_memory():
    lengths = [(3, 1, 4), (2,), (6,), (5,)]
    ready = Collector(ReadyPool(lengths, 2), Remembering(), frames_per_batch=20)
    lockstep = Collector(CountingPool(lengths), Remembering(), frames_per_batch=20)
    for _ in range(20):
        a, b = ready.next(), lockstep.next()
        for key in a.keys(True, True):
            assert torch.equal(a[key], b[key]), key


def noisy(td):
    """Finds what it wrote at the last step of the same episode, or zeros."""
    td["noise"] = 0.5 * td.get("noise", torch.zeros(*td.batch_size, 1)) + td["observation"][..., :1]
    return td.set("action", td["observation"].sum(-1, keepdim=True) + td["noise"])


def test_ready_lanes_find_what_was_written_for_them():
    """A policy of whole TensorDicts sees each lane as if it were alone."""
    lengths = [(3, 1, 4), (2,), (6,), (5,)]
    ready = Collector(ReadyPool(lengths, 2), noisy, frames_per_batch=20)
    lockstep = Collector(CountingPool(lengths), noisy, frames_per_batch=20)
    for _ in range(20):
        a, b = ready.next(), lockstep.next()
        for key in a.keys(True, True):
            assert torch.equal(a[key], b[key]), key
    ready.reset()
    noise = ready.next()["noise"][:, 0]
    assert torch.equal(noise, ready.next()["observation"][:, 0, :1])  # of lanes that have just begun


def test_ready_lanes_refuse_what_would_mix_them():
    with pytest.raises(UsageError, match="interruptor"):
        Collector(ReadyPool([(2,), (6,)], 1), EchoPolicy(), frames_per_batch=8, interruptor=lambda: False)
    with pytest.raises(UsageError, match="resets single lanes"):
        Collector(ReadyPool([(2,), (6,)], 1), EchoPolicy(), frames_per_batch=8, max_frames_per_traj=3)
    with pytest.raises(UsageError, match="compact_obs"):
        Collector(ReadyPool([(2,), (6,)], 1), EchoPolicy(), frames_per_batch=8, compact_obs=True)


def test_a_real_asynchronous_pool():
    pytest.importorskip("envpool")
    env = EnvPoolEnv("CartPole-v1", num_envs=5, batch_size=2, seed=1)
    with pytest.raises(UsageError, match="only a collector"):
        env.reset()
    c = Collector(env, frames_per_batch=100, total_frames=-1)
    batches = [c.next().clone() for _ in range(20)]
    c.reset()
    batches.append(c.next().clone())
    batch = torch.cat(batches[:-1], 1)
    assert batch.shape == (5, 400)
    over = batch["next", "done"][:, :-1, 0]
    follows = (batch["next", "observation"][:, :-1] == batch["observation"][:, 1:]).all(-1)
    assert torch.equal(follows, ~over), "a successor is not the observation of the next frame, or crosses an episode"
    assert (batch["observation"][:, 1:][over].abs() <= 0.05).all(), "an episode does not begin with its reset"
    assert (batch["next", "reward"] == 1).all(), "the step that resets is no frame"
    assert len(batch["collector", "traj_ids"].unique()) == 5 + int(over.sum())
    assert (batches[-1]["observation"][:, 0].abs() <= 0.05).all()
    c.shutdown()


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_real_pools(task):
    envpool = pytest.importorskip("envpool")
    for env in (EnvPoolEnv(task, num_envs=4), envpool.make(task, env_type="gymnasium", num_envs=4)):
        c = Collector(env, frames_per_batch=400)
        assert type(c.env) is EnvPoolLanes
        ends = 0
        for _ in range(3):
            batch = c.next()
            assert batch.batch_size == torch.Size([4, 100])
            done = batch["next", "done"][..., 0]
            ends += int(done.sum())
            going = ~done[:, :-1]
            assert torch.equal(batch["next", "observation"][:, :-1][going], batch["observation"][:, 1:][going])
            if task == "CartPole-v1":
                begun = batch["observation"][:, 1:][~going]
                assert (begun.abs() <= 0.05).all()
                out = batch["next", "observation"][done]
                assert ((out[:, 0].abs() > 2.4) | (out[:, 2].abs() > 0.2094)).all()  # the true last observation
                assert (batch["next", "reward"] == 1).all()
        assert ends > 0 or task != "CartPole-v1"
        c.shutdown()


def test_real_pool_with_a_limit_and_info():
    pytest.importorskip("envpool")
    env = EnvPoolEnv("Pendulum-v1", num_envs=3, info_keys={"elapsed_step": np.int32})
    batch = Collector(env, frames_per_batch=30, max_frames_per_traj=4).next()
    assert batch["next", "truncated"].sum() == 6
    assert torch.equal(batch["next", "elapsed_step"].long(), batch["next", "step_count"][..., 0])


def test_a_finished_pool_takes_no_options():
    for options, named in (({"num_envs": 8}, "num_envs"), ({"seed": 3}, "seed")):
        with pytest.raises(WrongArgument, match=f"{named}.*are arguments of envpool.make"):
            EnvPoolEnv(CountingPool([(3,), (2,)]), **options)
