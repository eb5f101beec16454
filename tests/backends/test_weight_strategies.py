"""A WeightStrategy of one's own: collectors call it where weights leave, and in each worker where they arrive."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from reap.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, RPCCollector
from reap.envs import GymEnv
from reap.errors import WrongArgument
from reap.testing import CountingEnv
from reap.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torchrl.weight_update")

pytestmark = pytest.mark.filterwarnings("ignore")


class Scaled(nn.Module):
    """The action is the weight times a number that is no tensor, and so in no state dict."""

    def __init__(self, value=0.0, scale=1):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value))
        self.scale, self.applied = scale, 0

    def forward(self, observation):
        return (self.scale * self.weight).expand(*observation.shape[:-1], 1)


class WithScale(WeightStrategy):
    """Weights with the number beside them; how often they were applied is counted where that happens."""

    def extract_weights(self, source):
        return {"weights": {"weight": source.weight.detach().clone()}, "scale": source.scale}

    def apply_weights(self, destination, weights, inplace=True):
        super().apply_weights(destination, weights["weights"], inplace=inplace)
        destination.scale = weights["scale"]
        destination.applied += 1


class WithScaleOfTheirs(theirs.WeightStrategy):
    """The same, by TorchRL's class."""

    extract_weights = WithScale.extract_weights

    def apply_weights(self, destination, weights, inplace=True):
        super().apply_weights(destination, TensorDict(weights["weights"]), inplace=inplace)
        destination.scale = weights["scale"]
        destination.applied += 1


def env():
    return GymEnv(CountingEnv())


def actions(collector):
    return collector.next()["action"].unique().tolist()


def assigned(scheme, strategy):
    scheme.strategy = strategy  # as scripts do with TorchRL's, whose constructors take names only
    return scheme


