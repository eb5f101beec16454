"""Policies of every kind, on the predictable world; the flat program against the modules it stands for."""

from __future__ import annotations

import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn import probabilistic as tensordict_probabilistic
from tensordict.nn.probabilistic import interaction_type
from torch import distributions, nn

from reap.collectors import Collector, RandomPolicy
from reap.core.capture.fingerprint import Fingerprint
from reap.core.policies.call_policy import CallPolicy
from reap.core.policies.captured_policy import CapturedPolicy
from reap.core.policies.exploration import exploring
from reap.core.policies.flat import flatten
from reap.core.policies.flat_policy import FlatPolicy
from reap.core.policies.untouched import untouched
from reap.core.policy import TensorDictPolicy
from reap.envs import GymEnv, SerialEnv
from reap.errors import SpecMismatch
from reap.spec import as_key
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.testing.backend import LENGTHS, counting_lanes

MIX = torch.tensor([3.0, 5.0, 7.0])


def echo(observation):
    return (observation * MIX).sum(-1, keepdim=True)


def kind(c):
    return type(c._backend.worker.policy)


class Base(TensorDictModuleBase):
    in_keys = ["observation"]
    out_keys = ["action"]

    def forward(self, tensordict):
        return tensordict.set("action", echo(tensordict["observation"]))


def returns_another(td):
    return TensorDict({"action": echo(td["observation"])}, batch_size=td.batch_size)


POLICIES = {
    "function": (lambda: lambda observation: echo(observation), CallPolicy),
    "module": (EchoPolicy, CallPolicy),
    "any name": (lambda: lambda x: echo(x), CallPolicy),
    "defaults": (lambda: lambda observation, scale=1.0: echo(observation) * scale, CallPolicy),
    "numpy": (lambda: lambda observation: echo(observation).numpy(), CallPolicy),
    "TensorDictModule": (lambda: TensorDictModule(EchoPolicy(), ["observation"], ["action"]), FlatPolicy),
    "TensorDictModule of a function": (lambda: TensorDictModule(echo, ["observation"], ["action"]), FlatPolicy),
    "sequence": (
        lambda: TensorDictSequential(
            TensorDictModule(lambda o: o, ["observation"], ["action"]),  # written twice: the second counts
            TensorDictModule(EchoPolicy(), ["action"], ["action"]),
        ),
        FlatPolicy,
    ),
    "base class": (Base, TensorDictPolicy),
    "td function": (lambda: lambda td: td.set("action", echo(td["observation"])), TensorDictPolicy),
    "another td": (lambda: returns_another, TensorDictPolicy),
}


CAPTURED = ("module", "TensorDictModule", "TensorDictModule of a function", "sequence")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]], ids=["lanes", "single"])
def test_every_kind_acts_the_same(name, lengths):
    make, expected = POLICIES[name]
    for capture in (False, True):
        c = Collector(counting_lanes(lengths)(), make(), frames_per_batch=4 * len(lengths), capture=capture)
        world = CountingWorld(lengths)
        for _ in range(6):
            assert_same(c.next(), world.batch(4))
        assert kind(c) is (CapturedPolicy if capture and name in CAPTURED else expected)


def test_extra_outputs_are_columns():
    c = Collector(
        counting_lanes()(),
        lambda observation: (echo(observation), observation * 2, observation[..., 0].long()),
        frames_per_batch=12,
    )
    batch = c.next()
    assert torch.equal(batch["output1"], batch["observation"] * 2)
    assert torch.equal(batch["output2"], batch["observation"][..., 0].long())
    assert batch["output2"].shape == (3, 4)
    assert batch["output2"].dtype is torch.int64


def test_nested_and_private_keys_and_flags():
    policy = TensorDictSequential(
        TensorDictModule(echo, ["observation"], [("agent", "score")]),
        TensorDictModule(
            lambda s, done: (s, s + done, s), [("agent", "score"), "done"], ["action", ("agent", "x"), "_secret"]
        ),
    )
    batch = Collector(counting_lanes()(), policy, frames_per_batch=12).next()
    assert torch.equal(batch["agent", "score"], batch["action"])
    assert torch.equal(batch["agent", "x"], batch["action"])
    assert "_secret" not in batch.keys(True)


