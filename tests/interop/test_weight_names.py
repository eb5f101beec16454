"""Weight updaters, schemes, versions and models by path, as TorchRL's scripts name them."""

import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from reap.collectors import (
    Collector,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    PolicyVersion,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from reap.envs import GymEnv
from reap.errors import UsageError, WrongState
from reap.testing import CountingEnv
from reap.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    import torchrl.weight_update as their_schemes
    from torchrl.envs import GymWrapper, ObservationNorm, TransformedEnv
    from torchrl.envs.llm.transforms import PolicyVersion as TheirVersion

pytestmark = pytest.mark.filterwarnings("ignore")


class Constant(nn.Module):
    """The action is the weight."""

    def __init__(self, value=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value))

    def forward(self, observation):
        return self.weight.expand(*observation.shape[:-1], 1)


def env():
    return GymEnv(CountingEnv())


def normed():
    return TransformedEnv(GymWrapper(CountingEnv()), ObservationNorm(0.0, 1.0, in_keys=["observation"]))


class Doubled(WeightUpdaterBase):
    """Weights that are turned on the way, and workers that are left out."""

    def _maybe_map_weights(self, server_weights):
        return {name: 2 * value for name, value in server_weights.items()}

    def _skip_update(self, worker_id):
        return worker_id == 1


def test_vanilla_updater():
    source = Constant(3.0)
    updater = VanillaWeightUpdater(weight_getter=lambda: source)
    called = []
    updater.register_post_hook(lambda: called.append(1))
    with pytest.warns(DeprecationWarning, match="weight_updater"):
        collector = Collector(env, Constant(), frames_per_batch=4, weight_updater=updater)
    assert updater.collector is collector
    collector.update_policy_weights_()
    assert collector.next()["action"].unique().tolist() == [3.0]
    assert (called, collector.policy_version) == ([1], 1)
    collector.update_policy_weights_(TensorDict(weight=torch.full((1,), 5.0)))
    assert collector.next()["action"].unique().tolist() == [5.0]
    collector.shutdown()


def test_updaters_of_workers():
    """A subclass turns weights and leaves a worker out; a factory makes the updater."""
    collector = MultiSyncCollector([env] * 2, Constant(), frames_per_batch=8, weight_updater=Doubled)
    collector.update_policy_weights_(Constant(4.0).state_dict())
    assert collector.next()["action"][:, 0, 0].tolist() == [8.0, 0.0]
    collector.shutdown()
    source = Constant(6.0)
    updater = MultiProcessedWeightUpdater(get_server_weights=lambda: source)
    collector = MultiSyncCollector([env] * 2, Constant(), frames_per_batch=8, weight_updater=updater)
    collector.update_policy_weights_()
    assert collector.next()["action"].unique().tolist() == [6.0]
    collector.shutdown()


def test_what_is_no_updater():
    with pytest.raises(TypeError, match="push_weights"):
        Collector(env, Constant(), frames_per_batch=4, weight_updater=3)
    with pytest.raises(WrongState, match="no collector"):
        VanillaWeightUpdater().push_weights()


@pytest.mark.parametrize("kind", [PolicyVersion, TheirVersion])
def test_a_version_object_counts_with_the_collector(kind):
    version = kind()
    collector = Collector(env, Constant(), frames_per_batch=4, track_policy_version=version)
    first = collector.next()["policy_version"].unique().tolist()
    collector.update_policy_weights_()
    assert (first, collector.next()["policy_version"].unique().tolist()) == ([0], [1])
    assert version.version == 1
    collector.shutdown()


@pytest.mark.parametrize("workers", [False, True])
def test_a_version_object_counts_nothing_if_nothing_is_sent(workers):
    version = PolicyVersion()
    options = {"weight_sync_schemes": {"policy": NoWeightSyncScheme()}, "track_policy_version": version}
    kind, makers = (MultiSyncCollector, [env, env]) if workers else (Collector, env)
    with kind(makers, Constant(), frames_per_batch=4, **options) as collector:
        collector.update_policy_weights_()
        assert (collector.policy_version, version.version) == (0, 0)