MAKERS = {
    "shared": lambda: (MultiSyncCollector, SharedMemWeightSyncScheme(strategy=WithScale())),
    "per worker": lambda: (MultiSyncCollector, MultiProcessWeightSyncScheme(WithScale())),
    "assigned": lambda: (MultiSyncCollector, assigned(SharedMemWeightSyncScheme(), WithScale())),
    "theirs": lambda: (
        MultiSyncCollector,
        assigned(theirs.SharedMemWeightSyncScheme(), WithScaleOfTheirs("tensordict")),
    ),
    "theirs by queues": lambda: (
        MultiAsyncCollector,
        assigned(theirs.MultiProcessWeightSyncScheme("state_dict"), WithScaleOfTheirs("tensordict")),
    ),
    "one in the background": lambda: (AsyncCollector, SharedMemWeightSyncScheme(WithScale())),
    "gloo": lambda: (DistributedCollector, DistributedWeightSyncScheme(WithScale())),
    "rpc": lambda: (RPCCollector, RPCWeightSyncScheme(WithScale())),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_collector_with_workers_calls_it(make):
    kind, scheme = make()
    policy = Scaled(1.0, scale=2)
    with kind([env], policy, frames_per_batch=4, weight_sync_schemes={"policy": scheme}) as collector:
        assert actions(collector) == [2.0]
        assert collector.get_distant_attr("policy.applied") == [1]  # what they begin with goes the same way
        policy.scale = 5
        with torch.no_grad():
            policy.weight.fill_(3.0)
        collector.update_policy_weights_()
        while (acted := actions(collector)) == [2.0]:  # asynchronous workers have made some ahead
            pass
        assert acted == [15.0]
        assert collector.get_distant_attr("policy.applied") == [2]
        assert collector.policy_version == 1


def test_workers_of_their_own_for_each_station():
    options = {"collector_class": "sync", "num_workers_per_collector": 2, "sync": True}
    schemes = {"policy": DistributedWeightSyncScheme(WithScale())}
    policy = Scaled(1.0, scale=2)
    with DistributedCollector([env], policy, frames_per_batch=8, weight_sync_schemes=schemes, **options) as collector:
        assert actions(collector) == [2.0]
        collector.update_policy_weights_(Scaled(2.0, scale=4))
        assert actions(collector) == [8.0]
        collector.load_state_dict(collector.state_dict())  # whole states are no strategy's business
        assert collector.get_distant_attr("policy.applied") == [[2, 2]]
        assert actions(collector) == [8.0]


def test_weights_that_are_none_of_a_model_are_applied_as_they_are():
    schemes = {"policy": SharedMemWeightSyncScheme(WithScale())}
    with MultiSyncCollector([env] * 2, Scaled(1.0), frames_per_batch=8, weight_sync_schemes=schemes) as collector:
        collector.update_policy_weights_({"weights": {"weight": torch.ones(1)}, "scale": 7})
        assert actions(collector) == [7.0]
        collector.update_policy_weights_({0: Scaled(2.0), 1: Scaled(2.0, scale=3)})
        assert collector.next()["action"][:, 0, 0].tolist() == [2.0, 6.0]
        collector.update_policy_weights_(Scaled(4.0), worker_ids=[1])
        assert collector.next()["action"][:, 0, 0].tolist() == [2.0, 4.0]


def test_policies_made_in_the_workers_begin_with_what_it_extracts():
    schemes = {"policy": SharedMemWeightSyncScheme(WithScale())}
    source = Scaled(3.0, scale=3)
    with MultiSyncCollector(
        [env], source, policy_factory=Scaled, frames_per_batch=4, weight_sync_schemes=schemes
    ) as collector:
        assert actions(collector) == [9.0]
    scheme = SharedMemWeightSyncScheme(WithScale())
    scheme.init_on_sender(model=source, num_workers=1)
    with MultiSyncCollector(
        [env], policy_factory=Scaled, frames_per_batch=4, weight_sync_schemes={"policy": scheme}
    ) as collector:
        assert actions(collector) == [9.0]
        source.scale = 4
        collector.update_policy_weights_(worker_ids=[0])
        assert actions(collector) == [12.0]


class Replacing(WithScale):
    """Puts another Parameter in the place of the one that is there."""

    def apply_weights(self, destination, weights, inplace=True):
        super().apply_weights(destination, weights, inplace=False)


def test_one_that_replaces_parameters():
    schemes = {"policy": SharedMemWeightSyncScheme(Replacing())}
    with MultiSyncCollector([env], Scaled(1.0), frames_per_batch=4, weight_sync_schemes=schemes) as collector:
        assert actions(collector) == [1.0]
        for value in (2.0, 3.0):
            collector.update_policy_weights_(Scaled(value))
            assert actions(collector) == [value]


class Echo:
    """A policy that is no module, but has something to send."""

    def __init__(self, value):
        self.value = value

    def __call__(self, observation):
        return torch.full((*observation.shape[:-1], 1), self.value)


class OfEcho:
    """Any object with the two methods is one."""

    def extract_weights(self, source):
        return source.value

    def apply_weights(self, destination, weights):
        destination.value = weights


def test_a_policy_that_is_no_module():
    schemes = {"policy": MultiProcessWeightSyncScheme(OfEcho())}
    with MultiSyncCollector([env], Echo(1.0), frames_per_batch=4, weight_sync_schemes=schemes) as collector:
        assert actions(collector) == [1.0]
        collector.update_policy_weights_(Echo(4.0))
        assert actions(collector) == [4.0]


def test_in_this_process_it_is_called_too():
    schemes = {"policy": SharedMemWeightSyncScheme(WithScale())}
    policy = Scaled(1.0)
    with Collector(env, policy, frames_per_batch=4, weight_sync_schemes=schemes) as collector:
        collector.update_policy_weights_(Scaled(2.0, scale=3))
        assert actions(collector) == [6.0]
        assert policy.applied == 1


def test_no_sync_calls_none():
    schemes = {"policy": NoWeightSyncScheme(WithScale())}
    with MultiSyncCollector([env], Scaled(1.0), frames_per_batch=4, weight_sync_schemes=schemes) as collector:
        collector.update_policy_weights_(Scaled(2.0, scale=3))
        assert actions(collector) == [1.0]
        assert collector.get_distant_attr("policy.applied") == [0]


class Shift(nn.Module):
    """A postproc with a number that is no tensor."""

    def __init__(self, by=0):
        super().__init__()
        self.by = by

    def forward(self, batch):
        batch["reward_shifted"] = batch["next", "reward"] + self.by
        return batch


class OfShift:
    """Sends the number of a Shift."""

    def extract_weights(self, source):
        return source.by

    def apply_weights(self, destination, weights):
        destination.by = weights


def test_models_elsewhere_have_one_too():
    schemes = {"postproc": SharedMemWeightSyncScheme(OfShift())}
    with MultiSyncCollector(
        [env], Scaled(), frames_per_batch=4, postproc=Shift(), weight_sync_schemes=schemes
    ) as collector:
        collector.update_policy_weights_(Shift(10), model_id="postproc")
        batch = collector.next()
        assert torch.equal(batch["reward_shifted"], batch["next", "reward"] + 10)


@pytest.mark.parametrize("nested", [False, True])
def test_models_of_envs_in_workers_have_one_too(nested):
    from torchrl.envs import GymWrapper, RewardScaling, TransformedEnv

    class OfScaling:
        def extract_weights(self, source):
            return float(source.scale)

        def apply_weights(self, destination, weights):
            destination.scale.fill_(weights)

    def scaled():
        return TransformedEnv(GymWrapper(CountingEnv()), RewardScaling(0.0, 1.0))

    schemes = {"env.transform": SharedMemWeightSyncScheme(OfScaling())}
    kind, options = MultiSyncCollector, {}
    if nested:  # two workers inside each
        kind, options = DistributedCollector, {"collector_class": "sync", "num_workers_per_collector": 2}
    with kind([scaled] * 2, Scaled(), frames_per_batch=8, weight_sync_schemes=schemes, **options) as collector:
        collector.update_policy_weights_(RewardScaling(0.0, 5.0), model_id="env.transform")
        scales = collector.get_distant_attr("env.transform.scale")
        assert [float(one) for scale in scales for one in (scale if nested else [scale])] == [5.0] * (2 + 2 * nested)
        assert collector.explain().count("policy") == 1  # all are run the same way


def test_what_is_no_strategy():
    with pytest.raises(WrongArgument, match="extract_weights and apply_weights; got 3"):
        SharedMemWeightSyncScheme(strategy=3)
    scheme = assigned(SharedMemWeightSyncScheme(), 3)
    with pytest.raises(WrongArgument, match="extract_weights and apply_weights; got 3"):
        MultiSyncCollector([env], Scaled(), frames_per_batch=4, weight_sync_schemes={"policy": scheme})


def weights(value):
    return TensorDict(weight=torch.full((1,), value))


@pytest.mark.parametrize("name", ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"])
@pytest.mark.parametrize("kind", [theirs, None], ids=["TorchRL's scheme", "reap's"])
def test_weights_a_scheme_was_given_are_what_workers_begin_with(kind, name):
    import reap.weight_update

    scheme = getattr(kind or reap.weight_update, name)()
    given = weights(3.0)
    scheme.init_on_sender(model_id="policy", weights=given, devices=[torch.device("cpu")] * 2)
    schemes = {"policy": scheme}
    with MultiSyncCollector([env] * 2, Scaled(1.0), frames_per_batch=8, weight_sync_schemes=schemes) as collector:
        assert actions(collector) == [3.0]
        given["weight"].fill_(4.0)
        collector.update_policy_weights_()
        assert actions(collector) == [4.0]
        collector.update_policy_weights_(Scaled(7.0))
        assert actions(collector) == [7.0]
    scheme = getattr(kind or reap.weight_update, name)()
    scheme.init_on_sender(params_map={0: weights(5.0), 1: weights(6.0)})
    with MultiSyncCollector(
        [env] * 2, policy_factory=Scaled, frames_per_batch=8, weight_sync_schemes={"policy": scheme}
    ) as collector:
        assert collector.next()["action"][:, 0, 0].tolist() == [5.0, 6.0]