def test_the_policy_may_overwrite_what_it_saw():
    policy = TensorDictSequential(
        TensorDictModule(lambda o: o + 100, ["observation"], ["observation"]),
        TensorDictModule(lambda o: o[..., :1], ["observation"], ["action"]),
    )
    c = Collector(counting_lanes()(), policy, frames_per_batch=12)
    for _ in range(3):
        batch = c.next()
        assert (batch["observation"] >= 100).all()
        assert (batch["next", "observation"] < 100).all()
        assert torch.equal(batch["action"], batch["observation"][..., :1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool])
def test_outputs_of_any_dtype(dtype):
    c = Collector(
        counting_lanes()(), lambda observation: (echo(observation), observation.to(dtype)), frames_per_batch=12
    )
    batch = c.next()
    assert batch["output1"].dtype is dtype
    assert torch.equal(batch["output1"], batch["observation"].to(dtype))


def test_outputs_that_require_grad_are_delivered_without():
    weight = nn.Parameter(torch.ones(1))
    c = Collector(CountingEnv(), lambda observation: (echo(observation) * weight, weight), frames_per_batch=4)
    batch = c.next()
    assert not batch["action"].requires_grad
    assert not batch["output1"].requires_grad


def test_construction_leaves_no_trace():
    class Stateful(EchoPolicy):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.norm = nn.BatchNorm1d(3)

        def forward(self, observation):
            self.calls += 1
            self.seen = torch.rand(1)
            self.norm(observation)
            return super().forward(observation)

    policy = Stateful()
    torch.manual_seed(5)
    np.random.seed(5)
    expected, expected_np = torch.rand(3), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    Collector(SerialEnv(2, CountingEnv), policy, frames_per_batch=4)
    assert torch.equal(torch.rand(3), expected)
    assert np.random.rand() == expected_np
    assert policy.calls == 0
    assert not hasattr(policy, "seen")
    assert policy.norm.num_batches_tracked == 0
    assert policy.norm.running_mean.eq(0).all()


def test_a_buffer_that_was_replaced_is_put_back():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return x

    thing = Counts()
    before = thing.calls
    with untouched(thing):
        thing(torch.zeros(2))
        assert thing.calls == 1
    assert thing.calls is before
    assert thing.calls == 0


def test_untouched_survives_errors():
    class Raises:
        calls = 0

        def __call__(self, x):
            self.calls += 1
            raise ValueError

    thing = Raises()
    with pytest.raises(ValueError), untouched(thing):
        thing(1)
    assert thing.calls == 0


# ---- the flat program ------------------------------------------------------------------------------------------------


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Identity(), nn.Linear(16, outputs)
    )


class TwoHeads(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.net = mlp(3, 2 * outputs)

    def forward(self, x):
        loc, scale = self.net(x).chunk(2, -1)
        return loc, scale.exp()


def probabilistic(family, params, out=2, **kwargs):
    net = mlp(3, out) if len(params) == 1 else TwoHeads(out)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], params),
        ProbabilisticTensorDictModule(params, ["action"], distribution_class=family, return_log_prob=True, **kwargs),
    )


class IndependentNormal(distributions.Independent):
    def __init__(self, loc, scale):
        super().__init__(distributions.Normal(loc, scale), 1)


FAMILIES = {
    "Categorical": lambda: probabilistic(distributions.Categorical, ["logits"], 4),
    "Categorical probs": lambda: ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(mlp(3, 4), nn.Softmax(-1)), ["observation"], ["probs"]),
        ProbabilisticTensorDictModule(
            ["probs"], ["action"], distribution_class=distributions.Categorical, return_log_prob=True
        ),
    ),
    "OneHotCategorical": lambda: probabilistic(distributions.OneHotCategorical, ["logits"], 4),
    "Normal": lambda: probabilistic(distributions.Normal, ["loc", "scale"]),
    "Independent": lambda: probabilistic(IndependentNormal, ["loc", "scale"]),
    "Bernoulli": lambda: probabilistic(distributions.Bernoulli, ["logits"], 4),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "how", [InteractionType.RANDOM, InteractionType.MODE, InteractionType.MEAN, InteractionType.DETERMINISTIC]
)
@pytest.mark.parametrize("shape", [(3,), (5, 3)])
def test_the_program_is_the_modules_bit_for_bit(name, how, shape):
    torch.manual_seed(0)
    policy = FAMILIES[name]()
    program = flatten(policy, how)
    assert program is not None
    x = torch.randn(shape)

    def modules():
        torch.manual_seed(1)
        with set_interaction_type(how), torch.no_grad():
            td = policy(TensorDict({"observation": x}, batch_size=shape[:-1]))
            policy(TensorDict({"observation": x}, batch_size=shape[:-1]))
        return td, torch.rand(1)

    def flat():
        torch.manual_seed(1)
        with torch.no_grad():
            out = dict(zip(program.written, program.run(x)))
            for key, deferred in program.deferred.items():
                known = {("observation",): x, **out}
                out[key] = deferred.compute(*[known[k] for k in deferred.reads])
            program.run(x)
        return out, torch.rand(1)

    try:
        want, after = modules()
    except Exception as error:  # a kind this family has not: both say so
        with pytest.raises(type(error)):
            flat()
        return
    got, then = flat()
    assert torch.equal(after, then), "random numbers were used up differently"
    assert {as_key(k) for k in want.keys(True, True)} == {*got, ("observation",)}
    for key, value in got.items():
        assert value.dtype == want[key].dtype, key
        assert torch.equal(value, want[key]) or (value.isnan() & want[key].isnan()).any(), key


