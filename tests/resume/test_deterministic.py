"""deterministic=True: what a lane gets does not depend on how many lanes share a process, nor on who died meanwhile."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector
from reap.envs import GymEnv, ParallelEnv, SerialEnv
from reap.errors import UsageError

LANES, STEPS, BATCHES = 8, 16, 4
KEYS = ["observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")]


class Sampling(nn.Module):
    """A policy whose every action is drawn."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, observation):
        return Categorical(logits=self.net(observation)).sample()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 2)
        self.carry = {"hidden": torch.zeros(8)}

    def forward(self, observation, hidden):
        hidden = self.cell(observation, hidden)
        return Categorical(logits=self.head(hidden)).sample(), hidden


def actor():
    torch.manual_seed(1)
    net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    draw = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
    return ProbabilisticTensorDictSequential(net, draw)


def lanes(count):
    def make():
        return SerialEnv(count, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))

    return make


def run(kind, workers, policy, kill=None, **options):
    """Rows `[lanes, time]` of every lane of the run."""
    share = LANES // workers
    usual = {"frames_per_batch": LANES * STEPS, "total_frames": LANES * STEPS * BATCHES, "deterministic": True}
    if kind is Collector:
        c = Collector(lanes(share)(), policy, **{**usual, **options})
    else:
        c = kind([lanes(share)] * workers, policy, cat_results=0, **{**usual, **options})
    c.set_seed(3)
    found = []
    for n, batch in enumerate(c):
        found.append(batch.select(*KEYS).clone())
        if n == kill:
            os.kill(c._backend.workers[-1].child.pid, signal.SIGKILL)
    restarts = c.stats()["restarts"] if kill is not None else 0
    c.shutdown()
    return torch.cat(found, -1), restarts


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in KEYS)


@pytest.mark.parametrize("make", [Sampling, Recurrent, actor, lambda: None], ids=["module", "gru", "actor", "random"])
def test_workers_and_lanes_may_be_shared_out_in_any_way(make):
    alone, _ = run(Collector, 1, make())
    assert same(alone, run(Collector, 1, make())[0]), "seeds reproduce"
    assert alone["next", "done"].sum() > 10
    assert not torch.equal(alone["action"][0], alone["action"][1]), "lanes have noise of their own"
    for workers in (2, 4):
        assert same(alone, run(MultiSyncCollector, workers, make())[0]), f"{workers} workers"


def test_random_frames_are_the_lanes_own():
    options = {"init_random_frames": 2 * LANES * STEPS}
    assert same(run(Collector, 1, Sampling(), **options)[0], run(MultiSyncCollector, 2, Sampling(), **options)[0])


def test_without_it_they_differ():
    """What the option is for: eight lanes draw from one generator, or from two."""
    one, _ = run(Collector, 1, Sampling(), deterministic=False)
    assert not same(one, run(MultiSyncCollector, 2, Sampling(), deterministic=False)[0])


@pytest.mark.parametrize("kind", [MultiSyncCollector, DistributedCollector])
def test_a_worker_that_died_is_replaced_by_one_that_goes_on_exactly_there(kind):
    whole, _ = run(Collector, 1, Sampling())
    options = {"on_failure": "restart"} | ({"sync": True} if kind is DistributedCollector else {})
    for kill in (0, 2):
        rows, restarts = run(kind, 2, Sampling(), kill=kill, **options)
        assert restarts == 1
        assert same(whole, rows)


def test_asynchronous_workers_too():
    whole, _ = run(Collector, 1, Sampling())
    share = LANES // 2
    c = MultiAsyncCollector(
        [lanes(share)] * 2, Sampling(), frames_per_batch=share * STEPS, total_frames=-1, deterministic=True
    )
    c.set_seed(3)
    found = {0: [], 1: []}
    while min(map(len, found.values())) < BATCHES:
        batch = c.next()
        found[batch.origin.worker].append(batch.select(*KEYS).clone())
    c.shutdown()
    rows = torch.cat([torch.cat(found[w][:BATCHES], -1) for w in (0, 1)])
    assert same(whole, rows)


def test_a_resumed_run_goes_on():
    c = Collector(lanes(4)(), Sampling(), frames_per_batch=32, deterministic=True)
    c.set_seed(5)
    c.next()
    state = c.state_dict()
    following = c.next().select(*KEYS).clone()
    other = Collector(lanes(4)(), Sampling(), frames_per_batch=32, deterministic=True)
    other.load_state_dict(state)
    assert same(following, other.next())
    assert "lane by lane" in other.explain()


def test_where_it_cannot_be():
    env = ParallelEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), ready=1)
    with pytest.raises(UsageError, match="deterministic=True.*asynchronous lanes"):
        Collector(env, Sampling(), frames_per_batch=8, deterministic=True)
    with pytest.raises(UsageError, match="deterministic"):
        Collector(lanes(2)(), Sampling(), frames_per_batch=8, deterministic="yes")
