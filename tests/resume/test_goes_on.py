"""A collector that loads another one's state goes on bit for bit as that one does."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from reap.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from reap.envs import GymEnv, SerialEnv, TorchEnv
from reap.envs.adapters.torch_envs import TorchCartPole, TorchPendulum
from reap.envs.adapters.torch_native import DeviceTorchLanes, TorchLanes
from reap.errors import CorruptState
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.device import Recurrent
from tests.worlds.resume import Noisy, Own, Samples, Secretive, goes_on, gym_lanes, same, through_a_file


def flat():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )


CASES = {
    "CartPole": (gym_lanes("CartPole-v1", 3), lambda: Samples(4, choices=2), {}),
    "one lane": (lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), flat, {}),
    "Pendulum, limit": (gym_lanes("Pendulum-v1", 2), lambda: Samples(3, numbers=1), {"max_frames_per_traj": 17}),
    "MuJoCo": (gym_lanes("HalfCheetah-v5", 2), lambda: Samples(17, numbers=6), {"max_frames_per_traj": 17}),
    "random actions": (gym_lanes("CartPole-v1", 2), lambda: None, {}),
    "a policy that remembers": (gym_lanes("Pendulum-v1", 2), Noisy, {"max_frames_per_traj": 17}),
    "a carry": (lambda: SerialEnv(2, [lambda n=n: GymEnv(CountingEnv((3, 5), n)) for n in range(2)]), Recurrent, {}),
    "torch env": (lambda: TorchEnv(TorchCartPole(3)), lambda: Samples(4, choices=2), {"max_frames_per_traj": 9}),
    "texts": (lambda: SerialEnv(2, [lambda n=n: GymEnv(Talks(n)) for n in range(2)]), lambda: None, {}),
}


class Talks(gym.Env):
    observation_space = gym.spaces.Dict({"said": gym.spaces.Text(20), "n": gym.spaces.Box(0, 99, (1,))})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, n):
        self.n, self.t = n, 0

    def _seen(self):
        return {"said": f"{self.n} {self.t}", "n": [self.t]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = int(self.np_random.integers(3))
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        return self._seen(), 1.0, self.t > 6, False, {}


@pytest.mark.parametrize("name", CASES)
def test_in_this_process(name):
    make_env, make_policy, options = CASES[name]

    def make():
        torch.manual_seed(0)
        env = make_env()
        lanes = env.batch_size.numel()
        return Collector(env, make_policy(), frames_per_batch=lanes * 13, total_frames=-1, **options)

    goes_on(make)


@pytest.mark.parametrize("limit", [None, 9])
@pytest.mark.parametrize("make_env", [TorchCartPole, TorchPendulum])
def test_rows_that_are_tensors(make_env, limit, monkeypatch):
    monkeypatch.setattr(TorchLanes, "on_device", lambda self: DeviceTorchLanes(self))

    def make():
        torch.manual_seed(0)
        policy = Samples(4, choices=2) if make_env is TorchCartPole else Samples(3, numbers=1)
        return Collector(TorchEnv(make_env(3, limit=20)), policy, frames_per_batch=39, max_frames_per_traj=limit)

    goes_on(make)


def test_several_workers_in_step():
    def make():
        torch.manual_seed(0)
        return MultiSyncCollector([gym_lanes("CartPole-v1", 2)] * 2, Samples(4, choices=2), frames_per_batch=52)

    goes_on(make)


def test_atari():
    pytest.importorskip("ale_py")

    def make():
        torch.manual_seed(0)
        return Collector(gym_lanes("ALE/Pong-v5", 2)(), None, frames_per_batch=26)

    goes_on(make, batches=2)


def test_an_env_that_says_itself_where_it_is():
    goes_on(lambda: Collector(GymEnv(Own()), None, frames_per_batch=7))


def test_an_env_that_cannot_say_begins_anew_and_the_state_says_so():
    first = Collector(GymEnv(Secretive()), None, frames_per_batch=7, total_frames=-1)
    used = first.next()["collector", "traj_ids"].max()
    state = through_a_file(first.state_dict())
    assert "Secretive cannot be pickled" in state["resume"]["why"]
    second = Collector(GymEnv(Secretive()), None, frames_per_batch=7, total_frames=-1)
    second.load_state_dict(state)
    batch = second.next()
    assert batch["observation"][0] == 0
    assert batch["collector", "traj_ids"].min() > used
    assert second.stats()["frames"] == 14


def test_lanes_that_come_as_they_are_ready_begin_anew_and_the_state_says_so():
    with AsyncBatchedCollector([gym_lanes("CartPole-v1", 1)] * 2, Samples(4, choices=2), frames_per_batch=8) as c:
        c.next()
        assert "lanes are asynchronous" in c.state_dict()["resume"]["why"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lanes": 5}, "was saved with 5 lanes, this worker has 2"),
        ({"format": 99}, "has format 99"),
        ({"current": [torch.zeros(2, 9)]}, "was saved from another env"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(change, told):
    def make():
        torch.manual_seed(0)
        return Collector(gym_lanes("CartPole-v1", 2)(), EchoPolicyFor4(), frames_per_batch=8)

    c = make()
    c.set_seed(0)
    c.next()
    state = c.state_dict()
    state["resume"] = {**state["resume"], **change}
    with pytest.raises(CorruptState, match=told):
        c.load_state_dict(state)
    untouched = make()
    untouched.set_seed(0)
    untouched.next()
    same(c.next(), untouched.next())


class EchoPolicyFor4(nn.Module):
    def forward(self, observation):
        return (observation.sum(-1) > 0).long()


def test_another_env_is_refused():
    one = Collector(GymEnv(CountingEnv((3,))), EchoPolicy(), frames_per_batch=4)
    one.next()
    two = Collector(GymEnv(gym.wrappers.TimeLimit(CountingEnv((3,)), 9)), EchoPolicy(), frames_per_batch=4)
    with pytest.raises(CorruptState, match="the saved state belongs to"):
        two.load_state_dict(one.state_dict())


# ---- a rollout that reached nobody (Ctrl-C) -------------------------------------------------------------------------


def counting():
    return Collector(CountingEnv((9,)), EchoPolicy(), frames_per_batch=4, total_frames=-1)


def test_nobody_goes_on_after_a_rollout_that_was_lost():
    with counting() as first, counting() as second:
        seen = int(first.next()["collector", "traj_ids"][-1])
        first.next()
        first._backend.rollout_lost()
        second.load_state_dict(first.state_dict())
        for collector in (first, second):
            batch = collector.next()
            assert int(batch["collector", "traj_ids"][0]) > seen
            assert int(batch["observation"][0, 2]) == 0


@pytest.mark.parametrize("act", ["set_seed", "load_state_dict"])
def test_who_says_where_to_go_on_begins_there_once(act):
    with counting() as first, counting() as second:
        first.next()
        second.next()
        given = 5 if act == "set_seed" else second.state_dict()
        first._backend.rollout_lost()
        for collector in (first, second):
            getattr(collector, act)(given)
        same(first.next(), second.next())
