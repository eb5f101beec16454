"""TorchRL's policies on TorchRL's envs: the same batches in both libraries, random numbers and annealing included."""

import warnings

import pytest
import torch
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn

from reap.collectors import Collector, MultiSyncCollector
from tests.worlds.pairs import LIBRARIES, assert_identical

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl import modules
    from torchrl.envs import (
        Compose,
        ExplorationType,
        GymEnv,
        InitTracker,
        SerialEnv,
        StepCounter,
        TransformedEnv,
        set_exploration_type,
    )
    from torchrl.testing import mocking_classes as mocks

pytestmark = pytest.mark.filterwarnings("ignore")
HOT, FORCE = GymEnv("CartPole-v1").action_spec, GymEnv("Pendulum-v1").action_spec


def cart(*transforms):
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), *transforms, StepCounter(20)))


def pendulum():
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(StepCounter(8), InitTracker()))


def lanes():
    return TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), StepCounter(10))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 16), nn.Tanh(), nn.Linear(16, o))


def choosing(*before):
    sample = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=modules.OneHotCategorical)
    return TensorDictSequential(*before, sample)


def scores(net=None):
    return TensorDictModule(net or mlp(4, 2), ["observation"], ["logits"])


def recurrent(kind):
    net = kind(4, 8, in_key="observation", out_key="features")
    return choosing(net, TensorDictModule(nn.Linear(8, 2), ["features"], ["logits"]))


def with_primer(kind):
    return cart(kind(4, 8, in_key="observation", out_key="features").make_tensordict_primer())


def gaussian():
    body = nn.Sequential(mlp(3, 2), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=modules.TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        spec=FORCE,
    )


def hot(**more):
    return modules.ProbabilisticActor(
        scores(),
        in_keys=["logits"],
        distribution_class=modules.OneHotCategorical,
        return_log_prob=True,
        spec=HOT,
        **more,
    )


