"""check_env lets good envs pass and catches each broken one with the right sentence."""

from __future__ import annotations

import itertools
import random
import threading
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch

from reap.core.wrapped import Wrapped
from reap.envs import AsyncEnvPool, EnvPoolEnv, GymEnv, SerialEnv, TorchEnv
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


def draws_in_step(draw):
    def step(self, action):
        observation, *rest = CountingEnv.step(self, action)
        observation[2] = draw()
        return observation, *rest

    return step


def seeds_everybody(self, *, seed=None, options=None):
    np.random.seed(0 if seed is None else seed)
    return CountingEnv.reset(self)


def counts_for_all(self, action):
    observation, *rest = CountingEnv.step(self, action)
    type(self).total = getattr(type(self), "total", 0) + 1
    observation[2] = type(self).total
    return observation, *rest


def forgets_for_all(self, *, seed=None, options=None):
    type(self).total = 0
    return CountingEnv.reset(self, seed=seed)


def begins_again(self, action):
    observation, reward, terminated, truncated, info = CountingEnv.step(self, action)
    if terminated or truncated:
        observation, info = self.reset()
    return observation, reward, terminated, truncated, info


def tells_the_final(self, action):
    observation, reward, terminated, truncated, info = CountingEnv.step(self, action)
    if terminated or truncated:
        info = {"final_observation": observation}
        observation = np.zeros(3, np.float32)
    return observation, reward, terminated, truncated, info


class Shifted(gym.ObservationWrapper):
    def observation(self, observation):
        return observation + 1


SINGLE = Broken()
BROKEN = {
    "one for all": (lambda: SINGLE, "returned the same env object twice"),
    "one for all, wrapped": (lambda: gym.wrappers.TimeLimit(SINGLE, 9), "returned the same env object twice"),
    "shared state": (variant(step=counts_for_all, reset=forgets_for_all), "Copies share state"),
    "global seed": (
        variant(reset=seeds_everybody),
        r"reset\(seed=7\) draws from NumPy's global generator .* or seeds it",
    ),
    "global NumPy": (variant(step=draws_in_step(np.random.random)), "step draws from NumPy's global generator"),
    "global random": (
        variant(step=draws_in_step(random.random)),
        r"step draws from Python's global generator \(random\)",
    ),
    "global torch": (variant(step=draws_in_step(lambda: torch.rand(1).item())), "step draws from torch's global"),
    "resets itself": (variant(step=begins_again), "The env resets itself inside step: with its done flag"),
    "resets itself, inside": (lambda: Shifted(variant(step=begins_again)()), "The env resets itself inside step"),
    "resets itself, and says so": (
        variant(step=tells_the_final),
        r"at step 3, .* which is in info\['final_observation'\]",
    ),
    "ragged": (
        variant(step=after(2, set_observation(lambda o: [[1], [1, 2]]))),
        "At step 2, .* lists of different length",
    ),
    "nothing": (variant(step=after(0, set_observation(lambda o: None))), "observation = None, no array of numbers"),
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
    "text action": (variant(action_space=gym.spaces.Text(3), step=says_nothing), "reap cannot adapt it.*Text"),
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
    with pytest.raises(AssertionError, match="The factory returned int, which is not an env that reap supports"):
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


def test_resets_that_lose_nothing_pass():
    assert check_env(lambda: gym.wrappers.Autoreset(Broken())) == [
        "The Autoreset wrapper is not needed: reap resets when an episode ends."
    ]

    class Renews(Broken):
        """Begins again inside step and returns the true last observation all the same."""

        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            if terminated or truncated:
                self.reset()
            return observation, reward, terminated, truncated, {"final_observation": observation}

    assert check_env(Renews) == []


def test_generators_are_put_back():
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state()
    check_env(CountingEnv)
    check_env(lambda: GymEnv("CartPole-v1"))
    with pytest.raises(AssertionError, match="seeds it"):
        check_env(variant(reset=seeds_everybody))
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


# ---- envs of other kinds: what a collector makes of them -----------------------------------------------------------


class Walk:
    """Two lanes in torch that walk, with steps of a random length, until they are far away; subclasses break it."""

    num_envs = 2
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.x = torch.zeros(2, 1)
        self.generator = torch.Generator()

    def seed(self, seed):
        self.generator.manual_seed(seed)

    def reset(self, mask):
        self.x = torch.where(mask.unsqueeze(1), 0.0, self.x)
        return self.x

    def step(self, action):
        self.x = self.x + (2 * action - 1).unsqueeze(1) * torch.rand(2, 1, generator=self.generator)
        over = self.x[:, 0].abs() >= 2
        return self.x, over.float(), over, torch.zeros_like(over)


class ResetsInside(Walk):
    """Calls its own reset, and begins at random."""

    def reset(self, mask):
        self.x = torch.where(mask.unsqueeze(1), torch.rand(2, 1, generator=self.generator), self.x)
        return self.x

    def step(self, action):
        _, reward, over, cut = super().step(action)
        return self.reset(over), reward, over, cut


class ResetsInPlace(Walk):
    """Puts lanes that ended back home without a call."""

    def step(self, action):
        _, reward, over, cut = super().step(action)
        self.x = torch.where(over.unsqueeze(1), 0.0, self.x)
        return self.x, reward, over, cut


class WalksIntoNothing(Walk):
    def step(self, action):
        x, *rest = super().step(action)
        return torch.where(x > 1, torch.nan, x), *rest


class WalksUnseeded(Walk):
    def seed(self, seed):
        self.generator.seed()


class WalksTogether(Walk):
    steps = 0

    def reset(self, mask):
        if mask.all():
            WalksTogether.steps = 0
        return super().reset(mask)

    def step(self, action):
        WalksTogether.steps += 1
        x, _, *rest = super().step(action)
        return x, torch.full((2,), float(WalksTogether.steps)), *rest


class Drifts(Wrapped):
    """Lanes whose next row begins elsewhere."""

    def __init__(self):
        inner = GymEnv(CountingEnv((9,))).lanes_env
        super().__init__(inner, inner.spec)
        self.has_after_step = True

    def after_step(self, row):
        row.after[0][...] += 1


class NeverOver(Drifts):
    """Lanes that say terminated, and not done."""

    def after_step(self, row):
        row.done[...] = False


class GrowsUp(Walk):
    def step(self, action):
        x, *rest = super().step(action)
        return x.double(), *rest


def closes_badly():
    env = CountingEnv()
    env.close = raises
    return GymEnv(env)


BROKEN_ROWS = {
    "nan": (lambda: TorchEnv(WalksIntoNothing()), "'observation' has NaN in it"),
    "seed": (lambda: TorchEnv(WalksUnseeded()), r"Two copies with the same seed \(7\) and actions differ"),
    "resets": (lambda: TorchEnv(ResetsInside()), r"resets itself inside step.*reap calls reset\(mask\)"),
    "unwrapped": (Walk, r"Walk, which is not an env that reap supports; .*wrap it, TorchEnv\(Walk\(…\)\)"),
    "shared": (lambda: TorchEnv(WalksTogether()), "Copies share state"),
    "chain": (Drifts, "the row of step 0 ends with another 'observation' than the next row"),
    "flags": (NeverOver, "done'.* is not what terminated and truncated say together"),
    "dtype": (lambda: TorchEnv(GrowsUp()), "Collecting from it failed.*float64.*its space says float32"),
    "space": (
        lambda: gym.vector.SyncVectorEnv([variant(action_space=gym.spaces.Text(3))]),
        "reap cannot collect from it",
    ),
    "close": (closes_badly, "close raised OSError"),
}


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_broken_envs_of_other_kinds_are_caught(name):
    make, sentence = BROKEN_ROWS[name]
    with pytest.raises(AssertionError, match=sentence) as caught:
        check_env(make)
    assert str(caught.value).startswith("this env would not give true data:\n- ")


def tictactoe():
    from pettingzoo.classic import tictactoe_v3

    return tictactoe_v3.env()


def agents():
    from tests.worlds.envs import PLAN, Town

    return Town(PLAN)


def transformed():
    from torchrl import envs

    return envs.TransformedEnv(envs.GymEnv("CartPole-v1"), envs.StepCounter())


def pool():
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=2, seed=1)