def test_versions_are_whole_numbers():
    with pytest.raises(UsageError, match="version_type must be int"):
        PolicyVersion("uuid")


def norm_state(loc):
    return ObservationNorm(loc, 1.0, in_keys=["observation"]).state_dict()


@pytest.mark.parametrize("form", ["state dict", "TensorDict", "module"])
def test_models_by_path(form):
    """A transform of the env gets new weights, by the path it has in TorchRL."""
    collector = Collector(normed, Constant(), frames_per_batch=4)
    before = collector.next()["observation"]
    module = ObservationNorm(10.0, 1.0, in_keys=["observation"])
    weights = {"state dict": module.state_dict(), "TensorDict": TensorDict(module.state_dict()), "module": module}[form]
    collector.update_policy_weights_(weights_dict={"policy": Constant(2.0), "env.transform": weights})
    collector.reset()
    batch = collector.next()
    assert batch["observation"][0, 0] == before[0, 0] + 10
    assert batch["action"].unique().tolist() == [2.0]
    assert collector.get_distant_attr("env.transform.loc").item() == 10
    collector.shutdown()


def test_models_by_path_in_workers():
    collector = MultiSyncCollector([normed] * 2, Constant(), frames_per_batch=8)
    collector.update_policy_weights_(norm_state(10.0), model_id="env.transform")
    assert [float(loc) for loc in collector.get_distant_attr("env.transform.loc")] == [10.0, 10.0]
    with pytest.raises(KeyError, match="this collector has no model"):
        collector.update_policy_weights_(norm_state(10.0), model_id="env.nothing")
    assert collector.next().batch_size == (2, 4)
    collector.shutdown()


def test_schemes_by_backend():
    for name, kind in [
        ("none", NoWeightSyncScheme),
        ("direct", NoWeightSyncScheme),
        ("shared", SharedMemWeightSyncScheme),
        ("thread", SharedMemWeightSyncScheme),
        ("process", MultiProcessWeightSyncScheme),
        ("multiprocessing", MultiProcessWeightSyncScheme),
    ]:
        scheme = WeightSyncScheme.from_backend(name, strategy="state_dict")
        assert type(scheme) is kind
        assert scheme.strategy.extract_as == "state_dict"
    with pytest.raises(UsageError, match="no weight scheme for backend 'carrier pigeon'"):
        WeightSyncScheme.from_backend("carrier pigeon")


@pytest.mark.parametrize(
    ("name", "strategy", "after"),
    [
        ("SharedMemWeightSyncScheme", "tensordict", 3.0),
        ("MultiProcessWeightSyncScheme", "state_dict", 3.0),
        ("NoWeightSyncScheme", "tensordict", 0.0),
    ],
)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_torchrls_own_schemes_are_taken(kind, name, strategy, after):
    scheme = getattr(their_schemes, name)(strategy)
    policy = Constant()
    collector = kind([env], policy, frames_per_batch=4, weight_sync_schemes={"policy": scheme})
    collector.update_policy_weights_(Constant(3.0))
    assert collector.next()["action"].unique().tolist() == [after]
    collector.shutdown()


def test_a_subclass_of_a_scheme_is_not_taken_for_the_scheme():
    class Louder(their_schemes.SharedMemWeightSyncScheme):
        """What it overrides would never be called."""

    with pytest.raises(TypeError, match="weight_sync_schemes"):
        MultiSyncCollector([env], Constant(), frames_per_batch=4, weight_sync_schemes={"policy": Louder()})


@pytest.mark.parametrize("flag", [None, True, False])
def test_recurrent_state_is_carried_whatever_auto_register_says(flag):
    collector = Collector(env, Constant(), frames_per_batch=4, auto_register_policy_transforms=flag)
    assert collector.next().numel() == 4
    collector.shutdown()
