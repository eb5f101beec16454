"""Arguments in each other's place, and copies that cannot be: told by reap, with the name of the argument."""

import copy

import pytest
import torch

from reap.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from reap.errors import UsageError, WrongArgument


def make_policy():
    return torch.nn.Linear(4, 2)


def test_env_and_policy_swapped():
    with pytest.raises(WrongArgument, match="create_env_fn is Linear, a module: the env comes first, then the policy"):
        Collector(make_policy(), "CartPole-v1", frames_per_batch=10)
    with pytest.raises(
        WrongArgument, match=r"create_env_fn is called with no arguments.*\(observation\).*the policy is"
    ):
        Collector(lambda observation: observation, "CartPole-v1", frames_per_batch=10)


def test_a_factory_whose_parameters_are_not_given():
    def make_env(size):
        raise AssertionError("not called")

    with pytest.raises(WrongArgument, match=r"create_env_fn.*\(size\).*missing.*'size'.*create_env_kwargs"):
        Collector(make_env, frames_per_batch=10)
    with pytest.raises(WrongArgument, match=r"create_env_fn.*\['sizes'\].*\(size\)"):
        Collector(make_env, frames_per_batch=10, create_env_kwargs={"sizes": 3})


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, AsyncBatchedCollector])
def test_what_makes_a_policy_in_place_of_one(kind):
    envs = "CartPole-v1" if kind is Collector else ["CartPole-v1"]
    with pytest.raises(WrongArgument, match="policy is the class Linear: give an instance, or policy_factory=Linear"):
        kind(envs, torch.nn.Linear, frames_per_batch=10, workers="inline")
    with pytest.raises(WrongArgument, match="policy takes no observation.*policy_factory"):
        kind(envs, make_policy, frames_per_batch=10, workers="inline")


def test_no_state_and_no_copy():
    with Collector("CartPole-v1", frames_per_batch=10) as collector:
        with pytest.raises(
            WrongArgument, match="state_dict must be what state_dict.. returned, a mapping, got NoneType"
        ):
            collector.load_state_dict(None)
        with pytest.raises(UsageError, match="a Collector cannot be copied.*state_dict"):
            copy.deepcopy(collector)
        assert collector.next().numel() == 10
