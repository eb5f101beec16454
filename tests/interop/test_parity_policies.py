"""Every way to write a policy: plain functions, modules, TensorDictModules, things that take a TensorDict."""

import functools

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import distributions, nn
from torchrl.envs import ExplorationType
from torchrl.envs.utils import exploration_type

from reap.errors import WorkerRaised
from tests.worlds.pairs import (
    SPACES,
    SpaceEnv,
    actor,
    assert_same_batches,
    collectors,
    differs,
    env_makers,
    one_episode,
)

pytestmark = pytest.mark.filterwarnings("ignore")

POLICIES = {}


def policy(make):
    """Register a maker of a policy for the env "vector": observation float32[3], action float32[2]."""
    POLICIES[make.__name__] = make
    return make


# ---- of observations ------------------------------------------------------------------------------------------------


@policy
def function():
    return lambda observation: observation[..., :2] * 2


@policy
def function_with_default():
    def act(observation, scale=3.0):
        return observation[..., :2] * scale

    return act


@policy
def function_with_keyword_only():
    def act(observation, *, scale=3.0):
        return observation[..., :2] * scale

    return act


@policy
def partial():
    def act(observation, scale):
        return observation[..., :2] * scale

    return functools.partial(act, scale=2.0)


@policy
def callable_object():
    class Act:
        def __call__(self, observation):
            return observation[..., 1:]

    return Act()


@policy
def bound_method():
    class Agent:
        def act(self, observation):
            return observation[..., 1:]

    return Agent().act


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, observation):
        return self.layer(observation)


@policy
def module():
    return Net()


@policy
def function_with_extra_outputs():
    return lambda observation: (observation[..., :2], observation.sum(-1), observation > 0)


@policy
def module_with_extra_outputs():
    class Extra(Net):
        def forward(self, observation):
            action = self.layer(observation)
            return action, action.sum(-1, keepdim=True), observation.double()

    return Extra()


# ---- of a tensordict ------------------------------------------------------------------------------------------------


@policy
def tensordict_written_into():
    def act(tensordict):
        observation = tensordict["observation"]
        return tensordict.set("action", observation[..., :2]).set("value", observation.sum(-1))

    return act


@policy
def tensordict_by_short_name():
    return lambda td: td.set("action", td["observation"][..., :2])


@policy
def tensordict_by_annotation():
    def act(data: TensorDictBase) -> TensorDictBase:
        return data.set("action", data["observation"][..., :2])

    return act


@policy
def tensordict_made_anew():
    def act(td):
        observation = td["observation"]
        return TensorDict({"action": observation[..., :2], "q": observation * 3}, td.batch_size)

    return act


@policy
def tensordict_module():
    class Act(Net):
        def forward(self, tensordict):
            return tensordict.set("action", self.layer(tensordict["observation"]))

    return Act()


@policy
def tensordict_flags_read():
    return lambda td: td.set("action", td["observation"][..., :2] * ~td["done"] * ~td["terminated"])


@policy
def tensordict_private_keys():
    def act(td):
        observation = td["observation"]
        td.set("_secret", observation * 2).set(("a", "_b"), observation).set(("a", "c"), observation)
        return td.set("action", observation[..., :2])

    return act


@policy
def tensordict_observation_replaced():
    def act(td):
        td["observation"] = td["observation"] * 2
        return td.set("action", td["observation"][..., :2])

    return act


# ---- TensorDictModules ----------------------------------------------------------------------------------------------


def linear(ins, outs, source="observation", target="action"):
    return TensorDictModule(nn.Linear(ins, outs), in_keys=[source], out_keys=[target])


@policy
def td_module():
    return linear(3, 2)


@policy
def td_module_with_nested_outputs():
    outs = ["action", ("agent", "value"), ("agent", "deep", "seen")]
    return TensorDictModule(lambda o: (o[..., :2], o.sum(-1), o), in_keys=["observation"], out_keys=outs)


@policy
def td_module_of_every_dtype():
    def act(o):
        return (
            o[..., :2],
            o.bfloat16(),
            o.half(),
            o.double(),
            o.long(),
            (o * 9).to(torch.int8),
            o > 0,
            torch.complex(o, o),
        )

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action", *"abcdefg"])


@policy
def td_module_writes_float64_action():
    return TensorDictModule(lambda o: o[..., :2].double(), in_keys=["observation"], out_keys=["action"])


