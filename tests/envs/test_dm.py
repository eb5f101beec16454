"""dm_env: the predictable world, and dm_control where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import DMEnv, SerialEnv
from reap.errors import UsageError, WrongArgument
from reap.testing import CountingWorld, EchoPolicy, assert_same
from tests import example_count
from tests.worlds.dm import CountingDm

dm_env = pytest.importorskip("dm_env")


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.integers(1, 6),
)
@settings(max_examples=example_count(25), deadline=None)
def test_the_predictable_world(lengths, steps):
    makers = [lambda one=one, i=i: DMEnv(CountingDm(one, i)) for i, one in enumerate(lengths)]
    c = Collector(SerialEnv(len(lengths), makers), EchoPolicy(), frames_per_batch=steps * len(lengths))
    world = CountingWorld(lengths)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


def test_an_env_given_as_it_is():
    c = Collector(CountingDm((3, 1, 5)), EchoPolicy(), frames_per_batch=8)
    assert_same(c.next(), CountingWorld([(3, 1, 5)]).batch(8))
    with pytest.raises(UsageError, match="cannot be seeded"):
        c.set_seed(1)


def test_specs():
    class Many(CountingDm):
        def observation_spec(self):
            return {
                "a": dm_env.specs.DiscreteArray(4),
                "b": [dm_env.specs.Array((2,), np.float64)],
                "c": dm_env.specs.Array((), bool),
            }

        def reset(self):
            return dm_env.restart({"a": 2, "b": [np.ones(2)], "c": True})

        def step(self, action):
            return dm_env.transition(1.0, {"a": 1, "b": [np.zeros(2)], "c": False})

        def action_spec(self):
            return dm_env.specs.DiscreteArray(3)

    batch = Collector(DMEnv(Many((3,)), categorical_action_encoding=True), frames_per_batch=3).next()
    assert batch["a"].tolist() == [2, 1, 1]
    assert batch["b"].shape == (3, 1, 2)
    assert batch["c"][:, 0].tolist() == [1, 0, 0]
    assert batch["action"].max() < 3
    with pytest.raises(WrongArgument, match="takes a dm_env.Environment, got int"):
        DMEnv(3)


def test_dm_control():
    suite = pytest.importorskip("dm_control.suite")

    def run():
        c = Collector(DMEnv(suite.load("cartpole", "balance", task_kwargs={"time_limit": 0.1})), frames_per_batch=60)
        c.set_seed(3)
        return c.next()

    batch = run()
    assert batch["position"].dtype is torch.float64
    assert batch["next", "truncated"].any()
    assert not batch["next", "terminated"].any()
    going = ~batch["next", "done"][:-1, 0]
    assert torch.equal(batch["next", "position"][:-1][going], batch["position"][1:][going])
    assert (run() == batch).all()
