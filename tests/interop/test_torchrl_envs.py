"""The door for TorchRL's envs: which way each takes, resets, seeds, state, processes, and what goes wrong."""

import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import reap.envs
from reap.collectors import Collector, MultiSyncCollector
from reap.envs.torchrl.captured import CapturedRows
from reap.envs.torchrl.frames import TorchRLFrames
from reap.envs.torchrl.lanes import WrappedGym
from reap.envs.torchrl.rows import TorchRLRows
from reap.errors import SpecMismatch, UsageError, WorkerRaised
from reap.testing import CountingEnv, no_leaks
from tests.worlds.pairs import LIBRARIES, assert_identical
from tests.worlds.scenarios import ENVS, policy_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import Unbounded
    from torchrl.envs import (
        EnvCreator,
        GymEnv,
        GymWrapper,
        InitTracker,
        ParallelEnv,
        RewardSum,
        SerialEnv,
        StepCounter,
        TensorDictPrimer,
        TransformedEnv,
        VecNorm,
    )
    from torchrl.testing import mocking_classes as mocks

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_graph_of_whole_steps_is_refused():
    with pytest.raises(UsageError, match="this env gives the policy whole TensorDicts instead of columns"):
        Collector(ENVS["text"](), policy_for("text"), frames_per_batch=4, cudagraph_policy=True)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("gym", WrappedGym),
        ("gym lanes", WrappedGym),
        ("CartPole", WrappedGym),
        ("gym with counters", CapturedRows),
        ("lanes", TorchRLRows),
        ("groups", TorchRLRows),
        ("matrix of lanes", TorchRLRows),
        ("text", TorchRLFrames),
        ("ragged", TorchRLFrames),
        ("heterogeneous", TorchRLFrames),
    ],
)
def test_which_way_an_env_takes(kind, way):
    with Collector(ENVS[kind], None, frames_per_batch=4) as collector:
        assert type(collector._backend.worker.env) is way


def test_lanes_that_are_encoded_differently_are_not_joined():
    makers = [lambda c=c: GymEnv("CartPole-v1", categorical_action_encoding=c) for c in (True, False)]
    with pytest.raises(SpecMismatch, match="lanes are encoded differently"):
        reap.envs.SerialEnv(2, makers)


class Subclass(GymWrapper):
    """Somebody's own wrapper: what it does in `_step` must happen."""

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return out.set("reward", out.get("reward") + 100)


def test_gym_envs_that_are_not_bare_are_stepped_by_torchrl():
    with Collector(Subclass(CountingEnv()), None, frames_per_batch=4) as collector:
        assert type(collector._backend.worker.env) is TorchRLRows
        assert bool((collector.next()["next", "reward"] >= 100).all())


@pytest.mark.parametrize("options", [{}, {"frame_skip": 2}, {"categorical_action_encoding": True}], ids=str)
def test_bare_gym_envs_deliver_what_torchrl_delivers(options):
    found = {}
    for name, library in LIBRARIES.items():
        env = GymEnv("CartPole-v1", **options)
        env.set_seed(3)
        hot = not options.get("categorical_action_encoding")

        def act(observation, hot=hot):
            index = (observation[..., 2] > 0).long()
            return nn.functional.one_hot(index, 2) if hot else index

        policy = TensorDictModule(act, ["observation"], ["action"])
        collector = library.collectors.Collector(env, policy, frames_per_batch=60, total_frames=120)
        found[name] = [batch.clone() for batch in collector]
        collector.shutdown()
    for ours, theirs in zip(found["reap"], found["torchrl"], strict=True):
        assert_identical(ours, theirs)


def test_lanes_in_torchrls_processes():
    """TorchRL's own ParallelEnv, partial resets and all; nothing is left behind."""
    lanes = [EnvCreator(lambda n=n: mocks.CountingEnv(max_steps=n)) for n in (2, 3)]
    found = {}
    for name, library in LIBRARIES.items():
        env = ParallelEnv(2, lanes, mp_start_method="fork")
        policy = policy_for("lanes")
        collector = library.collectors.Collector(env, policy, frames_per_batch=24, total_frames=48)
        found[name] = [batch.clone() for batch in collector]
        collector.shutdown()
    for ours, theirs in zip(found["reap"], found["torchrl"], strict=True):
        assert_identical(ours, theirs)


