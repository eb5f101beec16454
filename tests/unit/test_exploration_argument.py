"""A plain policy learns how it is to act: by a parameter, or by asking."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from reap.collectors import Collector, Evaluator
from reap.core.policies.as_policy import PolicyWarning
from reap.modules import InferenceServer
from reap.testing import CountingEnv


class Sampler(nn.Module):
    """Acts by its scores alone, or draws."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(3, 1)

    def forward(self, observation, deterministic=False):
        mean = self.scores(observation)
        return mean if deterministic else mean + torch.randn_like(mean)


class Asks(Sampler):
    def forward(self, observation):
        return super().forward(observation, interaction_type() is InteractionType.DETERMINISTIC)


class Named(Sampler):
    def forward(self, observation, *, exploration_type):
        return super().forward(observation, exploration_type is InteractionType.DETERMINISTIC)


def function(observation, deterministic):
    return observation.sum(-1, keepdim=True) + (0 if deterministic else torch.rand(1))


def on_tensordict(td, deterministic=True):
    return td.set("action", function(td["observation"], deterministic))


POLICIES = {"keyword": Sampler, "asks": Asks, "exploration_type": Named, "function": lambda: function}


@pytest.mark.parametrize("name", [*POLICIES, "on a TensorDict"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_policy_is_told_how_to_act(name, capture):
    policy = on_tensordict if name == "on a TensorDict" else POLICIES[name]()
    drawn = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("deterministic", "mode", "random"):
            if kind == "mode" and name in ("asks", "exploration_type"):
                continue  # these look for the one type they know
            found = []
            for seed in (0, 1):
                with Collector(
                    CountingEnv(), policy, frames_per_batch=40, exploration_type=kind, capture=capture
                ) as collector:
                    torch.manual_seed(seed)
                    found.append(collector.next())
            assert torch.equal(found[0]["observation"], found[1]["observation"])
            drawn[kind] = not torch.equal(found[0]["action"], found[1]["action"])
    assert drawn.pop("random")
    assert not any(drawn.values())


def test_an_evaluator_asks_for_the_same_action_every_time():
    with Evaluator(CountingEnv, Sampler(), num_trajectories=2) as evaluator:
        assert "its parameter deterministic is True" in evaluator.explain()
    with Evaluator(CountingEnv, Sampler(), num_trajectories=2, exploration_type="random") as evaluator:
        assert "its parameter deterministic is False" in evaluator.explain()


def test_one_that_does_not_listen_is_found_out_once():
    def deaf(observation):
        return torch.rand(1)

    words = "exploration_type is DETERMINISTIC.*Give it a parameter `deterministic`"
    with pytest.warns(PolicyWarning, match=words) as told:
        evaluator = Evaluator(CountingEnv, deaf)
    with evaluator, warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluator.evaluate()
        evaluator.evaluate()
    assert len(told) == 1


def test_a_server_tells_its_policy_too():
    for kind, fixed in (("deterministic", True), ("random", False)):
        with InferenceServer(Sampler(), exploration_type=kind) as server:
            client = server.client()
            asked = [client(TensorDict({"observation": torch.ones(3)}))["action"] for _ in range(4)]
        assert all(torch.equal(asked[0], other) for other in asked) is fixed


def test_a_required_parameter_is_no_observation():
    with Collector(CountingEnv(), lambda sight, deterministic: sight[:1], frames_per_batch=4) as collector:
        batch = collector.next()
        assert torch.equal(batch["action"], batch["observation"][:, :1])
    with pytest.raises(TypeError, match="its parameter deterministic must come after the observations"):
        Collector(CountingEnv(), lambda deterministic, sight: sight, frames_per_batch=4)
