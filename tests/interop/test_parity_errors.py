"""Wrong calls: both libraries raise, and what TorchRL's users catch, they catch with reap too."""

import pytest
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions, nn

from tests.worlds.pairs import LIBRARIES, SpaceEnv, actor, box, env_makers, spaces

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = pytest.mark.parametrize("library", LIBRARIES)


def build(library, env=None, policy=None, **options):
    env = env_makers("counting")[library] if env is None else env
    return LIBRARIES[library].collectors.Collector(env, policy, **{"frames_per_batch": 6, **options})


@BOTH
def test_frames_per_batch_is_needed(library):
    with pytest.raises(TypeError):
        LIBRARIES[library].collectors.Collector(env_makers("counting")[library], actor("counting"))


@BOTH
def test_policy_or_factory(library):
    with pytest.raises(TypeError):
        build(library, policy=actor("counting"), policy_factory=lambda: actor("counting"))


@BOTH
def test_unknown_option(library):
    with pytest.raises(TypeError, match="frames_per_batches"):
        build(library, policy=actor("counting"), frames_per_batches=3)


@BOTH
def test_too_many_positional_arguments(library):
    with pytest.raises(TypeError):
        LIBRARIES[library].collectors.Collector(env_makers("counting")[library], actor("counting"), 6)


@BOTH
@pytest.mark.parametrize("wrong", [3, None, [], ["a", "b"]], ids=str)
def test_no_env(library, wrong):
    with pytest.raises((TypeError, ValueError)):
        LIBRARIES[library].collectors.Collector(wrong, actor("counting"), frames_per_batch=6)


@BOTH
def test_keywords_for_a_finished_env(library):
    with pytest.raises(RuntimeError):
        build(library, env_makers("counting")[library](), actor("counting"), create_env_kwargs={"lane": 1})


@BOTH
def test_two_envs_for_one_collector(library):
    with pytest.raises(ValueError):
        build(library, [env_makers("counting")[library]] * 2, actor("counting"))


@BOTH
def test_step_count_is_taken(library):
    space = spaces.Dict({"observation": box(3), "step_count": box(1)})
    envs = env_makers(lambda lane: SpaceEnv(space, box(1), lane))
    with pytest.raises(ValueError, match="step_count"):
        build(library, envs[library], lambda td: td, max_frames_per_traj=3)


@BOTH
@pytest.mark.parametrize(
    "policy",
    [lambda x: x[..., :1], lambda x, y: x[..., :1], lambda a, b, c: a[..., :1], nn.Linear(2, 1)],
    ids=["one name", "two names", "one too many", "nn.Linear"],
)
def test_policy_that_names_no_observation(library, policy):
    """With several observations nobody can guess what it reads."""
    with pytest.raises(TypeError):
        build(library, env_makers("dict")[library], policy)


@BOTH
def test_keys_without_being_a_module(library):
    class Almost:
        in_keys, out_keys = ["observation"], ["action"]

        def __call__(self, observation):
            return observation[..., :1]

    with pytest.raises(RuntimeError):
        build(library, policy=Almost())


@BOTH
def test_split_needs_ids(library):
    with pytest.raises(ValueError):
        build(library, policy=actor("counting"), split_trajs=True, track_traj_ids=False)


@BOTH
def test_unknown_exploration_type(library):
    with pytest.raises(ValueError):
        next(iter(build(library, policy=actor("counting"), exploration_type="sometimes")))


@BOTH
@pytest.mark.parametrize("options", [{"backend": "carrier pigeon"}, {"sync": True}], ids=str)
def test_front_door(library, options):
    with pytest.raises(ValueError):
        build(library, policy=actor("counting"), **options)


@BOTH
def test_median_of_a_normal(library):
    read = TensorDictModule(
        lambda o: (o[..., :1], o[..., :1].exp()), in_keys=["observation"], out_keys=["loc", "scale"]
    )
    draw = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=distributions.Normal)
    policy = ProbabilisticTensorDictSequential(read, draw)
    with pytest.raises(RuntimeError, match="median is not implemented"):
        next(iter(build(library, policy=policy, exploration_type="median")))


@BOTH
def test_no_weights_to_update(library):
    collector = build(library, policy=lambda observation: observation[..., :1])
    with pytest.raises(RuntimeError):
        collector.update_policy_weights_()


@BOTH
def test_weights_given_twice(library):
    policy = actor("counting")
    collector = build(library, policy=policy)
    with pytest.raises(ValueError):
        collector.update_policy_weights_(policy, weights=policy)


class Broken(SpaceEnv):
    def step(self, action):
        raise ZeroDivisionError("mine")


@BOTH
@pytest.mark.parametrize("lanes", [None, 2])
def test_an_error_of_the_env_reaches_the_caller(library, lanes):
    """TorchRL raises it as it is, reap as the cause of its own."""
    envs = env_makers(lambda lane: Broken(box(3), box(2), lane), lanes)
    collector = build(library, envs[library], actor("vector"))
    with pytest.raises(Exception) as caught:
        next(iter(collector))
    assert ZeroDivisionError in (type(caught.value), type(caught.value.__cause__))