@pytest.mark.parametrize("source", ["env", "factory", "creator", "class"])
def test_every_form_of_env(source):
    made = {
        "env": lambda: mocks.CountingEnv(max_steps=3),
        "factory": lambda: lambda: mocks.CountingEnv(max_steps=3),
        "creator": lambda: EnvCreator(lambda: mocks.CountingEnv(max_steps=3)),
        "class": lambda: mocks.CountingEnv,
    }[source]()
    with Collector(made, None, frames_per_batch=4) as collector:
        assert collector.next().numel() == 4


def test_keywords():
    with Collector(mocks.CountingEnv, None, frames_per_batch=4, create_env_kwargs={"max_steps": 1}) as collector:
        assert collector.env.max_steps == 1
    with pytest.raises(RuntimeError, match="create_env_kwargs"):
        Collector(mocks.CountingEnv(), None, frames_per_batch=4, create_env_kwargs={"max_steps": 1})


def ones():
    return TensorDictModule(lambda o: torch.ones_like(o, dtype=torch.int8), ["observation"], ["action"])


def test_single_lanes_can_be_reset():
    with Collector(ENVS["counters over lanes"], ones(), frames_per_batch=2) as collector:
        collector.next()
        collector.reset([1])
        batch = collector.next()
        assert batch["observation"][:, 0, 0].tolist() == [1, 0]
        assert batch["is_init"][:, 0, 0].tolist() == [False, True]
        assert batch["collector", "traj_ids"][:, 0].tolist() == [0, 2]


@pytest.mark.parametrize("kind", ["CartPole", "CartPole with counters"])
def test_seeds(kind):
    """Twice the same seed is twice the same data; the chain is TorchRL's."""
    batches = []
    with Collector(ENVS[kind], None, frames_per_batch=30) as collector:
        for _ in range(2):
            assert collector.set_seed(1) == 4087425277
            batches.append(collector.next())
        assert collector.set_seed(1, static_seed=True) == 1
    assert_identical(batches[0].exclude("collector"), batches[1].exclude("collector"))


def test_state_of_transforms_travels():
    def env():
        return TransformedEnv(GymWrapper(CountingEnv()), VecNorm(in_keys=["observation"]))

    with Collector(env, None, frames_per_batch=20) as first, Collector(env, None, frames_per_batch=20) as second:
        first.next()
        state = first.state_dict()
        second.load_state_dict(state)
        seen = [one["env_state_dict"]["_extra_state"]["observation_count"] for one in (state, second.state_dict())]
    assert seen[0] > 20  # twenty steps and some resets, each forgotten a little
    assert seen[1] == seen[0]  # loaded, and no reset follows: the episode goes on


def test_interrupted_rollouts_do_not_reset_twice():
    class Stop:
        calls = 0

        def collection_stopped(self):
            self.calls += 1
            return self.calls % 3 == 0

    env = TransformedEnv(mocks.CountingEnv(max_steps=2), RewardSum())
    with Collector(env, ones(), frames_per_batch=10, interruptor=Stop()) as collector:
        first, second = collector.next(), collector.next()
    assert first["collector", "mask"].sum() == 3
    assert first["observation"][:3, 0].tolist() == [0, 1, 2]
    assert second["observation"][0, 0] == 0  # the third step ended the episode


def test_reset_when_done_needs_lanes_that_can_rest():
    with pytest.raises(UsageError, match="steps all its lanes at once"):
        Collector(ENVS["lanes"], None, frames_per_batch=4, reset_when_done=False)


def test_an_env_that_raises():
    with (
        no_leaks(),
        Collector(mocks.EnvThatErrorsAfter10Iters, None, frames_per_batch=20) as collector,
        pytest.raises(WorkerRaised, match=r"env\.step raised"),
    ):
        collector.next()


