"""Stochastic policies: the same random numbers are drawn in the same order, whatever the exploration type."""

import pytest
import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import distributions, nn
from torchrl.envs import ExplorationType
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal, TruncatedNormal

from tests.worlds.pairs import assert_same_batches, collectors, env_makers

pytestmark = pytest.mark.filterwarnings("ignore")


class Concentrations(nn.Module):
    def forward(self, x):
        return tuple((1 + x.exp()).chunk(2, -1))


class DiagonalNormal(distributions.Independent):
    def __init__(self, loc, scale):
        super().__init__(distributions.Normal(loc, scale), 1)


class Pixels(nn.Module):
    """The logits of four actions from uint8 numbers."""

    def __init__(self, *last):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4), *last)

    def forward(self, observation):
        return self.net(observation.float() / 255)


def sampled(net, keys, family, log_prob=True, **options):
    read = TensorDictModule(net, in_keys=["observation"], out_keys=keys)
    options = {"distribution_class": family, "return_log_prob": log_prob, **options}
    return ProbabilisticTensorDictSequential(read, ProbabilisticTensorDictModule(keys, ["action"], **options))


def continuous(family, keys=("loc", "scale"), **options):
    head = NormalParamExtractor() if keys[0] == "loc" else Concentrations()
    return sampled(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4), head), list(keys), family, **options)


VECTOR = {"kind": "vector"}
INDEX = {"kind": "uint8 vector", "categorical_action_encoding": True}
ONE_HOT = {"kind": "uint8 vector"}
ALL = "random", "mode", "mean", "deterministic"
NO_MEAN = "random", "mode", "deterministic"  # the mean of a category is no action

#: env, what TorchRL can draw, policy
FAMILIES = {
    "Normal": (VECTOR, ALL, lambda **o: continuous(distributions.Normal, **o)),
    "Laplace": (VECTOR, ALL, lambda **o: continuous(distributions.Laplace, **o)),
    "Independent": (VECTOR, ALL, lambda **o: continuous(DiagonalNormal, **o)),
    "IndependentNormal": (VECTOR, ALL, lambda **o: continuous(IndependentNormal, **o)),
    "TanhNormal": (VECTOR, ("random", "mean", "deterministic"), lambda **o: continuous(TanhNormal, **o)),
    "TruncatedNormal": (VECTOR, ALL, lambda **o: continuous(TruncatedNormal, **o)),
    "Beta": (VECTOR, ALL, lambda **o: continuous(distributions.Beta, ("concentration1", "concentration0"), **o)),
    "Categorical": (INDEX, NO_MEAN, lambda **o: sampled(Pixels(), ["logits"], distributions.Categorical, **o)),
    "Categorical probs": (
        INDEX,
        NO_MEAN,
        lambda **o: sampled(Pixels(nn.Softmax(-1)), ["probs"], distributions.Categorical, **o),
    ),
    "torch OneHotCategorical": (
        ONE_HOT,
        NO_MEAN,
        lambda **o: sampled(Pixels(), ["logits"], distributions.OneHotCategorical, **o),
    ),
    "OneHotCategorical": (ONE_HOT, NO_MEAN, lambda **o: sampled(Pixels(), ["logits"], OneHotCategorical, **o)),
}
GRID = [(family, kind) for family, (_, kinds, _) in FAMILIES.items() for kind in kinds]


def compare(family, lanes, kind, **options):
    env, _, make = FAMILIES[family]
    made = collectors(
        env_makers(lanes=lanes, **env), lambda: make(**options), frames_per_batch=8, exploration_type=kind
    )
    return assert_same_batches(made)


@pytest.mark.parametrize(("family", "kind"), GRID)
def test_lanes(family, kind):
    compare(family, 2, kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_env(family):
    compare(family, None, ExplorationType.RANDOM)


@pytest.mark.parametrize("family", ["Normal", "Categorical", "OneHotCategorical", "TanhNormal"])
@pytest.mark.parametrize("lanes", [None, 2])
def test_without_log_prob(family, lanes):
    compare(family, lanes, "random", log_prob=False)


@pytest.mark.parametrize("kind", [k for k in ExplorationType if k is not ExplorationType.MEDIAN], ids=str)
def test_exploration_type_as_enum(kind):
    compare("Normal", 2, kind)


def test_no_exploration_type_means_random():
    compare("Normal", 2, None)


def test_arguments_of_the_distribution():
    compare("TanhNormal", 2, "random", distribution_kwargs={"low": -2.0, "high": 2.0})


def test_key_of_the_log_prob():
    batches = compare("Normal", 2, "random", log_prob_key="lp")
    assert "lp" in batches[0].keys()


def test_noise_goes_on_from_batch_to_batch():
    first, second = compare("Normal", 2, "random")
    assert not torch.equal(first["action"] - first["loc"], second["action"] - second["loc"])
