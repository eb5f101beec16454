"""check_env lets good envs pass and catches each broken one with the right sentence."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from reap.testing import CountingEnv, check_env


class Broken(CountingEnv):
    """A CountingEnv with episodes of four steps; subclasses break one thing."""

    def __init__(self):
        super().__init__((4,))


def after(n, change):
    """A step method that behaves n times, then passes its result through `change`."""

    def step(self, action):
        self.n = getattr(self, "n", 0) + 1
        result = CountingEnv.step(self, action)
        return change(*result) if self.n > n else result

    return step


def variant(**members):
    return type("Variant", (Broken,), members)


def set_observation(value):
    return lambda obs, *rest: (value(obs), *rest)


def raises(*_):
    raise OSError("no licence")


def changes_action(self, action):
    result = CountingEnv.step(self, action)
    action += 1
    return result


def says_nothing(self, action):
    return CountingEnv.step(self, 0)


def unseeded(self):
    return np.array([0, 0, np.random.default_rng().random()], np.float32)


BROKEN = {
    "shape changes": (variant(step=after(5, set_observation(lambda o: o[:2]))), r"shape \[2\]; its space says \[3\]"),
    "dtype": (
        variant(step=after(0, set_observation(lambda o: o.astype(complex)))),
        "dtype complex128; its space says float32",
    ),
    "nan": (
        variant(step=after(3, set_observation(lambda o: o * np.nan))),
        "At step 3, step returned observation with NaN",
    ),
    "bounds": (
        variant(observation_space=gym.spaces.Box(0, 2, (3,), np.float32)),
        "At step 2, step returned observation outside the bounds",
    ),
    "reset shape": (
        variant(reset=lambda self, **_: (np.zeros(4, np.float32), {})),
        r"reset returned observation of shape \[4\]",
    ),
    "reset without info": (
        variant(reset=lambda self, **_: np.zeros(3, np.float32)),
        r"reset must return \(observation, info\), got ndarray",
    ),
    "reset without seed": (variant(reset=lambda self: (np.zeros(3, np.float32), {})), "reset must take a keyword seed"),
    "reset raises": (variant(reset=lambda self, **_: raises()), "reset raised OSError"),
    "old step": (variant(step=lambda self, a: CountingEnv.step(self, a)[:4]), "step must return .* got a tuple of 4"),
    "step raises": (variant(step=after(2, raises)), "step raised OSError.*at step 2"),
    "reward": (variant(step=after(0, lambda o, r, *rest: (o, "much", *rest))), "the reward is 'much', not a number"),
    "reward nan": (variant(step=after(1, lambda o, r, *rest: (o, float("nan"), *rest))), "At step 1 the reward is nan"),
    "two rewards": (variant(step=after(0, lambda o, r, *rest: (o, np.zeros(2), *rest))), "the reward has 2 numbers"),
    "flag": (variant(step=after(0, lambda o, r, *rest: (o, r, "no", *rest[1:]))), "terminated is 'no'; True or False"),
    "info": (variant(step=after(0, lambda *r: (*r[:4], None))), "info is NoneType; a dict is expected"),
    "action": (variant(step=changes_action), "step changes the action it is given"),
    "determinism": (variant(_observation=unseeded), "Two copies with the same seed .* differ at the first observation"),
    "close": (variant(close=raises), "close, called once, raised OSError"),
    "no space": (variant(observation_space=None), "The env has no observation_space"),
    "text action": (variant(action_space=gym.spaces.Text(3), step=says_nothing), "reap has no form for it.*Text"),
    "text": (
        variant(observation_space=gym.spaces.Text(3), _observation=lambda self: "abcd"),
        "observation = 'abcd', which is not in its space Text",
    ),
    "sequence": (
        variant(observation_space=gym.spaces.Sequence(gym.spaces.Discrete(3)), _observation=lambda self: (1, 5)),
        r"observation = \(1, 5\), which is not in its space Sequence",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_envs_are_caught(name):
    make, sentence = BROKEN[name]
    with pytest.raises(AssertionError, match=sentence) as caught:
        check_env(make)
    assert str(caught.value).startswith("this env would not give true data:\n- ")


def test_other_wrong_things():
    with pytest.raises(AssertionError, match="takes a factory"):
        check_env(CountingEnv())
    with pytest.raises(AssertionError, match="The factory raised ZeroDivisionError"):
        check_env(lambda: 1 / 0)
    with pytest.raises(AssertionError, match="The factory returned int, not a gymnasium.Env"):
        check_env(lambda: 3)
    import threading

    lock = threading.Lock()
    with pytest.raises(AssertionError, match="cannot be sent to a worker process"):
        check_env(lambda: lock and CountingEnv())


def test_missing_entry_of_a_dict():
    class Forgets(Broken):
        observation_space = gym.spaces.Dict(a=CountingEnv.observation_space, b=CountingEnv.observation_space)

        def _observation(self):
            value = super()._observation()
            return {"a": value, "b": value} if self.t < 2 else {"a": value}

    with pytest.raises(AssertionError, match=r"At step 1, step returned no observation\['b'\]"):
        check_env(Forgets)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1", "Acrobot-v1"])
def test_good_envs_pass(name):
    remarks = check_env(lambda: gym.make(name))
    assert all("ended" in r for r in remarks)


def test_remarks():
    assert check_env(CountingEnv) == []
    assert any("No episode ended" in r for r in check_env(lambda: CountingEnv((10_000,))))

    class Reuses(Broken):
        def _observation(self):
            if not hasattr(self, "buffer"):
                self.buffer = np.zeros(3, np.float32)
            self.buffer[:] = super()._observation()
            return self.buffer

    assert any("changes the observation returned before" in r for r in check_env(Reuses))