def composite():
    return modules.ProbabilisticActor(
        TensorDictModule(mlp(4, 2), ["observation"], [("params", "a", "logits")]),
        in_keys=["params"],
        out_keys=["action"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": modules.OneHotCategorical}, "name_map": {"a": "action"}},
        return_log_prob=True,
    )


def dropping(shape):
    drop = modules.ConsistentDropoutModule(p=0.5, in_keys=["h", "mask"], input_shape=shape)
    act = TensorDictModule(nn.Linear(8, 1), ["h"], ["action"])
    return TensorDictSequential(TensorDictModule(nn.Linear(3, 8), ["observation"], ["h"]), drop, act)


def noisy(noise):
    return TensorDictSequential(modules.Actor(mlp(3, 1), spec=FORCE), noise)


def greedy():
    explore = modules.EGreedyModule(HOT, eps_init=0.5, eps_end=0.1, annealing_num_steps=30)
    return TensorDictSequential(modules.QValueActor(mlp(4, 2), spec=HOT), explore)


def distributional():
    net = nn.Sequential(nn.Linear(4, 10), nn.Unflatten(-1, (5, 2)), nn.LogSoftmax(-2))
    return modules.DistributionalQValueActor(net, spec=HOT, support=torch.arange(5.0))


def actor_and_value():
    act = modules.ProbabilisticActor(
        TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"]),
        in_keys=["logits"],
        distribution_class=modules.OneHotCategorical,
    )
    value = modules.ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    return modules.ActorValueOperator(TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"]), act, value)


def tolerant():
    absent = TensorDictModule(nn.Linear(7, 3), ["absent"], ["unused"])
    sample = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=modules.OneHotCategorical)
    return TensorDictSequential(absent, scores(), sample, partial_tolerant=True)


#: by name: an env and a policy
KINDS = {
    "Actor": (pendulum, lambda: modules.Actor(mlp(3, 1), spec=FORCE)),
    "safe Actor": (
        pendulum,
        lambda: modules.Actor(nn.Sequential(mlp(3, 1), nn.Hardtanh(-9, 9)), spec=FORCE, safe=True),
    ),
    "ProbabilisticActor, TanhNormal": (pendulum, gaussian),
    "ProbabilisticActor, OneHotCategorical": (cart, hot),
    "ProbabilisticActor, CompositeDistribution": (cart, composite),
    "QValueActor": (cart, lambda: modules.QValueActor(mlp(4, 2), spec=HOT)),
    "QValueModule": (
        cart,
        lambda: TensorDictSequential(
            TensorDictModule(mlp(4, 2), ["observation"], ["action_value"]), modules.QValueModule(spec=HOT)
        ),
    ),
    "DistributionalQValueActor": (cart, distributional),
    "EGreedyModule": (cart, greedy),
    "NoisyLinear": (
        cart,
        lambda: modules.QValueActor(
            nn.Sequential(modules.NoisyLinear(4, 8), nn.Tanh(), modules.NoisyLinear(8, 2)), spec=HOT
        ),
    ),
    "OrnsteinUhlenbeckProcessModule": (pendulum, lambda: noisy(modules.OrnsteinUhlenbeckProcessModule(spec=FORCE))),
    "AdditiveGaussianModule": (pendulum, lambda: noisy(modules.AdditiveGaussianModule(spec=FORCE))),
    "AdditiveGaussianModule without spec": (pendulum, lambda: noisy(modules.AdditiveGaussianModule(spec=None))),
    "LSTMModule": (lambda: with_primer(modules.LSTMModule), lambda: recurrent(modules.LSTMModule)),
    "GRUModule": (lambda: with_primer(modules.GRUModule), lambda: recurrent(modules.GRUModule)),
    "TensorDictSequential, partial tolerance": (cart, tolerant),
    "lazy module": (cart, lambda: choosing(scores(nn.LazyLinear(2)))),
    "ActorValueOperator": (cart, actor_and_value),
    "VmapModule": (lanes, lambda: choosing(modules.VmapModule(scores(), 0))),
    "RandomPolicy": (cart, lambda: LIBRARIES["torchrl"].collectors.RandomPolicy(HOT)),
    "RandomPolicy without spec": (cart, lambda: LIBRARIES["torchrl"].collectors.RandomPolicy()),
    "RandomPolicy without spec, lanes": (lanes, lambda: LIBRARIES["torchrl"].collectors.RandomPolicy()),
    "ConsistentDropoutModule": (lambda: TransformedEnv(GymEnv("Pendulum-v1")), lambda: dropping(None)),
    "ConsistentDropoutModule of lanes": (
        lambda: TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1"))),
        lambda: dropping((2, 8)),
    ),
    "ConsistentDropoutModule, primer": (
        lambda: TransformedEnv(
            GymEnv("Pendulum-v1"), Compose(StepCounter(5), dropping((8,))[1].make_tensordict_primer())
        ),
        lambda: dropping((8,)),
    ),
    "several groups": (
        lambda: mocks.MultiKeyCountingEnv(max_steps=4, batch_size=[2]),
        lambda: mocks.MultiKeyCountingEnvPolicy(mocks.MultiKeyCountingEnv(batch_size=[2]).full_action_spec),
    ),
}


def batches(library, env, policy, **options):
    env = env()
    torch.manual_seed(0)
    policy = policy()
    env.set_seed(1)
    frames = 9 * max(1, env.batch_size.numel())
    collector = LIBRARIES[library].collectors.Collector(env, policy, frames_per_batch=frames, **options)
    torch.manual_seed(1)
    found = []
    for batch in collector:
        found.append(batch.clone())
        for part in policy.modules() if isinstance(policy, nn.Module) else ():
            if isinstance(part, (modules.EGreedyModule, modules.OrnsteinUhlenbeckProcessModule)):
                part.step(9)  # annealing, as training scripts do it
        if len(found) == 4:
            collector.shutdown()
            return found
    raise AssertionError("no more batches")


@pytest.mark.parametrize("kind", KINDS)
def test_policy(kind):
    want, got = (batches(library, *KINDS[kind]) for library in ("torchrl", "reap"))
    for i, (ours, theirs) in enumerate(zip(got, want)):
        drop = ["collector"] if kind == "several groups" else []
        assert_identical(ours.exclude(*drop), theirs.exclude(*drop), f"batch {i}")


@pytest.mark.parametrize("kind", [ExplorationType.MODE, ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_exploration_type(kind):
    want, got = (batches(library, cart, hot, exploration_type=kind) for library in ("torchrl", "reap"))
    for ours, theirs in zip(got, want):
        assert_identical(ours, theirs)


def test_the_collectors_exploration_type_goes_before_a_context():
    want, got = {}, {}
    for library, found in (("torchrl", want), ("reap", got)):
        with set_exploration_type(ExplorationType.DETERMINISTIC), set_interaction_type(ExplorationType.DETERMINISTIC):
            found["batches"] = batches(library, cart, hot)
    for ours, theirs in zip(got["batches"], want["batches"]):
        assert_identical(ours, theirs)


@pytest.mark.parametrize("net", [modules.LSTMModule, modules.GRUModule])
def test_recurrent_modules_need_no_primer_here(net):
    """Their state is carried all the same, and is the one TorchRL carries with a primer."""
    want = batches("torchrl", lambda: with_primer(net), lambda: recurrent(net))
    got = batches("reap", lambda: cart(), lambda: recurrent(net))
    for ours, theirs in zip(got, want):
        assert_identical(ours, theirs)


@pytest.mark.parametrize("net", [modules.LSTMModule, modules.GRUModule])
def test_recurrent_modules_are_captured(net):
    """A GRU asks whether an episode begins in any lane; whatever the answer, its state is the same."""
    made = {}
    for library in ("torchrl", "reap"):
        env = TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1")), InitTracker())
        torch.manual_seed(0)
        policy = recurrent(net)
        env.append_transform(policy[0].make_tensordict_primer())
        env.set_seed(1)
        collector = LIBRARIES[library].collectors.Collector(env, policy, frames_per_batch=120, total_frames=480)
        torch.manual_seed(1)
        made[library] = [batch.clone() for batch in collector]
        if library == "reap":
            assert "policy TensorDictSequential: it is captured" in collector.explain()
        collector.shutdown()
    assert sum(int(batch["is_init"].sum()) for batch in made["reap"]) > 6  # episodes begin, in some of the lanes
    for ours, theirs in zip(made["reap"], made["torchrl"]):
        assert_identical(ours, theirs)


@pytest.mark.parametrize("takes", ["columns", "tensordict"])
def test_names_of_outputs_beside_steps_kept_whole(takes):
    """An env with text: its steps are kept as TorchRL makes them, and what the policy returns is in them."""

    def parts(count):
        return {"action": torch.ones(1, dtype=torch.int32), "seen": {"double": count * 2}}

    def of_columns(observation):
        return parts(observation)

    def of_tensordict(td):
        return parts(td["observation"])

    policy = of_columns if takes == "columns" else of_tensordict
    batch = Collector(mocks.CountingEnvWithString(max_steps=3), policy, frames_per_batch=6).next()
    assert torch.equal(batch["seen", "double"], batch["observation"] * 2)
    assert batch["action"].eq(1).all()


@pytest.mark.parametrize("env", ["CartPole-v1", lambda: GymEnv("CartPole-v1")], ids=["reap's env", "TorchRL's env"])
def test_a_random_policy_without_spec_draws_from_any_env(env):
    policy = LIBRARIES["torchrl"].collectors.RandomPolicy()
    batch = Collector(env, policy, frames_per_batch=50).next()
    assert batch["action"].sum(-1).eq(1).all()
    assert 5 < batch["action"][:, 0].sum() < 45
    with MultiSyncCollector([env], LIBRARIES["torchrl"].collectors.RandomPolicy(), frames_per_batch=50) as c:
        assert c.next()["action"].sum(-1).eq(1).all()


def test_exploration_modules_find_the_spec_of_an_env_whose_gymnasium_env_is_stepped():
    policy = noisy(modules.AdditiveGaussianModule(spec=None, sigma_init=9.0, sigma_end=9.0))
    batch = Collector(GymEnv("Pendulum-v1"), policy, frames_per_batch=50).next()
    assert batch["action"].abs().max() == 2  # noise is cut at the bounds of the spec


@pytest.mark.parametrize("given", [{}, {"policy_device": "cpu"}, {"device": "cpu"}], ids=["none", "policy", "all"])
@pytest.mark.parametrize("env", [pendulum, lambda: GymEnv("Pendulum-v1"), lanes, mocks.CountingEnvWithString])
def test_the_device_a_policy_sees_is_its_own(env, given):
    seen = {}

    def policy(library):
        def act(td):
            seen.setdefault(library, set()).add(td.device)
            return td.update(spec.rand())

        return act

    spec = env().full_action_spec
    for library in ("torchrl", "reap"):
        made = LIBRARIES[library].collectors.Collector(env(), policy(library), frames_per_batch=8, **given)
        next(iter(made))
        made.shutdown()
    assert seen["reap"] == seen["torchrl"]
