"""What a policy writes beside the action: which names it may take, and that the data stays as it was seen."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn

from reap.collectors import Collector
from reap.envs import GymEnv
from reap.errors import SpecMismatch, UsageError, WorkerRaised
from reap.testing import CountingEnv, CountingWorld
from reap.testing.backend import counting_lanes
from tests.worlds.ready import Scripted


class StepsSeen(nn.Module):
    carry = {"seen": torch.zeros(1)}

    def forward(self, observation, seen):
        return observation[..., :1], seen + 1


def normal(*followers, **kwargs):
    return TensorDictSequential(
        TensorDictModule(lambda o: (o[..., :1], o[..., :1] * 0 + 1), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=distributions.Normal, return_log_prob=True
        ),
        *followers,
    )


def test_log_prob_of_parameters_a_later_module_overwrites():
    policy = normal(TensorDictModule(lambda o: o[..., :1] * 0 + 100, ["observation"], ["loc"]))
    batch = Collector(CountingEnv(), policy, frames_per_batch=20).next()
    want = distributions.Normal(batch["observation"][:, :1], torch.ones(20, 1)).log_prob(batch["action"])
    assert torch.allclose(batch["action_log_prob"], want)


@pytest.mark.parametrize(
    ("family", "params", "values", "what"),
    [
        (distributions.Normal, ["loc", "scale"], (0.0, -1.0), "not above 0"),
        (distributions.Normal, ["loc", "scale"], (float("nan"), 1.0), "NaN as 'loc'"),
        (distributions.Categorical, ["logits"], (float("inf"),), r"\+inf"),
        (distributions.Categorical, ["logits"], (-float("inf"),), "only -inf"),
    ],
)
def test_parameters_a_distribution_would_refuse(family, params, values, what):
    class Late(nn.Module):
        """Right when it is first tried, wrong later."""

        def __init__(self):
            super().__init__()
            self.bad = False

        def forward(self, o):
            good = (0.0, 1.0) if len(params) == 2 else (0.0,)
            out = tuple(
                torch.full((*o.shape[:-1], 1 if len(params) == 2 else 2), v) for v in (values if self.bad else good)
            )
            return out if len(out) > 1 else out[0]

    class Env(CountingEnv):
        action_space = gym.spaces.Box(-9, 9, (1,), np.float32) if len(params) == 2 else gym.spaces.Discrete(2)

        def step(self, action):
            return super().step(0.0)

    late = Late()
    policy = TensorDictSequential(
        TensorDictModule(late, ["observation"], params),
        ProbabilisticTensorDictModule(params, ["action"], distribution_class=family),
    )
    c = Collector(GymEnv(Env(), categorical_action_encoding=True), policy, frames_per_batch=4)
    late.bad = True
    with pytest.raises(SpecMismatch, match=f"lane 0, step 0: the policy wrote .*{what}"):
        c.next()


class WrongIn(nn.Module):
    """Writes a scale of zero for lane 1, from its second step on."""

    def forward(self, observation):
        wrong = (observation[..., :1] == 1) & (observation[..., 2:] > 0)
        return observation[..., :1], (~wrong).float()


def test_refused_parameters_name_the_lane_whatever_its_position_in_the_row():
    module = TensorDictModule(WrongIn(), ["observation"], ["loc", "scale"])
    sample = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=distributions.Normal)
    policy = TensorDictSequential(module, sample)
    with pytest.raises(SpecMismatch, match="lane 1, step"):
        Collector(Scripted([[9], [9]], 1, lambda waiting, most: [0]), policy, frames_per_batch=12).next()
    with pytest.raises(SpecMismatch, match="lane 1, step 1"):
        Collector(counting_lanes([[9]] * 3)(), policy, frames_per_batch=12, deterministic=True).next()


def sums(observation, total=None):
    """Read what was written at the last step, and sample with a scale of zero at one step."""
    step = observation[..., 2:]
    total = step if total is None else total + step
    return distributions.Normal(total, (step != 5).float(), validate_args=True).sample(), total


def test_a_distribution_that_refuses_its_arguments_says_at_which_step():
    """The first step of an episode finds nothing from a step before, and so is not replayed."""
    policy = TensorDictModule(sums, ["observation", "total"], ["action", "total"])
    c = Collector(CountingEnv((3, 9)), policy, frames_per_batch=12)
    assert "it is captured" in c.explain()
    with pytest.raises(WorkerRaised, match="step 8: .*scale"):
        c.next()


def test_what_a_policy_keeps_is_its_own():
    class Delta(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = None

        def forward(self, observation):
            last = observation if self.before is None else self.before
            self.before = observation
            return observation[..., 2:] - last[..., 2:]

    c = Collector(CountingEnv((50,)), Delta(), frames_per_batch=1)
    deltas = [float(c.next()["action"]) for _ in range(8)]
    assert deltas == [0.0] + [1.0] * 7

    def act(td):
        last = td.get("before", td["observation"])
        td["before"] = td["observation"]
        return td.set("action", td["observation"][..., 2:] - last[..., 2:])

    c = Collector(CountingEnv((50,)), act, frames_per_batch=2)
    seen = []
    for _ in range(4):
        batch = c.next()
        seen += batch["action"].reshape(-1).tolist()
        batch["observation"].fill_(1000.0)
    assert seen == [0.0] + [1.0] * 7


def test_a_policy_that_changes_what_it_sees_does_not_change_the_data():
    c = Collector(CountingEnv(), lambda observation: observation.mul_(3)[..., :1] * 0, frames_per_batch=9)
    want = CountingWorld([(3, 1, 5)]).batch(9)
    assert np.array_equal(c.next()["observation"].numpy(), want[("observation",)][0])


def test_fewer_outputs_than_before():
    class Fewer(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, observation):
            self.calls += 1
            return (observation[..., :1], observation) if self.calls < 3 else (observation[..., :1],)

    with pytest.raises(
        SpecMismatch, match="step 2: the policy returned 1 tensors; on its first call it returned .*'output1'"
    ):
        Collector(CountingEnv(), Fewer(), frames_per_batch=5).next()

    def vanishing(td):
        vanishing.calls += 1
        td.set("action", td["observation"][..., :1])
        return td.set("extra", td["action"]) if vanishing.calls < 3 else td.select("action")

    vanishing.calls = 0
    with pytest.raises(SpecMismatch, match="did not write 'extra' at this step"):
        Collector(CountingEnv(), vanishing, frames_per_batch=5).next()


@pytest.mark.parametrize("name", ["reward", "done", "truncated", "next", "collector", "action", "policy_version"])
def test_names_that_are_taken(name):
    class Named(CountingEnv):
        observation_space = gym.spaces.Dict({name: CountingEnv.observation_space, "x": CountingEnv.observation_space})

        def _observation(self):
            return {name: super()._observation(), "x": super()._observation()}

    with pytest.raises(SpecMismatch, match=f"'{name}'.*rename it"):
        Collector(Named(), frames_per_batch=3)
    if name == "reward":
        with pytest.raises(SpecMismatch, match="rename it"):
            Collector(GymEnv(CountingEnv(), info_keys=["reward"]), frames_per_batch=3)


def test_carry_and_overwritten_observations_must_keep_their_look():
    class Grows(nn.Module):
        carry = {"h": torch.zeros(1)}

        def forward(self, observation, h):
            return observation[..., :1], torch.cat([h, h], -1)

    with pytest.raises(SpecMismatch, match=r"writes \('next', 'h'\) as float32\[2\]"):
        Collector(CountingEnv(), Grows(), frames_per_batch=3)
    other = TensorDictModule(lambda o: (o[..., :1], o[..., :2]), ["observation"], ["action", "observation"])
    with pytest.raises(SpecMismatch, match="writes 'observation' as float32.2."):
        Collector(CountingEnv(), other, frames_per_batch=3)
    half = StepsSeen()
    half.carry = {"seen": torch.zeros(1, dtype=torch.bfloat16)}
    with pytest.raises(UsageError, match="bfloat16"):
        Collector(CountingEnv(), half, frames_per_batch=3)


def test_a_list_is_not_a_tuple():
    with pytest.raises(SpecMismatch, match="as list; tensors are expected"):
        Collector("CartPole-v1", lambda observation: [1, 0], frames_per_batch=3)


def test_a_policy_may_not_take_a_name():
    for name in ("done", "reward", "collector", "step_count"):
        policy = TensorDictModule(lambda o: (o[..., :1], o[..., :1]), ["observation"], ["action", name])
        with pytest.raises(SpecMismatch, match=f"policy writes '{name}'"):
            Collector(CountingEnv(), policy, frames_per_batch=3, max_frames_per_traj=2)
