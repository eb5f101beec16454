"""Policies that are modules: lazy, compiled, with layers that are shared or made late."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import Collector
from reap.envs import GymEnv
from reap.testing import CountingEnv, EchoPolicy


def test_lazy_modules_keep_the_shape_they_found():
    policy = nn.Sequential(nn.LazyLinear(1))
    c = Collector(CountingEnv(), policy, frames_per_batch=3)
    c.next()
    assert policy[0].in_features == 3


def test_a_plain_sequential_with_counters_beside_the_observation():
    policy = nn.Sequential(nn.Linear(3, 1))
    Collector(GymEnv(CountingEnv(), info_keys=["episode"]), policy, frames_per_batch=4, max_frames_per_traj=2).next()


def test_compile_is_not_forgotten():
    calls = []

    def backend(module, inputs):
        calls.append(module)
        return module

    torch._dynamo.reset()
    for policy in (
        EchoPolicy(),
        TensorDictModule(EchoPolicy(), ["observation"], ["action"]),
        lambda td: td.set("action", td["observation"][..., :1]),
    ):
        before = len(calls)
        Collector(CountingEnv(), policy, frames_per_batch=3, compile_policy={"backend": backend}).next()
        assert len(calls) > before


def test_a_layer_that_is_used_twice():
    act, tied = nn.Tanh(), nn.Linear(3, 3)
    net = nn.Sequential(tied, act, tied, act, nn.Linear(3, 1))
    batch = Collector(CountingEnv(), TensorDictModule(net, ["observation"], ["action"]), frames_per_batch=9).next()
    with torch.no_grad():
        want = torch.stack([net(o) for o in batch["observation"]])
    assert torch.equal(batch["action"], want)


def test_layers_made_on_the_first_call_stay():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = None

        def forward(self, observation):
            if self.net is None:
                self.net = nn.Linear(observation.shape[-1], 1)
            return self.net(observation)

    policy = Late()
    c = Collector(CountingEnv(), policy, frames_per_batch=3)
    first = policy.net
    assert first is not None
    c.next()
    assert policy.net is first
