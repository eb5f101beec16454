"""Collecting in a thread leaves the random numbers of the thread that learns alone."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import Collector, Evaluator
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv, SerialEnv


class Sure(nn.Module):
    """It draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation):
        return self.net(observation).tanh()


class Noisy(Sure):
    def forward(self, observation):
        mean = self.net(observation)
        return torch.normal(mean, torch.ones_like(mean)).tanh()


@pytest.fixture(scope="module", autouse=True)
def _first_env():
    """TorchRL keeps the frame that makes the first of its envs, and whatever that holds, for as long as it runs."""
    pytest.importorskip("torchrl.envs").GymEnv("Pendulum-v1").close()


def lanes():
    return SerialEnv(2, lambda: GymEnv("Pendulum-v1"))


def transformed():
    torchrl = pytest.importorskip("torchrl.envs")
    counted = torchrl.Compose(
        torchrl.StepCounter(), torchrl.RewardSum(), torchrl.ObservationNorm(0.0, 1.0, ["observation"])
    )
    return torchrl.TransformedEnv(torchrl.GymEnv("Pendulum-v1"), counted)


def drawn_while(goes_on):
    """What the learner draws while something goes on beside it, and not one number twice."""
    drawn = []
    while goes_on():
        drawn.append(tuple(torch.rand(2, dtype=torch.float64).tolist()))
    assert len(drawn) > 20
    assert len({*drawn}) == len(drawn)


@pytest.mark.parametrize("policy", [Sure, Noisy])
@pytest.mark.parametrize("env", [lanes, transformed])
def test_no_number_is_given_to_the_learner_twice(env, policy):
    for _ in range(3):
        buffer = ReplayBuffer(storage=LazyTensorStorage(5000), batch_size=32)
        actor = TensorDictModule(policy(), ["observation"], ["action"]) if env is transformed else policy()
        with Collector(env(), actor, frames_per_batch=50, total_frames=1500, replay_buffer=buffer) as collector:
            collector.start()
            drawn_while(collector.is_running)
            assert len(buffer) == 1500


def test_a_learner_that_draws_does_not_end_a_capture():
    for _ in range(3):
        buffer = ReplayBuffer(storage=LazyTensorStorage(5000), batch_size=32)
        with Collector(lanes(), Sure(), frames_per_batch=50, total_frames=1500, replay_buffer=buffer) as collector:
            collector.start()
            drawn_while(collector.is_running)
            assert "it is captured" in collector.explain()


def test_an_evaluation_in_the_background():
    policy = Sure()
    with Evaluator(lanes, policy, num_trajectories=2, max_steps=40) as evaluator:
        evaluator.trigger_eval(policy)
        drawn_while(lambda: evaluator.pending)