def test_nan_parameters_raise_as_the_distribution_would():
    policy = probabilistic(distributions.Normal, ["loc", "scale"], 1)
    c = Collector(CountingEnv(), policy, frames_per_batch=4)
    with torch.no_grad():
        policy[0].module.net[0].weight.fill_(float("nan"))
    with pytest.raises(SpecMismatch, match="lane 0, step 0: the policy wrote NaN as 'loc'"):
        c.next()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", ["Categorical", "Normal"])
def test_log_probabilities_after_the_rollout_are_those_of_each_step(name, lanes):
    class Free(CountingEnv):
        action_space = gym.spaces.Discrete(4) if name == "Categorical" else gym.spaces.Box(-9, 9, (2,), np.float32)

        def step(self, action):
            return super().step(0.0)

    policy = FAMILIES[name]()
    env = (
        GymEnv(Free(), categorical_action_encoding=True)
        if lanes == 1
        else SerialEnv(3, lambda: GymEnv(Free(), categorical_action_encoding=True))
    )
    batch = Collector(env, policy, frames_per_batch=30 * lanes).next()
    for t in range(30):
        row = batch[..., t]
        want = policy.get_dist(row).log_prob(row["action"])
        assert torch.equal(row["action_log_prob"], want)


def test_replaced_parameters_are_seen():
    layer = nn.Linear(3, 1, bias=False)
    c = Collector(CountingEnv((9,)), TensorDictModule(layer, ["observation"], ["action"]), frames_per_batch=3)
    c.next()
    layer.weight = nn.Parameter(MIX.reshape(1, 3).clone())
    batch = c.next()
    assert kind(c) is FlatPolicy
    assert torch.equal(batch["action"], echo(batch["observation"]))


def test_a_hook_added_later_is_called():
    module = TensorDictModule(nn.Sequential(nn.Linear(3, 1)), ["observation"], ["action"])
    c = Collector(CountingEnv((9,)), module, frames_per_batch=3)
    before = c.next()
    module.module[0].register_forward_hook(lambda m, args, out: out * 0 + 42)
    assert (c.next()["action"] == 42).all()
    handle = module.register_forward_hook(lambda m, args, out: out.set("action", out["action"] * 0 + 43))
    assert (c.next()["action"] == 43).all()
    handle.remove()
    assert (c.next()["action"] == 42).all()
    assert (before["action"] != 42).all()


class Loud(TensorDictModule):
    def forward(self, tensordict):
        return super().forward(tensordict).set("action", torch.full_like(tensordict["action"], 9.0))


def hooked():
    module = TensorDictModule(EchoPolicy(), ["observation"], ["action"])
    module.register_forward_pre_hook(lambda m, args: None)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Loud(EchoPolicy(), ["observation"], ["action"]),
        hooked,
        lambda: TensorDictModule(EchoPolicy(), in_keys={"observation": "observation"}, out_keys=["action"]),
        lambda: TensorDictSequential(
            TensorDictModule(EchoPolicy(), ["observation"], ["action"]), partial_tolerant=True
        ),
        lambda: TensorDictSequential(
            TensorDictModule(lambda o: (o, o[..., :1]), ["observation"], ["h", "action"])
        ).select_out_keys("action"),
    ],
    ids=["overrides forward", "hook", "keywords", "partial", "selected"],
)
def test_modules_with_a_will_of_their_own_are_called_as_they_are(make):
    policy = make()
    assert flatten(policy, InteractionType.RANDOM) is None
    c = Collector(CountingEnv(), policy, frames_per_batch=4, capture=False)
    batch = c.next()
    assert torch.equal(Collector(CountingEnv(), policy, frames_per_batch=4).next()["action"], batch["action"])
    td = policy(batch.select("observation").clone())
    assert kind(c) is TensorDictPolicy
    assert torch.equal(batch["action"], td["action"])
    assert "h" not in batch.keys()


