"""The comparison itself: every kind of difference is noticed."""

import pytest
import torch
from tensordict import TensorDict

from tests.worlds.pairs import Each, actor, assert_identical, assert_same_batches, collectors, env_makers, make

pytestmark = pytest.mark.filterwarnings("ignore")


def batch():
    td = TensorDict({"a": torch.arange(6.0), "next": {"b": torch.zeros(6, 1), "c": torch.ones(6).bool()}}, [6])
    td.names = ["time"]
    return td


DIFFERENCES = {
    "a value": lambda td: td.set_("a", torch.arange(6.0).roll(1)),
    "the sign of zero": lambda td: td.set(("next", "b"), -torch.zeros(6, 1)),
    "a dtype": lambda td: td.set("a", torch.arange(6.0).double()),
    "a shape": lambda td: td.set(("next", "b"), torch.zeros(6)),
    "one key more": lambda td: td.set("d", torch.zeros(6)),
    "one nested key more": lambda td: td.set(("next", "d"), torch.zeros(6)),
    "one key less": lambda td: td.exclude(("next", "c")),
    "names": lambda td: TensorDict(td.to_dict(), [6]),
    "device": lambda td: td.to("cpu"),
    "batch size": lambda td: td[:5],
    "a lock": lambda td: td.lock_(),
    "a gradient": lambda td: td.set("a", torch.arange(6.0).requires_grad_()),
}


def test_identical():
    assert_identical(batch(), batch())


@pytest.mark.parametrize("what", DIFFERENCES)
def test_difference(what):
    with pytest.raises(AssertionError):
        assert_identical(DIFFERENCES[what](batch()), batch())


def test_different_worlds_are_told_apart():
    envs = Each(torchrl=env_makers("counting")["torchrl"], reap=env_makers(lambda _: make("counting", 1))["reap"])
    with pytest.raises(AssertionError, match="first difference"):
        assert_same_batches(collectors(envs, lambda: actor("counting"), frames_per_batch=6))