def test_a_clash_of_step_counts():
    with pytest.raises(ValueError, match="step_count"):
        Collector(ENVS["counters"], None, frames_per_batch=4, max_frames_per_traj=3)


def test_set_truncated_needs_the_flag():
    for kind in ("counting", "text"):
        with (
            Collector(ENVS[kind], None, frames_per_batch=4, set_truncated=True) as collector,
            pytest.raises(RuntimeError, match="set_truncated"),
        ):
            collector.next()


def test_frames_refuse_what_they_cannot_do():
    with pytest.raises(UsageError, match="compact_obs"):
        Collector(ENVS["text"], None, frames_per_batch=4, compact_obs=True)
    with pytest.raises(UsageError, match="return_same_td"):
        Collector(ENVS["text"], None, frames_per_batch=4, return_same_td=True)
    with pytest.raises(UsageError, match="does not write the env's action"):
        Collector(ENVS["text"], TensorDictModule(lambda o: o, ["observation"], ["other"]), frames_per_batch=4)


@pytest.mark.parametrize("layout", ["cat", "padded"])
@pytest.mark.parametrize("kind", ["matrix of lanes", "groups over lanes", "agents", "text"])
def test_whole_episodes_of_any_shape(kind, layout):
    limit = None if kind == "agents" else 3
    options = {"trajs_per_batch": 3, "traj_format": layout, "max_frames_per_traj": limit}
    with Collector(ENVS[kind], None, frames_per_batch=48, **options) as collector:
        batch = collector.next()
    ids = batch["collector", "traj_ids"]
    if layout == "cat":
        assert len(ids.unique_consecutive()) == 3
    else:
        assert batch.batch_size[0] == 3
        assert bool((ids == ids[:, :1])[batch["collector", "mask"]].all())


def test_what_differs_in_shape_cannot_be_padded():
    options = {"trajs_per_batch": 1, "traj_format": "padded", "max_frames_per_traj": 3}
    with (
        Collector(ENVS["heterogeneous"], None, frames_per_batch=12, **options) as collector,
        pytest.raises(UsageError, match="one shape per key"),
    ):
        collector.next()


def test_plain_functions_act_on_frames():
    def act(observation):
        return torch.ones_like(observation, dtype=torch.int8)

    with Collector(ENVS["text"], act, frames_per_batch=4) as collector:
        batch = collector.next()
    assert batch["observation"][:, 0].tolist() == [0, 1, 2, 3]
    assert batch.get("string").tolist() == ["at 0", "at 1", "at 2", "at 3"]


def test_many_gym_envs_in_workers_leave_nothing_behind():
    with no_leaks():
        made = [lambda: TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), StepCounter(7))] * 2
        collector = MultiSyncCollector(made, None, frames_per_batch=40, total_frames=80)
        shapes = [batch.batch_size for batch in collector]
        collector.shutdown()
        del collector
    assert shapes == [(2, 2, 10)] * 2


def test_reaps_lanes_of_torchrls_gym_envs():
    """reap.envs.SerialEnv joins what TorchRL's GymEnvs hold."""
    env = reap.envs.SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    with Collector(env, None, frames_per_batch=10) as collector:
        assert collector.next().batch_size == (2, 5)


def test_paths_lead_into_torchrls_env():
    env = TransformedEnv(mocks.CountingEnv(max_steps=3), InitTracker())
    with Collector(env, None, frames_per_batch=4) as collector:
        assert collector.getattr_env("max_steps") == 3
        assert type(collector.get_distant_attr("env.transform")).__name__ in ("Compose", "InitTracker")
        with pytest.raises(AttributeError):
            collector.getattr_env("nothing_of_that_name")


def test_primers_find_the_shapes_they_find_with_torchrl():
    """Asked for its spec first, a primer that names all its dimensions takes them as they are; after a reset it doubles
    those of the lanes."""
    env = TransformedEnv(
        SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        TensorDictPrimer({"memory": Unbounded((2, 4))}, default_value=0.0, expand_specs=False),
    )
    collector = Collector(env, None, frames_per_batch=6)
    assert collector.next()["memory"].shape == (2, 3, 4)
    collector.shutdown()
