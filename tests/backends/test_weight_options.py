"""Schemes and updaters of weights, as scripts name them."""

from __future__ import annotations

import pytest
import torch

from reap.collectors import Collector, MultiSyncCollector, WeightUpdaterBase
from reap.errors import UsageError, WorkerRaised, WrongArgument
from reap.testing import CountingEnv, EchoPolicy
from reap.weight_update import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, NoWeightSyncScheme])
def test_schemes_in_one_process(scheme):
    policy = EchoPolicy()
    collector = Collector(
        CountingEnv(), policy, frames_per_batch=4, policy_device="cpu", weight_sync_schemes={"policy": scheme()}
    )
    collector.update_policy_weights_({"weight": torch.tensor(2.0), "mix": policy.mix})
    moved = scheme is not NoWeightSyncScheme
    assert collector.policy_version == moved
    assert collector.policy.weight == (2.0 if moved else 1.0)
    collector.shutdown()


@pytest.mark.parametrize("given", ["shared", {"policy": "shared"}, {"critic": NoWeightSyncScheme()}])
def test_schemes_are_checked(given):
    with pytest.raises((WrongArgument, UsageError), match="weight_sync_schemes"):
        Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4, weight_sync_schemes=given)


def test_weights_that_are_received():
    collector = Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4)
    other = EchoPolicy()
    with torch.no_grad():
        other.weight.fill_(3.0)
    collector.receive_weights(other)
    assert collector.policy.weight == 3.0
    with pytest.raises(UsageError, match="give the weights once"):
        collector.receive_weights(other, policy=other)
    collector.shutdown()


def test_an_updater_is_told_what_it_needs():
    class Told(WeightUpdaterBase):
        def init(self, *args, **kwargs):
            self.heard = args, kwargs

    updater = Told()
    with Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4, weight_updater=updater) as collector:
        collector.init_updater(1, two=3)
    assert updater.heard == ((1,), {"two": 3})
    with Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4) as collector:
        collector.init_updater(1)


def test_a_model_that_refuses_its_weights_is_not_called_absent():
    class Normed(CountingEnv):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.Linear(1, 1)

    with MultiSyncCollector([Normed], EchoPolicy(), frames_per_batch=4) as collector:
        give, wrong = collector.update_policy_weights_, torch.nn.Linear(2, 1)
        with pytest.raises(WorkerRaised, match="size mismatch for weight"):
            give(weights=wrong, model_id="env.envs[0].unwrapped.norm")
        for path in ("env.envs[0].unwrapped.other", "env.envs[7].norm"):
            with pytest.raises(KeyError, match=r"this collector has no model 'env.envs\["):
                give(weights=wrong, model_id=path)
        collector.next()