def test_a_module_that_returns_something_odd_falls_back():
    policy = TensorDictModule(lambda o: {"action": o[..., :1]}, ["observation"], ["action"])
    batch = Collector(CountingEnv(), policy, frames_per_batch=4).next()
    assert torch.equal(batch["action"], batch["observation"][..., :1])


# ---- exploration -----------------------------------------------------------------------------------------------------


def test_exploration_type_reaches_opaque_modules_and_no_other_thread():
    seen, others = [], []
    collecting, inside, go_on = threading.Event(), threading.Event(), threading.Event()

    class Opaque(Base):
        def forward(self, tensordict):
            seen.append(interaction_type())
            if collecting.is_set() and not inside.is_set():
                inside.set()
                assert go_on.wait(10)
            return super().forward(tensordict)

    def trainer():
        assert inside.wait(10)
        others.append(interaction_type())
        with set_interaction_type(InteractionType.MEAN):
            others.append(interaction_type())
            go_on.set()

    c = Collector(CountingEnv(), Opaque(), frames_per_batch=3, exploration_type="mode")
    thread = threading.Thread(target=trainer)
    thread.start()
    collecting.set()
    c.next()
    thread.join()
    assert set(seen) == {InteractionType.MODE}
    assert others == [None, InteractionType.MEAN]
    assert interaction_type() is None


def test_exploring_nests_and_lets_modules_set_their_own():
    with exploring(InteractionType.RANDOM):
        with set_interaction_type(InteractionType.MEDIAN):
            assert interaction_type() is InteractionType.MEDIAN
            with exploring(InteractionType.MODE):
                assert interaction_type() is InteractionType.MODE
            assert interaction_type() is InteractionType.MEDIAN
        assert interaction_type() is InteractionType.RANDOM
    assert interaction_type() is None


def test_the_interaction_type_is_tensordicts_own_when_nobody_collects():
    usual = tensordict_probabilistic._interaction_type
    seen = []

    def looks(observation):
        seen.append(tensordict_probabilistic._interaction_type is usual)
        return echo(observation)

    c = Collector(CountingEnv(), looks, frames_per_batch=3)
    assert tensordict_probabilistic._interaction_type is usual
    for _ in range(2):
        c.next()
        assert tensordict_probabilistic._interaction_type is usual
    assert seen
    assert not any(seen)
    with pytest.raises(ZeroDivisionError), exploring(InteractionType.MODE):
        1 / 0
    assert tensordict_probabilistic._interaction_type is usual
    c.shutdown()


def test_the_interaction_type_stays_while_another_thread_collects():
    usual = tensordict_probabilistic._interaction_type
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def collect():
        with exploring(InteractionType.MODE):
            inside.set()
            leave.wait(60)
            seen.append(interaction_type())

    thread = threading.Thread(target=collect)
    thread.start()
    inside.wait(60)
    with exploring(InteractionType.MEAN):
        assert interaction_type() is InteractionType.MEAN
    assert interaction_type() is None
    assert tensordict_probabilistic._interaction_type is not usual
    leave.set()
    thread.join()
    assert seen == [InteractionType.MODE]
    assert tensordict_probabilistic._interaction_type is usual


# ---- random ----------------------------------------------------------------------------------------------------------


def test_random_policy_object_learns_its_spec():
    policy = RandomPolicy()
    with pytest.raises(RuntimeError, match="no action_spec"):
        policy(TensorDict({}))
    c = Collector("Pendulum-v1", policy, frames_per_batch=50)
    actions = c.next()["action"]
    assert actions.shape == (50, 1)
    assert actions.abs().max() <= 2
    assert actions.std() > 0.5
    assert policy(TensorDict({}, batch_size=[4]))["action"].shape == (4, 1)


