"""Deterministic exploration asked of a policy that samples by itself: said once, at construction."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from tensordict.nn.probabilistic import interaction_type
from torch import distributions, nn

from reap.collectors import Collector, Evaluator, RandomPolicy
from reap.testing.backend import counting_lanes

SAID = "exploration_type is DETERMINISTIC, but the policy's action changes with the random seed"


class Sampling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation):
        return distributions.Normal(self.net(observation), 1.0).sample()


class Asking(Sampling):
    def forward(self, observation):
        loc = self.net(observation)
        return loc if interaction_type() is InteractionType.DETERMINISTIC else distributions.Normal(loc, 1.0).sample()


class Counting(Sampling):
    """Its action changes from call to call, by a state of its own."""

    calls = 0

    def forward(self, observation):
        self.calls += 1
        return self.net(observation) * 0 + self.calls


def dropping():
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def whole(td):
    return td.set("action", torch.randn_like(td["observation"][..., :1]))


def coin(observation):
    return torch.randint(2, (*observation.shape[:-1], 1)).float()


def probabilistic():
    net = TensorDictModule(lambda o: (o[..., :1], torch.ones_like(o[..., :1])), ["observation"], ["loc", "scale"])
    sample = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=distributions.Normal)
    return ProbabilisticTensorDictSequential(net, sample)


LOUD = {
    "module": Sampling,
    "TensorDictModule": lambda: TensorDictModule(Sampling(), ["observation"], ["action"]),
    "dropout": dropping,
    "of a TensorDict": lambda: whole,
    "NumPy": lambda: lambda observation: observation[..., :1] + float(np.random.rand()),
    "random": lambda: lambda observation: observation[..., :1] + random.random(),
    "of few choices": lambda: coin,
}
QUIET = {
    "net": lambda: nn.Linear(3, 1),
    "asks": Asking,
    "counts": Counting,
    "probabilistic": probabilistic,
    "dropout in eval": lambda: dropping().eval(),
    "random, by its name": RandomPolicy,
    "none": lambda: None,
}


def make(policy, kind="deterministic"):
    return Collector(counting_lanes()(), policy, frames_per_batch=12, exploration_type=kind)


@pytest.mark.parametrize("name", LOUD)
def test_one_that_samples_is_told(name):
    policy = LOUD[name]()
    with pytest.warns(UserWarning, match=SAID) as said:
        c = make(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c.next()
        make(LOUD[name](), "random")
    assert len([one for one in said if SAID in str(one.message)]) == 1


@pytest.mark.parametrize("name", QUIET)
def test_one_that_does_not_is_not(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(QUIET[name]()).next()


def test_looking_leaves_no_trace():
    policy = Counting()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    want = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    c = make(policy)
    assert (torch.rand(1), np.random.rand(), random.random()) == want
    assert c.next()["action"][0, 0] == 1


def test_an_evaluation_says_it_too():
    with pytest.warns(UserWarning, match="the policy's action changes with the random seed"):
        Evaluator(counting_lanes()(), Sampling(), num_trajectories=3, max_steps=5).shutdown()
