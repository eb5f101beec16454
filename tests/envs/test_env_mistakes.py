"""What an env returns wrongly is told as the env's fault, with the name of the entry that is wrong."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from reap.collectors import Collector
from reap.envs import GymEnv
from reap.errors import SpecMismatch, UsageError, WorkerRaised
from reap.testing import check_env


class Nested(gym.Env):
    """Episodes of five steps; subclasses break one thing."""

    observation_space = Dict(
        pos=Box(-1, 1, (2,), np.float32),
        inner=Dict(vel=Box(-1, 1, (3,), np.float32), kind=Discrete(3)),
        pair=Tuple([Discrete(2), Box(0, 1, (1,), np.float32)]),
    )
    action_space = Discrete(2)

    def look(self):
        inner = {"vel": np.zeros(3, np.float32), "kind": 1}
        return {"pos": np.zeros(2, np.float32), "inner": inner, "pair": (0, np.zeros(1, np.float32))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        self.t += 1
        return self.look(), 1.0, self.t >= 5, False, {}


def seen(change, *, after=0):
    """A Nested whose observations are passed through `change` from step `after` on."""

    def look(self):
        observation = Nested.look(self)
        if self.t >= after:
            change(observation)
        return observation

    return type("Seen", (Nested,), {"look": look})


def set_inner(name, value):
    return lambda observation: observation["inner"].__setitem__(name, value)


CASES = {
    "missing": (
        lambda o: o["inner"].pop("vel"),
        r"env returned no observation\['inner'\]\['vel'\], which its observation_space has; "
        r"observation\['inner'\] holds \['kind'\]",
    ),
    "missing at the top": (lambda o: o.pop("pos"), r"env returned no observation\['pos'\]"),
    "no dict": (lambda o: o.update(inner=3), r"env returned no observation\['inner'\]\['vel'\].*\['inner'\] is int"),
    "short tuple": (lambda o: o.update(pair=(0,)), r"env returned no observation\['pair'\]\[1\]"),
    "shape": (
        set_inner("vel", np.zeros(4, np.float32)),
        r"env returned observation\['inner'\]\['vel'\] float32\[4\], its space says float32\[3\]",
    ),
    "dtype": (
        set_inner("vel", np.array(["a", "b", "c"])),
        r"env returned observation\['inner'\]\['vel'\] <U1\[3\], its space says float32\[3\]",
    ),
    "category": (set_inner("kind", 3), r"observation\['inner'\]\['kind'\]: env returned 3 for Discrete\(3, start=0\)"),
    "no category": (set_inner("kind", None), r"observation\['inner'\]\['kind'\]: env returned None.*TypeError"),
}


@pytest.mark.parametrize("case", CASES)
def test_entries_of_a_dict_are_named(case):
    change, words = CASES[case]
    with pytest.raises(SpecMismatch, match=f"lane 0: {words}"):
        Collector(seen(change), frames_per_batch=10)
    collector = Collector(seen(change, after=3), frames_per_batch=10)
    with pytest.raises(SpecMismatch, match=f"lane 0, step 2: {words}"):
        collector.next()


@pytest.mark.parametrize("case", ["missing", "shape"])
def test_entries_of_vector_envs_are_named(case):
    change, words = CASES[case]
    words = words.replace(r"\[3\]", r"\[2, 3\]").replace(r"\[4\]", r"\[2, 4\]")

    class Vector(gym.vector.VectorEnv):
        num_envs = 2
        metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        single_observation_space, single_action_space = Nested.observation_space, Nested.action_space
        observation_space = gym.vector.utils.batch_space(Nested.observation_space, 2)

        def reset(self, *, seed=None, options=None):
            observation = gym.vector.utils.create_empty_array(Nested.observation_space, 2)
            if case == "missing":
                change(observation)
            else:
                observation["inner"]["vel"] = np.zeros((2, 4), np.float32)
            return observation, {}

    with pytest.raises(SpecMismatch, match=words):
        Collector(Vector(), frames_per_batch=10)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda self: self.look(), "got dict"),
        (lambda self: None, "got NoneType"),
        (lambda self: (self.look(), {}, 0), "got a tuple of 3"),
    ],
)
def test_a_wrong_return_of_reset(returned, words):
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return returned(self)

    with pytest.raises(SpecMismatch, match=rf"lane 0: env.reset must return \(observation, info\), {words}"):
        Collector(type("Wrong", (Nested,), {"reset": reset}), frames_per_batch=10)


def test_a_reset_without_a_seed():
    def reset(self):
        return Nested.reset(self)

    collector = Collector(type("Unseeded", (Nested,), {"reset": reset}), frames_per_batch=10)
    with pytest.raises(WorkerRaised, match=r"lane 0: env.reset raised TypeError\(.*keyword argument 'seed'"):
        collector.set_seed(0)


def test_a_wrong_return_of_step():
    def step(self, action):
        return Nested.step(self, action)[:4]

    with Collector(type("Wrong", (Nested,), {"step": step}), frames_per_batch=10) as collector:
        words = (
            r"lane 0, step 0: env.step must return \(observation, .*, info\); what .*: ValueError\('not enough values"
        )
        with pytest.raises(WorkerRaised, match=words):
            collector.next()


@pytest.mark.parametrize("what", ["observation_space", "action_space"])
def test_a_missing_space(what):
    class Bare(gym.Env):
        def __init__(self):
            if what == "action_space":
                self.observation_space = Nested.observation_space
            else:
                self.action_space = Nested.action_space

        reset, step, look = Nested.reset, Nested.step, Nested.look

    words = rf"Bare has no {what}: a gymnasium.spaces.Space is expected, set in its __init__"
    with pytest.raises(UsageError, match=words):
        Collector(Bare, frames_per_batch=10)
    with pytest.raises(UsageError, match=words):
        GymEnv(Bare())
    with pytest.raises(AssertionError, match=f"The env has no {what}"):
        check_env(Bare)


def test_check_env_says_that_a_reward_is_none():
    def step(self, action):
        observation, _, *rest = Nested.step(self, action)
        return (observation, None, *rest)

    with pytest.raises(AssertionError, match="At step 0 the reward is None"):
        check_env(type("Silent", (Nested,), {"step": step}))


def test_check_env_remarks_on_float64_for_a_float32_space():
    (remark,) = check_env(seen(set_inner("vel", np.zeros(3))))
    assert remark == (
        "reset returned observation['inner']['vel'] of dtype float64; its space says float32. It is converted in every "
        "step: return float32."
    )


def test_check_env_remarks_on_undeclared_keys():
    remarks = check_env(seen(lambda o: (o.update(extra=1), o["inner"].update(more=2))))
    assert remarks == [
        "reset returned observation['extra'], which its space does not declare; it is not collected.",
        "reset returned observation['inner']['more'], which its space does not declare; it is not collected.",
    ]