@policy
def td_module_writes_whole_action():
    return TensorDictModule(lambda o: (o[..., :2] * 3).long(), in_keys=["observation"], out_keys=["action"])


@policy
def td_module_with_renamed_input():
    return TensorDictModule(lambda x: x[..., :2], in_keys={"x": "observation"}, out_keys=["action"], out_to_in_map=True)


@policy
def td_module_reads_flags():
    return TensorDictModule(lambda o, d: o[..., :2] * ~d, in_keys=["observation", "done"], out_keys=["action"])


@policy
def td_module_not_in_place():
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"], inplace=False)


@policy
def td_module_with_hook():
    net = nn.Linear(3, 2)
    net.register_forward_hook(lambda _module, _inputs, output: output * 2)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


@policy
def td_module_with_dropout():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


@policy
def sequential():
    return TensorDictSequential(
        linear(3, 8, target="hidden"),
        TensorDictModule(nn.Tanh(), in_keys=["hidden"], out_keys=["squashed"]),
        linear(8, 2, "squashed"),
        linear(8, 1, "hidden", "value"),
    )


@policy
def sequential_that_rewrites_a_key():
    tanh = TensorDictModule(nn.Tanh(), in_keys=["hidden"], out_keys=["hidden"])
    return TensorDictSequential(linear(3, 8, target="hidden"), tanh, linear(8, 2, "hidden"))


@policy
def sequential_that_rewrites_the_observation():
    scale = TensorDictModule(lambda o: o * 2, in_keys=["observation"], out_keys=["observation"])
    return TensorDictSequential(scale, linear(3, 2))


@policy
def sequential_that_drops_an_output():
    two = TensorDictModule(lambda o: (o * 2, o), in_keys=["observation"], out_keys=["hidden", "_"])
    return TensorDictSequential(two, linear(3, 2, "hidden"))


@policy
def sequential_with_selected_outputs():
    return TensorDictSequential(linear(3, 8, target="hidden"), linear(8, 2, "hidden")).select_out_keys("action")


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_policy(name, lanes):
    assert_same_batches(collectors(env_makers("vector", lanes), POLICIES[name], frames_per_batch=8))


# ---- several observations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize(
    "act",
    [lambda a, b: a[..., :1] + b[..., :1].float(), lambda b, a: a[..., 1:] - b[..., 1:2].float()],
    ids=["in order", "in another order"],
)
def test_observations_by_name(act, lanes):
    assert_same_batches(collectors(env_makers("dict", lanes), lambda: act, frames_per_batch=8))


@pytest.mark.parametrize("lanes", [None, 2])
def test_pixels_by_name(lanes):
    def act(pixels):
        return nn.functional.one_hot(pixels.flatten(-3).long().sum(-1) % 4, 4)

    assert_same_batches(collectors(env_makers("pixels", lanes), lambda: act, frames_per_batch=8))


@pytest.mark.parametrize("lanes", [None, 2])
def test_step_count_can_be_read(lanes):
    def make():
        return TensorDictModule(lambda o, n: o[..., :2] * n, in_keys=["observation", "step_count"], out_keys=["action"])

    assert_same_batches(collectors(env_makers("vector", lanes), make, frames_per_batch=8, max_frames_per_traj=3))


@pytest.mark.parametrize("lanes", [None, 2])
def test_policy_factory(lanes):
    made = collectors(
        env_makers("vector", lanes), lambda: None, frames_per_batch=8, policy_factory=lambda: actor("vector")
    )
    assert_same_batches(made)


@pytest.mark.parametrize("lanes", [None, 2])
def test_trusted_policy(lanes):
    def act(anything):
        return anything.set("action", anything["observation"][..., :2])

    assert_same_batches(collectors(env_makers("vector", lanes), lambda: act, frames_per_batch=8, trust_policy=True))


