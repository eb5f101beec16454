"""Buckets: what the policy sees of a row in which few lanes stand; and what cannot be recorded says so."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions, nn

from reap.collectors import AsyncBatchedCollector, Collector
from reap.core.policies.buckets import powers_of_two
from reap.envs import GymEnv
from reap.errors import UsageError
from reap.testing import CountingEnv, EchoPolicy


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])]
)
def test_sizes_are_powers_of_two_and_the_most(most, sizes):
    assert powers_of_two(most) == sizes


class Counts(EchoPolicy):
    """Remembers how many rows it was shown."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, observation):
        self.sizes.append(len(observation))
        return super().forward(observation)


class Gates:
    """Eight envs, of which only those below `free` answer."""

    def __init__(self):
        self.free, self._changed = 8, threading.Condition()

    def let(self, free):
        with self._changed:
            self.free = free
            self._changed.notify_all()

    def make(self):
        gates = self

        class Gated(CountingEnv):
            def step(self, action):
                with gates._changed:
                    assert gates._changed.wait_for(lambda: self.lane < gates.free, 30)
                return super().step(action)

        return [lambda n=n: GymEnv(Gated((5,), n)) for n in range(8)]


def test_the_policy_sees_as_many_as_are_ready_rounded_up():
    policy, gates = Counts(), Gates()
    with AsyncBatchedCollector(gates.make(), policy, frames_per_batch=40, track_policy_version=False) as c:
        c.next()
        gates.let(1)
        for _ in range(3):
            c.next()  # until then others may have been under way
        policy.sizes.clear()
        alone = c.next()
        assert set(policy.sizes) == {1}
        gates.let(3)
        for _ in range(3):
            c.next()
        policy.sizes.clear()
        three = c.next()
        gates.let(8)
        c.next()
    assert set(policy.sizes) <= {1, 2, 4}
    assert set(alone["env_index"].tolist()) == {0}
    for batch in (alone, three):
        assert torch.equal(batch["action"], EchoPolicy()(batch["observation"]))


def test_a_least_number_is_rounded_up_to_the_width_of_rows():
    policy = Counts()
    with AsyncBatchedCollector(
        Gates().make(), policy, frames_per_batch=40, min_batch_size=3, max_batch_size=3, track_policy_version=False
    ) as c:
        c.next()  # all eight begin together: three, three and two
        policy.sizes.clear()
        c.next()
    assert set(policy.sizes) == {3}


def test_positions_nobody_stands_at_are_no_bad_numbers():
    """A scale of 0 would be refused when the rollout is looked through."""
    gates = Gates()
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 1), ["observation"], ["loc"]),
        TensorDictModule(lambda loc: torch.ones_like(loc), ["loc"], ["scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=distributions.Normal, return_log_prob=True
        ),
    )
    gates.let(2)
    with AsyncBatchedCollector(gates.make(), policy, frames_per_batch=60) as c:
        for _ in range(3):
            batch = c.next()
            want = distributions.Normal(batch["loc"], batch["scale"]).log_prob(batch["action"])
            torch.testing.assert_close(batch["action_log_prob"], want)
        gates.let(8)


def test_a_compiled_policy_sees_one_shape():
    policy, gates = Counts(), Gates()
    gates.let(1)
    with AsyncBatchedCollector(
        gates.make(), policy, frames_per_batch=20, compile_policy={"backend": "eager"}, track_policy_version=False
    ) as c:
        policy.sizes.clear()
        c.next()
        gates.let(8)
    assert set(policy.sizes) <= {4}


def test_what_cannot_be_recorded_says_so():
    make = lambda: GymEnv(CountingEnv())  # noqa: E731
    with pytest.raises(UsageError, match="random actions are drawn; leave it out"):
        Collector(make, None, frames_per_batch=4, cudagraph_policy=True)
    with pytest.raises(UsageError, match="cudagraph_policy needs the policy on a CUDA device, this one is on cpu"):
        AsyncBatchedCollector([make] * 2, EchoPolicy(), frames_per_batch=4, cudagraph_policy=True)


def test_how_a_policy_runs_is_told_wherever_its_lanes_are():
    for kind in (Collector, AsyncBatchedCollector):
        policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        with kind([lambda: GymEnv(CountingEnv())], policy, frames_per_batch=4) as collector:
            collector.next()
            assert collector.explain().splitlines()[-1] == (
                "policy TensorDictModule: it runs flat, without TensorDicts"
            )
