"""TorchRL's own actors and exploration modules in reap's collector."""

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions, nn
from torchrl.data import Bounded, Categorical, Composite, OneHot
from torchrl.modules import (
    MLP,
    Actor,
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    IndependentNormal,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    SafeModule,
    TanhModule,
    TanhNormal,
    ValueOperator,
)

from reap.errors import WorkerRaised
from tests.worlds.pairs import Each, assert_same_batches, collectors, differs, env_makers, one_episode

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Four numbers from uint8 ones."""

    def __init__(self):
        super().__init__()
        self.net = MLP(in_features=6, out_features=4, num_cells=[8])

    def forward(self, observation):
        return self.net(observation.float() / 255)


class Specs:
    def __init__(self, lanes):
        self.size = () if lanes is None else (lanes,)
        self.box = Bounded(-1, 1, (*self.size, 2))
        self.one_hot = OneHot(4, shape=(*self.size, 4))
        self.index = Categorical(4, shape=self.size)


ACTORS = {}


def of(kind, **wrap):
    def register(make):
        ACTORS[make.__name__] = make, kind, wrap
        return make

    return register


def gaussian(**options):
    net = nn.Sequential(MLP(in_features=3, out_features=4, num_cells=[8]), NormalParamExtractor())
    read = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        read, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True, **options
    )


def discrete(family, **options):
    read = TensorDictModule(Net(), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(read, in_keys=["logits"], distribution_class=family, return_log_prob=True, **options)


def deterministic(specs):
    return Actor(MLP(in_features=3, out_features=2, num_cells=[8]), in_keys=["observation"], spec=specs.box)


@of("vector")
def tanh_normal_actor(specs):
    return gaussian()


@of("vector")
def tanh_normal_actor_with_spec(specs):
    return gaussian(spec=specs.box)


@of("uint8 vector")
def one_hot_actor(specs):
    return discrete(OneHotCategorical, spec=specs.one_hot)


@of("uint8 vector", categorical_action_encoding=True)
def categorical_actor(specs):
    return discrete(distributions.Categorical, spec=specs.index)


@of("uint8 vector")
def q_values(specs):
    return QValueActor(Net(), in_keys=["observation"], spec=specs.one_hot)


@of("uint8 vector", categorical_action_encoding=True)
def q_values_categorical(specs):
    return QValueActor(Net(), in_keys=["observation"], action_space="categorical")


@of("uint8 vector")
def epsilon_greedy(specs):
    greedy = EGreedyModule(annealing_num_steps=100, spec=specs.one_hot, eps_init=0.7)
    return TensorDictSequential(q_values(specs), greedy)


@of("vector")
def gaussian_noise(specs):
    return TensorDictSequential(deterministic(specs), AdditiveGaussianModule(spec=specs.box, sigma_init=0.5))


@of("vector")
def squashed(specs):
    net = Actor(MLP(in_features=3, out_features=2, num_cells=[8]), in_keys=["observation"], out_keys=["param"])
    return TensorDictSequential(net, TanhModule(in_keys=["param"], out_keys=["action"], spec=specs.box))


@of("vector")
def safe(specs):
    net = nn.Sequential(nn.Linear(3, 2), nn.Hardtanh(-3, 3))
    spec = Composite(action=specs.box, shape=specs.size)
    return SafeModule(net, in_keys=["observation"], out_keys=["action"], spec=spec, safe=True)


@of("vector")
def actor_and_value(specs):
    common = TensorDictModule(nn.Linear(3, 8), in_keys=["observation"], out_keys=["hidden"])
    net = nn.Sequential(nn.Linear(8, 4), NormalParamExtractor())
    read = TensorDictModule(net, in_keys=["hidden"], out_keys=["loc", "scale"])
    act = ProbabilisticActor(read, in_keys=["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True)
    return ActorValueOperator(common, act, ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]))


@of("vector")
def policy_half_of_actor_and_value(specs):
    return actor_and_value(specs).get_policy_operator()


def compare(name, lanes, **options):
    make, kind, wrap = ACTORS[name]
    made = collectors(env_makers(kind, lanes, **wrap), lambda: make(Specs(lanes)), frames_per_batch=8, **options)
    return assert_same_batches(made)


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("name", ACTORS)
def test_actor(name, lanes):
    compare(name, lanes)


@pytest.mark.parametrize("name", ["tanh_normal_actor_with_spec", "one_hot_actor", "epsilon_greedy", "gaussian_noise"])
def test_actor_without_exploring(name):
    compare(name, 2, exploration_type="deterministic")


@pytest.mark.parametrize("lanes", [None, 2])
def test_noise_with_a_memory(lanes):
    def make():
        specs = Specs(lanes)
        return TensorDictSequential(deterministic(specs), OrnsteinUhlenbeckProcessModule(spec=specs.box))

    assert_same_batches(collectors(env_makers(one_episode, lanes), make, frames_per_batch=8))


@differs("AdditiveGaussianModule(spec=None) does not receive the env's spec", WorkerRaised)
@pytest.mark.parametrize("lanes", [None, 2])
def test_noise_receives_the_spec(lanes):
    def make():
        return TensorDictSequential(deterministic(Specs(lanes)), AdditiveGaussianModule(spec=None, sigma_init=0.5))

    assert_same_batches(collectors(env_makers("vector", lanes), make, frames_per_batch=8))


@pytest.mark.parametrize("lanes", [None, 2])
def test_epsilon_is_annealed_alike(lanes):
    """`step()` between batches, as training loops call it."""
    made = {}
    policies = Each.of(lambda: None)
    for name in policies:
        torch.manual_seed(0)
        policies[name] = epsilon_greedy(Specs(lanes))
        envs = env_makers("uint8 vector", lanes)
        made[name] = collectors(envs, lambda name=name: policies[name], frames_per_batch=8)[name]
    for _ in range(3):
        assert_same_batches(made, 1)
        for policy in policies.values():
            policy[1].step(40)
    assert policies["reap"][1].eps == policies["torchrl"][1].eps == pytest.approx(0.1)
