"""Every kind of env, one and several lanes: the batches of both libraries are identical."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from reap.testing import CountingEnv
from tests.worlds.pairs import (
    DISCRETE,
    KINDS,
    LIBRARIES,
    SpaceEnv,
    actor,
    assert_identical,
    assert_identical_tensors,
    assert_same_batches,
    box,
    collectors,
    env_makers,
    make,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_env(kind, lanes):
    made = collectors(env_makers(kind, lanes), lambda: actor(kind), frames_per_batch=12, total_frames=24)
    assert_same_batches(made, None)


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("kind", DISCRETE)
def test_categorical_encoding(kind, lanes):
    envs = env_makers(kind, lanes, categorical_action_encoding=True)
    made = collectors(envs, lambda: actor(kind, categorical=True), frames_per_batch=12, total_frames=24)
    assert_same_batches(made, None)


@pytest.mark.parametrize("kind", ["counting", "CartPole-v1", "nested dict"])
def test_a_single_lane_keeps_its_dimension(kind):
    made = collectors(env_makers(kind, 1), lambda: actor(kind), frames_per_batch=12)
    assert assert_same_batches(made)[0].batch_size == (1, 12)


def test_long_run():
    """Many episodes of a real env, over many batches."""
    made = collectors(
        env_makers("CartPole-v1", 4), lambda: actor("CartPole-v1"), frames_per_batch=100, total_frames=600
    )
    got = assert_same_batches(made, None)
    assert sum(b["next", "done"].sum().item() for b in got) > 10


@pytest.mark.parametrize("lanes", [None, 2])
def test_resets_at_construction_and_later(lanes):
    """One reset of each env when the collector is made; after that the same ones at the same time."""
    story = {}
    for name, library in LIBRARIES.items():
        calls = story[name] = []

        class Spy(CountingEnv):
            def reset(self, calls=calls, **kwargs):
                calls.append((self.lane, "reset", kwargs))
                return super().reset(**kwargs)

            def step(self, action, calls=calls):
                calls.append((self.lane, "step"))
                return super().step(action)

        envs = env_makers(lambda lane, spy=Spy: spy(lane=lane, lengths=(2, 1 + lane)), lanes)
        collector = library.collectors.Collector(envs[name], actor("counting"), frames_per_batch=12)
        assert calls == [(lane, "reset", {}) for lane in range(lanes or 1)]
        next(iter(collector))
    assert story["reap"] == story["torchrl"]


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(4),
        box(2),
        box(2, dtype=np.float64),
        spaces.MultiBinary(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([3, 3]),
    ],
    ids=str,
)
def test_what_an_env_receives(action_space, lanes):
    """The same numbers in the same shape and dtype."""
    received = {}
    for name, library in LIBRARIES.items():
        made = []

        def env(lane, made=made):
            made.append(SpaceEnv(box(3), action_space, lane))
            return made[-1]

        policy = actor(lambda _: SpaceEnv(box(3), action_space))
        collector = library.collectors.Collector(env_makers(env, lanes)[name], policy, frames_per_batch=12)
        next(iter(collector))
        received[name] = [[(a.dtype, a.shape, a.tolist()) for a in one.received] for one in made if one.received]
    assert len(received["reap"]) == (lanes or 1)
    assert received["reap"] == received["torchrl"]


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("skip", [1, 2, 3])
def test_frame_skip(skip, lanes):
    made = collectors(env_makers("counting", lanes, frame_skip=skip), lambda: actor("counting"), frames_per_batch=12)
    assert_same_batches(made)


class Careless(CountingEnv):
    """Returns what many envs return: other types than their spaces promise."""

    def __init__(self, lane, observation=lambda o: o, reward=lambda r: r):
        super().__init__(lane=lane)
        self.observation, self.reward = observation, reward

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return self.observation(observation), info

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return self.observation(observation), self.reward(reward), np.bool_(terminated), np.bool_(truncated), info


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize(
    "convert",
    [lambda o: o.astype(np.float64), lambda o: o.astype(np.int64), lambda o: o.tolist(), lambda o: tuple(o.tolist())],
    ids=["float64", "int64", "list", "tuple"],
)
def test_careless_observations(convert, lanes):
    envs = env_makers(lambda lane: Careless(lane, observation=convert), lanes)
    assert_same_batches(collectors(envs, lambda: actor("counting"), frames_per_batch=12))


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize(
    "convert",
    [
        int,
        np.float64,
        np.array,
        torch.tensor,
        pytest.param(
            lambda r: np.array([r]),
        ),
    ],
    ids=["int", "float64", "array []", "tensor", "array [1]"],
)
def test_careless_rewards(convert, lanes):
    envs = env_makers(lambda lane: Careless(lane, reward=convert), lanes)
    assert_same_batches(collectors(envs, lambda: actor("counting"), frames_per_batch=12))


@pytest.mark.parametrize("lanes", [None, 2])
def test_terminated_and_truncated_at_once(lanes):
    envs = env_makers(lambda lane: gym.wrappers.TimeLimit(CountingEnv(lengths=(4,), lane=lane), 4), lanes)
    got = assert_same_batches(collectors(envs, lambda: actor("counting"), frames_per_batch=24))
    assert bool((got[0]["next", "terminated"] & got[0]["next", "truncated"]).any())


@pytest.mark.parametrize("lanes", [None, 2])
def test_numbers_that_are_not_finite(lanes):
    class Odd(CountingEnv):
        def _observation(self):
            return np.array([np.nan, -0.0, np.inf if self.t % 2 else -np.inf], np.float32)

    envs = env_makers(lambda lane: Odd(lane=lane), lanes)
    assert_same_batches(collectors(envs, lambda: lambda observation: observation[..., 1:2], frames_per_batch=12))


@pytest.mark.parametrize(
    "options",
    [{"create_env_kwargs": {"lane": 5}}, {"create_env_kwargs": [{"lane": 0}, {"lane": 7, "lengths": (2,)}]}, {}],
    ids=["kwargs", "kwargs for each", "none"],
)
def test_lanes_of_one_factory(options):
    envs = {
        name: lambda lib=lib: lib.envs.SerialEnv(2, lambda **kw: lib.envs.GymWrapper(CountingEnv(**kw)), **options)
        for name, lib in LIBRARIES.items()
    }
    assert_same_batches(collectors(envs, lambda: actor("counting"), frames_per_batch=12))


@pytest.mark.parametrize("options", [{}, {"categorical_action_encoding": True}, {"frame_skip": 3}], ids=str)
def test_env_by_id(options):
    envs = {name: lib.envs.GymEnv("CartPole-v1", **options) for name, lib in LIBRARIES.items()}
    for raw in (envs["torchrl"]._env, envs["reap"].lanes_env.envs[0]):
        raw.reset(seed=9)
    policy = actor("CartPole-v1", options.get("categorical_action_encoding", False))
    assert_same_batches(collectors(envs, lambda: policy, frames_per_batch=30))


# ---- by hand --------------------------------------------------------------------------------------------------------

#: env, encoding of discrete spaces, lanes
BY_HAND = [
    ("counting", False, None),
    ("counting", False, 2),
    ("nested dict", False, None),
    ("nested dict", False, 2),
    ("multi-discrete", True, None),
    ("pixels", True, 2),
    ("discrete", True, 2),
    ("discrete", True, None),
]


@pytest.mark.parametrize(("kind", "categorical", "lanes"), BY_HAND)
def test_reset_and_step_by_hand(kind, categorical, lanes):
    envs = {k: e() for k, e in env_makers(kind, lanes, categorical_action_encoding=categorical).items()}
    policy = actor(kind, categorical)
    got, want = envs["reap"].reset(), envs["torchrl"].reset()
    for _ in range(4):
        assert_identical(got, want)
        with torch.no_grad():
            got, want = envs["reap"].step(policy(got)), envs["torchrl"].step(policy(want))
        assert_identical(got, want)
        got, want = got["next"].exclude("reward"), want["next"].exclude("reward")
        if bool(want["done"].any()):
            break


@pytest.mark.parametrize(("kind", "categorical", "lanes"), BY_HAND)
@pytest.mark.parametrize("stop", [True, False], ids=["until done", "for 9 steps"])
def test_rollout_by_hand(kind, categorical, lanes, stop):
    envs = env_makers(kind, lanes, categorical_action_encoding=categorical)
    with torch.no_grad():
        got, want = (
            envs[name]().rollout(9, actor(kind, categorical), break_when_any_done=stop) for name in ("reap", "torchrl")
        )
    assert_identical(got, want)


def test_lanes_by_hand_have_the_batch_size_of_torchrl():
    for kind in ("counting", "nested dict"):
        for lanes in (None, 2):
            envs = env_makers(kind, lanes)
            assert envs["reap"]().batch_size == envs["torchrl"]().batch_size


# ---- images and tuples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (4, 4), np.uint8),
        spaces.Dict({"pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8)}),
        spaces.Dict({"camera": spaces.Box(0, 255, (4, 4, 1), np.uint8)}),
        spaces.Box(0.0, 1.0, (4, 4, 3), np.float32),
        pytest.param(
            spaces.Box(0, 255, (4, 4, 1), np.uint8),
        ),
        pytest.param(
            spaces.Box(0, 255, (4, 5, 5), np.uint8),
        ),
        pytest.param(
            spaces.Box(0, 128, (4, 4, 3), np.uint8),
        ),
        pytest.param(
            spaces.Box(0.0, 255.0, (4, 4, 3), np.float32),
        ),
    ],
    ids=str,
)
def test_names_of_images(space):
    def env(lane):
        return SpaceEnv(space, box(1), lane)

    assert_same_batches(collectors(env_makers(env, 2), lambda: actor(env), frames_per_batch=12))


@pytest.mark.parametrize("categorical", [False, True])
def test_tuple_of_discrete(categorical):
    def env(lane):
        return SpaceEnv(spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3))), box(1), lane)

    envs = env_makers(env, 2, categorical_action_encoding=categorical)
    assert_same_batches(collectors(envs, lambda: actor(env, categorical), frames_per_batch=12))


def test_factories_make_equal_envs():
    """The ground this suite stands on: two envs made alike behave alike."""
    for kind in KINDS:
        one, two = make(kind, 1), make(kind, 1)
        for _ in range(3):
            assert_identical_observations(one.reset()[0], two.reset()[0])


def assert_identical_observations(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_identical_observations(a[key], b[key])
    else:
        assert np.array_equal(a, b)


class Diary(CountingEnv):
    """Counts, and tells what it counted in words, or in as many pairs."""

    def __init__(self, extra, space):
        super().__init__((3, 2))
        self.extra = extra
        self.observation_space = spaces.Dict(observation=CountingEnv.observation_space, extra=space)

    def _observation(self):
        words, pairs = f"step {self.t}", np.full((self.t, 2), self.t, np.float32)
        return {"observation": super()._observation(), "extra": words if self.extra == "text" else pairs}


def diaries(extra, space):
    """One batch of each library, made by the same actions."""
    batches = []
    for library in LIBRARIES.values():
        env = library.envs.GymWrapper(Diary(extra, space))
        batches.append(next(iter(library.collectors.Collector(env, None, frames_per_batch=7, total_frames=7))))
    return batches


def test_text():
    theirs, ours = diaries("text", spaces.Text(20))
    for key in ("extra", ("next", "extra")):
        assert type(ours.get(key)) is type(theirs.get(key))
        assert ours.get(key).batch_size == theirs.get(key).batch_size
        assert ours.get(key).tolist() == theirs.get(key).tolist()
        assert ours[key] == theirs[key]
        assert ours[2][key] == theirs[2][key]
        assert type(ours[2].get(key)) is type(theirs[2].get(key))


def test_sequences():
    pair = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    theirs, ours = diaries("pairs", spaces.Sequence(pair, stack=True))
    assert type(ours) is type(theirs)
    assert (ours.batch_size, ours.names, ours.stack_dim) == (theirs.batch_size, theirs.names, theirs.stack_dim)
    for key in ("extra", ("next", "extra")):
        for mine, other in zip(ours.get(key, as_list=True), theirs.get(key, as_list=True), strict=True):
            assert_identical_tensors(mine, other)


@pytest.mark.parametrize("options", [{}, {"pixels_only": True}, {"pixels_only": False}])
def test_pixels(options, monkeypatch):
    """The same columns by default, and the same pictures."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    seen = []
    for name, library in LIBRARIES.items():
        env = library.envs.GymEnv("CartPole-v1", from_pixels=True, **options)
        env.set_seed(3)
        if name == "reap":  # TorchRL's has made the seeded reset already, and shows the one after it
            env.reset()
        seen.append(env.reset())
        env.close()
    theirs, ours = seen
    assert sorted(ours.keys()) == sorted(theirs.keys())
    assert torch.equal(ours["pixels"], theirs["pixels"])