def test_action_masks_pass_through():
    class Masked(CountingEnv):
        observation_space = gym.spaces.Dict(
            observation=CountingEnv.observation_space, action_mask=gym.spaces.MultiBinary(4)
        )
        action_space = gym.spaces.Discrete(4)

        def _observation(self):
            mask = np.zeros(4, np.int8)
            mask[self.t % 4] = 1
            return {"observation": super()._observation(), "action_mask": mask}

    def policy(observation, action_mask):
        return torch.where(action_mask.bool(), 0.0, -torch.inf).argmax(-1)

    batch = Collector(SerialEnv(2, lambda: GymEnv(Masked())), policy, frames_per_batch=12).next()
    assert batch["action_mask"].dtype is torch.int8
    assert torch.equal(batch["action"], batch["observation"][..., 2].long() % 4)
    assert torch.equal(batch["action_mask"].long().argmax(-1), batch["action"])


def test_a_generator_of_its_own_is_not_drawn_from_before_the_first_step():
    class Draws:
        def __init__(self):
            self.numbers = np.random.default_rng(0)

        def __call__(self, observation):
            return torch.from_numpy(self.numbers.normal(size=1).astype(np.float32))

    with Collector(GymEnv(CountingEnv()), Draws(), frames_per_batch=3) as collector:
        want = np.random.default_rng(0).normal(size=3).astype(np.float32)
        assert collector.next()["action"][:, 0].tolist() == want.tolist()


# ---- how it is run --------------------------------------------------------------------------------------------------


class LooksAtValues(nn.Module):
    def forward(self, observation):
        return observation[..., :1] if observation.sum() > 0 else -observation[..., :1]


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (EchoPolicy, {}, "policy EchoPolicy: it is captured: its torch calls are replayed"),
        (EchoPolicy, {"capture": False}, "policy EchoPolicy: it is called at each step"),
        (
            LooksAtValues,
            {},
            "policy LooksAtValues: it is called at each step, not captured: "
            "its control flow depends on __bool__() of a computed tensor",
        ),
        (lambda: None, {}, "policy: random actions, drawn for a whole rollout"),
        (
            lambda: TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"]),
            {},
            "policy TensorDictModule: it runs flat, without TensorDicts",
        ),
    ],
)
def test_a_collector_explains_how_its_policy_is_run(make, options, told):
    with Collector(CountingEnv(), make(), frames_per_batch=4, **options) as c:
        assert c.explain() == f"env: reap steps it\n{told}"
        assert f"env: reap steps it; {told}; batch" in repr(c)


GAINS = [1.0]


class Fickle(nn.Module):
    """What it does follows from the content of a list that no reading of its code shows to change."""

    def forward(self, observation):
        return observation[..., :1] * max(GAINS)


def test_a_policy_that_changes_its_ways_later_is_called_from_then_on(monkeypatch):
    monkeypatch.setattr(Fingerprint, "holds", lambda self: True)  # whatever we did not think of
    c = Collector(counting_lanes()(), Fickle(), frames_per_batch=12)
    assert "captured: its torch calls" in c.explain()
    c.next()
    GAINS.append(3.0)
    try:
        batch = c.next()  # the second rollout: its first step is made by both
    finally:
        GAINS.pop()
    assert torch.equal(batch["action"], batch["observation"][..., :1] * 3)
    assert "replay and module gave different results in a later rollout" in c.explain()


def test_a_plain_function_is_called_once_before_the_first_frame():
    calls = []

    def policy(observation):
        calls.append(observation.shape)
        return observation[..., :1]

    with Collector(CountingEnv(), policy, frames_per_batch=4) as collector:
        assert len(calls) == 1
        collector.next()
        assert len(calls) == 5


def test_a_policy_that_reads_other_keys_than_it_did_is_refused():
    """Its inputs are cut from rows once: the column it read before would be taken for the one it asks for."""
    env = GymEnv(CountingEnv((50,)), info_keys={"goal": gym.spaces.Box(-1, 1, (3,))})
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 3), ["observation"], ["hidden"]),
        TensorDictModule(nn.Linear(3, 1), ["hidden"], ["action"]),
    )
    c = Collector(env, policy, frames_per_batch=4)
    c.next()
    policy.module[0] = TensorDictModule(nn.Linear(3, 3), ["goal"], ["hidden"])
    with pytest.raises(SpecMismatch, match="reads 'goal' now; it read 'observation' when the collector was made"):
        c.next()