@pytest.mark.parametrize("lanes", [None, 2])
def test_weights_changed_between_batches_are_used(lanes):
    """The policy is the caller's own: an optimiser step shows in the next batch, without any call."""
    policies = []

    def make():
        policies.append(linear(3, 2))
        return policies[-1]

    made = collectors(env_makers("vector", lanes), make, frames_per_batch=6)
    first = assert_same_batches(made, 1)
    for one in policies:
        with torch.no_grad():
            one.module.weight.mul_(-2)
    second = assert_same_batches(made, 1)
    assert not torch.equal(first[0]["action"], second[0]["action"])


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("kind", ["random", "deterministic"])
@pytest.mark.parametrize("form", ["function", "td function", "td module"])
def test_policy_sees_the_exploration_type(form, kind, lanes):
    """Modules may decide for themselves whether to explore; none of them is asked for gradients."""
    kinds = [None, *ExplorationType]

    def act(observation):
        return observation[..., :2] * 0 + kinds.index(exploration_type()) + 100 * torch.is_grad_enabled()

    policy = {
        "function": act,
        "td function": lambda td: td.set("action", act(td["observation"])),
        "td module": TensorDictModule(act, in_keys=["observation"], out_keys=["action"]),
    }[form]
    made = collectors(env_makers("vector", lanes), lambda: policy, frames_per_batch=6, exploration_type=kind)
    assert assert_same_batches(made)[0]["action"].unique().tolist() == [kinds.index(ExplorationType(kind))]


# ---- differences ----------------------------------------------------------------------------------------------------


@differs("a TensorDict policy is not given ('collector', 'traj_ids')", WorkerRaised)
@pytest.mark.parametrize("lanes", [None, 2])
def test_trajectory_ids_can_be_read(lanes):
    def act(td):
        return td.set("action", td["observation"][..., :2] * td["collector", "traj_ids"].unsqueeze(-1))

    assert_same_batches(collectors(env_makers("vector", lanes), lambda: act, frames_per_batch=8))


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("key", ["action", "memory"])
def test_policy_reads_what_it_wrote(key, lanes):
    def act(td):
        last = td.get(key, torch.zeros(*td.batch_size, 2))
        return td.set("memory", last / 2 + 1).set("action", td["observation"][..., :2] + last)

    assert_same_batches(collectors(env_makers(one_episode, lanes), lambda: act, frames_per_batch=8))


def remembers(observation, hidden=None):
    """Begins with a state of its own where it is given none."""
    hidden = torch.full((*observation.shape[:-1], 2), -5.0) if hidden is None else hidden
    return observation[..., :2] + hidden, hidden / 2 + 1


def staggered(lane):
    """The env "vector" with ends that never come in all lanes at once."""
    return SpaceEnv(*SPACES["vector"], lane=lane, lengths=((3, 2), (10**6,))[lane])


@pytest.mark.parametrize(("kind", "lanes"), [(one_episode, None), (one_episode, 2), (staggered, 2)])
def test_an_input_nobody_provides_is_none_and_then_what_was_written(kind, lanes):
    policy = lambda: TensorDictModule(remembers, ["observation", "hidden"], ["action", "hidden"])  # noqa: E731
    assert_same_batches(collectors(env_makers(kind, lanes), policy, frames_per_batch=8), 3)


@pytest.mark.parametrize("lanes", [None, 2])
def test_the_next_value_of_an_input_nobody_provides_is_delivered_and_not_carried(lanes):
    policy = lambda: TensorDictModule(remembers, ["observation", "hidden"], ["action", ("next", "hidden")])  # noqa: E731
    with pytest.warns(UserWarning, match=r"policy reads \['hidden'\], which the env does not provide"):
        compared = collectors(env_makers("vector", lanes), policy, frames_per_batch=8)
    assert_same_batches(compared)


@pytest.mark.parametrize("lanes", [None, 2])
def test_function_that_returns_a_dict(lanes):
    """TorchRL keeps the action and drops the rest; here all of it is delivered."""

    def act(observation):
        return {"action": observation[..., :2], "value": observation.sum(-1)}

    postproc = lambda batch: batch.exclude("value")  # noqa: E731
    assert_same_batches(collectors(env_makers("vector", lanes), lambda: act, frames_per_batch=8, postproc=postproc))


@pytest.mark.parametrize("lanes", [None, 2])
def test_composite_distribution(lanes):
    class Params(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())

        def forward(self, observation):
            return *self.net(observation), observation

    def make():
        keys = [("params", "action", "loc"), ("params", "action", "scale"), ("params", "pick", "logits")]
        sample = ProbabilisticTensorDictModule(
            ["params"],
            ["action", "pick"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"action": distributions.Normal, "pick": distributions.Categorical}
            },
            return_log_prob=True,
        )
        return ProbabilisticTensorDictSequential(TensorDictModule(Params(), ["observation"], keys), sample)

    assert_same_batches(collectors(env_makers("vector", lanes), make, frames_per_batch=8))
