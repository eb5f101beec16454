"""What limits a run: right on runs that were made to be limited by one thing, by workers of every kind."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import GymEnv
from reap.testing import CountingEnv
from reap.watching.diagnosis import Times, diagnose


class Slow(CountingEnv):
    """Each step takes so long."""

    def __init__(self, seconds):
        super().__init__((5,), 0)
        self.seconds = seconds

    def step(self, action):
        if self.seconds:
            time.sleep(self.seconds)
        return super().step(action)


class Thinking(torch.nn.Module):
    """A policy that takes so long for each decision."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, observation):
        if self.seconds:
            time.sleep(self.seconds)
        return observation[..., :1] * 0


def run(kind, env=0.0, policy=0.0, learner=0.0, frames=40, batches=40, slowest=None):
    """A run of a few batches; returns what its view says about it."""
    envs = [lambda: GymEnv(Slow(env)), lambda: GymEnv(Slow(env if slowest is None else slowest))]
    envs = envs[0] if kind is Collector else envs
    with kind(envs, Thinking(policy), frames_per_batch=frames, trust_policy=False, capture=False) as collector:
        for _ in range(3):
            collector.next()  # it takes its time to begin
        watch = collector.watch()
        for _ in range(batches):
            collector.next()
            if learner:
                time.sleep(learner)
        return watch.view()["diagnosis"]


KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_env(kind):
    found = run(kind, env=0.002, batches=12)
    assert found["limit"] == "env"
    assert found["share"] > 0.5
    assert "the env takes" in found["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_policy(kind):
    found = run(kind, policy=0.002, batches=12)
    assert found["limit"] == "policy"
    assert found["share"] > 0.5
    assert "try 32 lanes per worker" in found["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_learner(kind):
    found = run(kind, learner=0.06, batches=30)  # more than workers have made ahead
    assert found["limit"] == "learner"
    assert found["share"] > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_batches(kind):
    frames = 1 if kind is Collector else 2  # a step of each worker
    found = run(kind, frames=frames, batches=1500)  # so many that one which had to wait for its turn says little
    assert found["limit"] == "transport"
    assert f"try frames_per_batch={8 * frames}" in found["text"]


def test_stragglers():
    found = run(MultiSyncCollector, env=0.0002, slowest=0.004, batches=12)
    assert found["limit"] == "stragglers"
    assert "worker 1 takes" in found["text"]
    assert "MultiAsyncCollector" in found["text"]


def test_who_goes_their_own_way_has_no_stragglers():
    assert run(MultiAsyncCollector, env=0.002, slowest=0.01, batches=12)["limit"] == "env"


def test_the_sentence():
    told = partial(diagnose, learner=0.1, in_step=True, frames_per_batch=100, cores=8)
    busy = Times(0, 4, 25, (0.2, 0.71, 0.05, 0.0, 0.04))
    assert told([busy, busy]).text == "the policy takes 71% of a worker's time: try 32 lanes per worker"
    assert told([]).text == "nothing is known yet: no worker has finished a rollout"
    wide = Times(0, 64, 25, (0.2, 0.71, 0.05, 0.0, 0.04))
    assert "policy_device" in told([wide]).text
    resting = Times(0, 4, 25, (0.1, 0.1, 0.0, 0.0, 0.8))
    assert diagnose([resting], learner=None, in_step=False, frames_per_batch=100, cores=8).limit == "limiter"