GOOD = {
    "reap": lambda: GymEnv("CartPole-v1"),
    "lanes": lambda: SerialEnv(2, CountingEnv),
    "vector": lambda: gym.make_vec("CartPole-v1", 2),
    "torch": lambda: TorchEnv(Walk()),
    "turns": tictactoe,
    "agents": agents,
    "TorchRL": transformed,
    "EnvPool": pool,
}


@pytest.mark.parametrize("name", GOOD)
def test_good_envs_of_every_kind_pass(name):
    assert check_env(GOOD[name], steps=100) == []


def test_last_observations_that_are_first_ones_are_remarked():
    (remark,) = check_env(lambda: TorchEnv(ResetsInPlace()))
    assert "If the env resets itself inside step, the true last one is lost" in remark


def test_what_cannot_be_seeded_is_remarked():
    dm_env = pytest.importorskip("dm_env")

    class Days(dm_env.Environment):
        def observation_spec(self):
            return dm_env.specs.Array((1,), np.float32)

        def action_spec(self):
            return dm_env.specs.DiscreteArray(2)

        def reset(self):
            self.day = 0
            return dm_env.restart(np.zeros(1, np.float32))

        def step(self, action):
            self.day += 1
            now = np.full(1, self.day, np.float32)
            return dm_env.termination(1.0, now) if self.day == 5 else dm_env.transition(1.0, now)

    (remark,) = check_env(Days)
    assert remark.startswith("It takes no seed: ")
    assert "Days cannot be seeded from outside" in remark


def test_nothing_is_said_of_the_collector_that_tries_an_asynchronous_pool():
    pytest.importorskip("envpool")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frames_per_batch")
        check_env(lambda: EnvPoolEnv("CartPole-v1", num_envs=4, batch_size=2), steps=40)


@pytest.mark.parametrize("masked", [False, True])
def test_whichever_lane_is_ready_first_its_actions_are_the_same(masked):
    """In every other copy lane 0 waits until lane 1 is three steps ahead, in the others lane 1 waits for lane 0."""
    late = itertools.cycle([0, 1])

    class Waiting(variant()):
        if masked:
            observation_space = gym.spaces.Dict(
                observation=CountingEnv.observation_space, action_mask=gym.spaces.MultiBinary(3)
            )
            action_space = gym.spaces.Discrete(3)

        def __init__(self, waits, ahead):
            super().__init__()
            self.waits, self.ahead, self.steps = waits, ahead, 0

        def shown(self, observation):
            return {"observation": observation, "action_mask": np.array([1, 0, 1], np.int8)} if masked else observation

        def reset(self, **how):
            observation, info = super().reset(**how)
            return self.shown(observation), info

        def step(self, action):
            self.steps += 1
            if self.waits:
                assert self.ahead.wait(60)
            elif self.steps == 3:
                self.ahead.set()
            observation, *rest = CountingEnv.step(self, action)
            return self.shown(observation), *rest

    def make():
        ahead, who = threading.Event(), next(late)
        return AsyncEnvPool([lambda n=n: GymEnv(Waiting(n == who, ahead)) for n in (0, 1)], max_ready=1)

    assert check_env(make, steps=40) == []
