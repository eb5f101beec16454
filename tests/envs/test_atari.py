"""Atari's games: a screen that nobody looks at is not drawn, and nothing else is different."""

from __future__ import annotations

import cProfile
import pstats

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from reap.collectors import Collector
from reap.envs.adapters.atari import UNDRAWN, undrawn_step
from reap.envs.adapters.gymnasium_checks import unchecked_step

ale_py = pytest.importorskip("ale_py")
pytestmark = pytest.mark.filterwarnings("ignore")


def game(*wrappers, **kwargs):
    gym.register_envs(ale_py)
    env = gym.make("PongNoFrameskip-v4", **kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    env.reset(seed=3)
    for _ in range(2):  # the checker looks at these
        env.step(0)
    return env


def stepped(env):
    step = unchecked_step(env)
    assert step is not None
    return step


@pytest.mark.parametrize("limit", [None, 30])
def test_all_but_the_screen_is_the_same(limit):
    kwargs = {} if limit is None else {"max_episode_steps": limit}
    env, other = game(**kwargs), game(**kwargs)
    step, seen = undrawn_step(env, stepped(env)), stepped(env)
    for n in range(40):
        blind = n % 4 != 3
        mine, theirs = (step if blind else seen)(n % 6), other.step(n % 6)
        assert (mine[0] is UNDRAWN) == blind
        assert blind or np.array_equal(mine[0], theirs[0])
        assert mine[1:] == theirs[1:]
        assert "_get_obs" not in vars(env.unwrapped)
    assert np.array_equal(env.unwrapped._get_obs(), other.unwrapped._get_obs())


class Looks(gym.Wrapper):
    """A user's, which looks at every screen."""


class OfTheUser(ale_py.AtariEnv):
    """A game of the user's own."""


def of_the_user():
    env = OfTheUser("pong", obs_type="rgb")
    env.reset(seed=0)
    return env


@pytest.mark.parametrize(
    "make",
    [
        lambda: game(Looks),
        lambda: game(gym.wrappers.GrayscaleObservation),
        of_the_user,
        lambda: gym.make("CartPole-v1"),
    ],
    ids=["a wrapper", "another wrapper", "a subclass", "no game"],
)
def test_what_somebody_could_look_at_is_drawn(make):
    env = make()
    assert undrawn_step(env, env.step) == env.step


def test_a_screen_of_the_users_is_asked_for(monkeypatch):
    env = game()
    step = undrawn_step(env, stepped(env))
    assert step(0)[0] is UNDRAWN
    mine = np.zeros(3)
    env.unwrapped._get_obs = lambda: mine
    assert step(0)[0] is mine
    assert env.unwrapped._get_obs() is mine
    del env.unwrapped._get_obs
    monkeypatch.setattr(type(env.unwrapped), "_get_obs", lambda self: mine)
    plain = stepped(env)
    assert undrawn_step(env, plain) is plain
    monkeypatch.delattr(type(env.unwrapped), "_get_obs")  # a version that has none
    assert undrawn_step(env, plain) is plain


def test_a_step_that_raises_leaves_the_game_as_it_was():
    env = game()
    step = undrawn_step(env, stepped(env))
    with pytest.raises(IndexError):
        step(99)
    assert "_get_obs" not in vars(env.unwrapped)
    assert stepped(env)(0)[0].shape == (210, 160, 3)


class Zeros(torch.nn.Module):
    def forward(self, pixels):
        return pixels.new_zeros(pixels.shape[:-3], dtype=torch.int64)


def test_of_four_frames_with_one_action_one_is_drawn():
    pytest.importorskip("torchrl")
    from torchrl.envs import FrameSkipTransform, GymEnv, SerialEnv, TransformedEnv

    def one():
        gym.register_envs(ale_py)
        base = GymEnv("PongNoFrameskip-v4", from_pixels=True, pixels_only=False, categorical_action_encoding=True)
        return TransformedEnv(base, FrameSkipTransform(4))

    policy = TensorDictModule(Zeros(), ["pixels"], ["action"])
    collector = Collector(SerialEnv(2, one), policy, frames_per_batch=12)
    batches = iter(collector)
    for _ in range(2):  # TorchRL makes the first step; checks are left out from the second rollout on
        next(batches)
    profile = cProfile.Profile()
    batch = profile.runcall(next, batches)
    calls = {name: total for (_, _, name), (_, total, *_) in pstats.Stats(profile).stats.items()}
    assert calls["_get_obs"] == 12
    assert calls["_get_info"] == 48
    assert not torch.equal(batch["next", "pixels"][:, 0], batch["next", "pixels"][:, -1])
    collector.shutdown()
