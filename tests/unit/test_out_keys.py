"""`out_keys` names what a plain policy returns in a tuple."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import Collector
from reap.errors import SpecMismatch, UsageError, WrongArgument
from reap.testing import CountingEnv


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, observation):
        choice = torch.distributions.Categorical(logits=self.actor(observation))
        action = choice.sample()
        return nn.functional.one_hot(action, 2), choice.log_prob(action), self.critic(observation)


def test_a_tuples_parts_have_names():
    names = ["action", ("dist", "log_prob"), "value"]
    policy = ActorCritic()
    collector = Collector("CartPole-v1", policy, frames_per_batch=20, out_keys=names)
    batch = collector.next()
    collector.shutdown()
    assert batch["dist", "log_prob"].shape == (20,)
    assert torch.allclose(batch["value"], policy.critic(batch["observation"]).detach())
    assert "output1" not in batch


def test_the_action_may_stand_anywhere():
    def policy(observation):
        return observation.sum(-1), torch.tensor([0, 1])

    collector = Collector("CartPole-v1", policy, frames_per_batch=20, out_keys=("total", "action"))
    batch = collector.next()
    collector.shutdown()
    assert torch.equal(batch["total"], batch["observation"].sum(-1))
    assert (batch["action"] == torch.tensor([0, 1])).all()


def test_one_tensor_may_be_named_too():
    collector = Collector("CartPole-v1", lambda o: torch.tensor([0, 1]), frames_per_batch=5, out_keys=["action"])
    assert collector.next()["action"].shape == (5, 2)
    collector.shutdown()


@pytest.mark.parametrize(
    ("policy", "names", "error", "message"),
    [
        (lambda o: (o[:1], o), ["action"], SpecMismatch, r"returned 2 tensors; out_keys names \['action'\]"),
        (lambda o: (torch.tensor([0, 1]), o), ["act", "value"], UsageError, "but not the env's action"),
        (lambda o: {"action": torch.tensor([0, 1])}, ["action"], UsageError, "names the parts of a returned tuple"),
        (None, ["action"], UsageError, "RandomPolicy already names its outputs"),
        (
            TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"]),
            ["action"],
            UsageError,
            "TensorDictModule already names its outputs",
        ),
        (lambda o: o, "action", WrongArgument, "must be a list of different keys"),
        (lambda o: o, ["action", "action"], WrongArgument, "must be a list of different keys"),
        (lambda o: o, ["action", 3], WrongArgument, "must be a list of different keys"),
        (lambda o: o, [], WrongArgument, "must be a list of different keys"),
    ],
    ids=["too_many", "no_action", "named", "random", "module", "text", "twice", "number", "empty"],
)
def test_what_does_not_fit_is_told(policy, names, error, message):
    with pytest.raises(error, match=message):
        Collector("CartPole-v1", policy, frames_per_batch=5, out_keys=names)


def test_without_names_nothing_has_changed():
    collector = Collector(CountingEnv, lambda observation: (torch.zeros(1), observation[:1]), frames_per_batch=5)
    assert "output1" in collector.next()
    collector.shutdown()
