"""Several agents in one world: as a group and as lanes, with agents that leave and come back."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from benchmarks.envs_and_policies import Crowd
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import Collector, Evaluator
from reap.envs import GymEnv, PettingZooEnv, SerialEnv, TorchEnv, TorchPendulum
from reap.errors import SpecMismatch, UsageError, WorkerRaised, WrongArgument
from reap.testing import check_env
from tests import example_count
from tests.worlds.envs import PLAN, Town

KEY = ("agents", "observation")


def group_policy():
    return TensorDictModule(lambda o: o.sum(-1, keepdim=True), [KEY], [("agents", "action")])


def expected(plan, steps):
    """The group's columns, computed from the plan alone."""
    n, length = len(plan), 1 + max(b for stays in plan for _, b in stays)
    there = lambda i, t: any(a <= t <= b for a, b in plan[i])  # noqa: E731
    rows = []
    for step in range(steps):
        day, t = divmod(step, length)
        mask = [there(i, t) for i in range(n)]
        after = [there(i, t + 1) for i in range(n)]
        left = [m and not a for m, a in zip(mask, after)]
        rows.append(
            {
                KEY: [[i, day, t] if mask[i] else [0, 0, 0] for i in range(n)],
                ("agents", "mask"): mask,
                ("next", *KEY): [[i, day, t + 1] if mask[i] or after[i] else [0, 0, 0] for i in range(n)],
                ("next", "agents", "mask"): after,
                ("next", "agents", "reward"): [[t + 1 + i / 8 if mask[i] else 0] for i in range(n)],
                ("next", "agents", "terminated"): [[left[i] and i % 2 == 0] for i in range(n)],
                ("next", "agents", "truncated"): [[left[i] and i % 2 == 1] for i in range(n)],
                ("next", "agents", "done"): [[left[i] or not after[i]] for i in range(n)],
                ("next", "done"): [not any(after)],
            }
        )
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def test_a_group():
    c = Collector(Town(PLAN), group_policy(), frames_per_batch=7)
    batch = torch.cat([c.next() for _ in range(4)])
    for key, want in expected(PLAN, 28).items():
        assert np.array_equal(batch[key].numpy(), want), key
    assert batch["agents", "action"].shape == (28, 4, 1)
    assert torch.equal(batch["agents", "action"], batch[KEY].sum(-1, keepdim=True))
    assert ("next", "reward") not in batch.keys(True)
    assert batch["collector", "traj_ids"].tolist() == [s // 5 for s in range(28)]


stays = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(
    lambda lengths: [(2 * sum(lengths[:i]) + 2 * i, 2 * sum(lengths[:i]) + 2 * i + n) for i, n in enumerate(lengths)]
)


@given(plan=st.lists(stays, min_size=1, max_size=4), steps=st.integers(1, 9))
@settings(max_examples=example_count(40), deadline=None)
def test_any_coming_and_going(plan, steps):
    # somebody must be there at every step, or the day would be over early
    last = max(b for stay in plan for _, b in stay)
    plan = [[(0, last)], *plan]
    c = Collector(Town(plan), group_policy(), frames_per_batch=steps)
    batch = torch.cat([c.next() for _ in range(3)])
    for key, want in expected(plan, 3 * steps).items():
        assert np.array_equal(batch[key].numpy(), want), key


@pytest.mark.parametrize("plan", [PLAN, [[(0, 4)]] * 3])
def test_agents_in_any_order(plan):
    """A world may list those who are there in an order of its own, another one every step."""

    class Crowded(Town):
        @property
        def agents(self):
            return self._agents

        @agents.setter
        def agents(self, names):
            turn = self.t % len(names) if names else 0
            self._agents = names[turn:][::-1] + names[:turn]

        def __init__(self, plan):
            self.t = 0
            super().__init__(plan)

    c = Collector(Crowded(plan), group_policy(), frames_per_batch=7)
    batch = torch.cat([c.next() for _ in range(4)])
    for key, want in expected(plan, 28).items():
        assert np.array_equal(batch[key].numpy(), want), key


def test_worlds_as_lanes_of_a_serial_env():
    c = Collector(SerialEnv(2, lambda: PettingZooEnv(Town(PLAN))), group_policy(), frames_per_batch=28)
    batch = c.next()
    assert batch[KEY].shape == (2, 14, 4, 3)
    for lane in range(2):
        for key, want in expected(PLAN, 14).items():
            assert np.array_equal(batch[lane][key].numpy(), want), key


def test_agents_as_lanes():
    c = Collector(
        PettingZooEnv(Town(PLAN), mode="lanes"),
        lambda observation: observation.sum(-1, keepdim=True),
        frames_per_batch=40,
    )
    batch = torch.cat([c.next() for _ in range(2)], 1)
    want = expected(PLAN, 20)
    mask = batch["collector", "mask"]
    assert np.array_equal(mask.numpy(), want[("agents", "mask")].T)
    for ours, theirs in (
        (("observation",), KEY),
        (("next", "reward"), ("next", "agents", "reward")),
        (("next", "terminated"), ("next", "agents", "terminated")),
        (("next", "truncated"), ("next", "agents", "truncated")),
    ):
        assert np.array_equal(batch[ours].numpy(), np.swapaxes(want[theirs], 0, 1)), ours
    successor = np.swapaxes(want[("next", *KEY)], 0, 1)
    assert np.array_equal(batch["next", "observation"][mask].numpy(), successor[mask.numpy()])
    ids = batch["collector", "traj_ids"]
    assert (ids[~mask] == -1).all()
    for lane in range(4):  # one id per stay, and never the same twice
        stays_ = {}
        for t in range(20):
            if mask[lane, t]:
                stays_.setdefault(int(ids[lane, t]), []).append(t)
        for steps in stays_.values():
            assert steps == list(range(steps[0], steps[-1] + 1))
            assert batch["next", "done"][lane, steps[-1], 0] or steps[-1] == 19
    used = [set(ids[lane][mask[lane]].tolist()) for lane in range(4)]
    assert sum(map(len, used)) == len(set.union(*used))


def test_what_is_refused():
    class Mixed(Town):
        def action_space(self, agent):
            return gym.spaces.Discrete(2 if agent == "a0" else 3)

    with pytest.raises(SpecMismatch, match="agent 'a1' has action_space Discrete.3., 'a0' has Discrete.2."):
        PettingZooEnv(Mixed(PLAN))
    with pytest.raises(WrongArgument, match="takes a PettingZoo env, got int"):
        PettingZooEnv(3)
    with pytest.raises(UsageError, match="'group', 'lanes' or 'turns'"):
        PettingZooEnv(Town(PLAN), mode="both")
    wrong = TensorDictModule(lambda o: o.sum(), [KEY], [("agents", "action")])
    with pytest.raises(SpecMismatch, match="4 agents need"):
        Collector(Town(PLAN), wrong, frames_per_batch=4)

    class Raises(Town):
        def step(self, actions):
            raise OSError("flood")

    with pytest.raises(WorkerRaised, match="lane 0, step 0: env.step raised OSError"):
        Collector(Raises(PLAN), group_policy(), frames_per_batch=4).next()


@pytest.mark.parametrize("mode", ["group", "lanes"])
@pytest.mark.parametrize("kind", ["parallel", "aec"])
def test_a_real_one(mode, kind):
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    from pettingzoo.classic import rps_v2

    env = rps_v2.parallel_env(max_cycles=6) if kind == "parallel" else rps_v2.env(max_cycles=6)
    c = Collector(PettingZooEnv(env, mode=mode), frames_per_batch=40)
    batch = c.next()
    if mode == "group":
        assert batch["agents", "action"].shape == (40, 2, 3)
        assert batch["next", "agents", "reward"].sum(1).abs().max() == 0  # what one wins the other loses
        assert batch["next", "done"].sum() >= 5
    else:
        assert batch["action"].shape == (2, 20, 3)
        assert batch["next", "reward"].sum(0).abs().max() == 0
        assert batch["next", "truncated"].sum() >= 4


def test_memory_of_agents_as_lanes():
    class Stays(nn.Module):
        carry = {"seen": torch.zeros(1)}

        def forward(self, observation, seen):
            return observation[..., :1], seen + 1

    c = Collector(PettingZooEnv(Town(PLAN), mode="lanes"), Stays(), frames_per_batch=40)
    batch = torch.cat([c.next() for _ in range(2)], 1)
    mask = batch["collector", "mask"]
    for lane in range(4):
        count = 0
        for t in range(20):
            if mask[lane, t]:
                assert batch["seen"][lane, t, 0] == count
                count = 0 if batch["next", "done"][lane, t] else count + 1


def test_agents_are_truncated_by_a_limit():
    c = Collector(PettingZooEnv(Crowd(4, day=50)), None, frames_per_batch=9, max_frames_per_traj=3)
    batch = c.next()
    cut = torch.tensor([False, False, True] * 3)
    for flag in ("truncated", "done"):
        assert torch.equal(batch["next", "agents", flag][..., 0], cut[:, None].expand(9, 4))
    assert not batch["next", "agents", "terminated"].any()


@pytest.mark.parametrize("mode", ["group", "lanes"])
def test_an_agent_does_not_leave_in_silence(mode):
    class Silent(Crowd):
        def step(self, actions):
            seen, earned, over, cut, info = super().step(actions)
            return seen, earned, dict.fromkeys(over, False), cut, info

    c = Collector(PettingZooEnv(Silent(4, day=5), mode=mode), None, frames_per_batch=40)
    with pytest.raises(SpecMismatch, match="agent 'agent_3' was removed from env.agents, but"):
        c.next()


def test_plain_policies_of_a_group_name_what_they_read_by_its_last_part():
    def policy(observation, mask):
        return observation.sum(-1, keepdim=True) * mask[..., None]

    batch = Collector(Town(PLAN), policy, frames_per_batch=28).next()
    for key, want in expected(PLAN, 28).items():
        assert np.array_equal(batch[key].numpy(), want), key
    assert torch.equal(batch["agents", "action"], batch[KEY].sum(-1, keepdim=True) * batch["agents", "mask"][..., None])
    plain = Collector(Town(PLAN), lambda sight: sight.sum(-1, keepdim=True), frames_per_batch=28).next()
    assert torch.equal(plain["agents", "action"], plain[KEY].sum(-1, keepdim=True))


def test_a_class_is_not_an_env():
    class Game:
        possible_agents = ("a",)

        def observation_space(self, agent):
            raise AssertionError("it was called as if it were an env")

    with pytest.raises(WrongArgument, match="takes an env, got the class Game: call it"):
        PettingZooEnv(Game)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_finds_the_reward_of_a_group(backend):
    plan = [[(0, 3)], [(0, 1)]]

    def make():
        return PettingZooEnv(Town(plan))

    def still(observation, mask):
        return torch.zeros(*observation.shape[:-1], 1)

    with Evaluator(make, still, num_trajectories=2, backend=backend) as evaluator:
        found = evaluator.evaluate()
    returns = [1 + 2 + 3 + 4, 1 + 2 + 2 / 8]
    assert found["eval/reward"] == sum(returns) / 2
    with (
        Evaluator(make, still, num_trajectories=2, reward_keys=("next", "gold"), backend=backend) as evaluator,
        pytest.raises(UsageError, match=r"no \('next', 'gold'\); name .* reward_keys=.*'next', 'agents', 'reward'"),
    ):
        evaluator.evaluate()


class Stayers(Town):
    """Lists its agents after their end; `lasts[i]` is the last step of agent i, whose flag is True from then on."""

    def __init__(self, lasts, *, plan=None, silent=()):
        super().__init__(plan or [[(0, 99)] for _ in lasts])
        self.lasts, self.silent = lasts, silent

    def step(self, actions):
        seen, rewards, _, _, _ = super().step(actions)
        over = {name: self.t >= self.lasts[int(name[1:])] for name in actions}
        for name in self.silent:
            del rewards[name]
        return seen, rewards, over, dict.fromkeys(over, False), {}


def test_a_group_ends_when_every_agent_has_though_all_are_listed():
    c = Collector(Stayers([4, 2]), group_policy(), frames_per_batch=12)
    batch = c.next()
    assert batch["next", "done"][:, 0].tolist() == [False, False, False, True] * 3
    assert batch["next", "terminated"][:, 0].tolist() == [False, False, False, True] * 3
    assert batch[KEY][:, 0, 2].tolist() == [0, 1, 2, 3] * 3
    assert batch["agents", "mask"].all()
    assert batch["next", "agents", "mask"][3::4].any() == False  # noqa: E712
    assert (batch["collector", "traj_ids"] == torch.arange(3).repeat_interleave(4)).all()


def test_agents_as_lanes_end_though_all_are_listed():
    env = PettingZooEnv(Stayers([3, 3]), mode="lanes")
    batch = Collector(env, lambda observation: torch.zeros(2, 1), frames_per_batch=12).next()
    assert batch["next", "done"][..., 0].tolist() == [[False, False, True] * 2] * 2
    assert batch["observation"][..., 2].tolist() == [[0, 1, 2] * 2] * 2
    env = PettingZooEnv(Stayers([3, 1]), mode="lanes")  # the second is called back, step by step, until the first ends
    batch = Collector(env, lambda observation: torch.zeros(2, 1), frames_per_batch=12).next()
    assert batch["next", "done"][..., 0].tolist() == [[False, False, True] * 2, [True] * 6]
    assert batch["observation"][..., 2].tolist() == [[0, 1, 2] * 2] * 2
    env = PettingZooEnv(Stayers([3, 1], plan=[[(0, 99)], [(0, 0)]]), mode="lanes")  # the second leaves as it should
    batch = Collector(env, lambda observation: torch.zeros(2, 1), frames_per_batch=12).next()
    assert batch["next", "done"][0, :, 0].tolist() == [False, False, True] * 2
    assert batch["observation"][0, :, 2].tolist() == [0, 1, 2] * 2
    assert batch["collector", "mask"][1].tolist() == [True, False, False] * 2


@pytest.mark.parametrize("mode", ["group", "lanes"])
def test_check_env_remarks_what_agents_lack(mode):
    def remarks(**options):
        return check_env(lambda: PettingZooEnv(Stayers([4, 4], **options), mode=mode), steps=20)

    assert any("stay in env.agents" in one and "'a0'" in one for one in remarks())
    assert any("no reward for 'a1'" in one for one in remarks(silent=["a1"]))
    assert check_env(lambda: PettingZooEnv(Town(PLAN), mode=mode), steps=20) == []


def test_lanes_are_not_joined_and_the_way_is_told():
    with pytest.raises(
        UsageError, match=r"PettingZooEnv\(mode='lanes'\) already has several lanes.*MultiSyncCollector.*mode='group'"
    ):
        SerialEnv(2, lambda: PettingZooEnv(Town(PLAN), mode="lanes"))
    with pytest.raises(
        UsageError, match=r"TorchEnv already has several lanes.*MultiSyncCollector\(\[make_env\] \* 3.*ParallelEnv\(3"
    ):
        SerialEnv(3, lambda: TorchEnv(TorchPendulum(2)))
    with pytest.raises(UsageError, match="one kind, got GymEnv, PettingZooEnv$"):
        SerialEnv(2, [lambda: GymEnv("CartPole-v1"), lambda: PettingZooEnv(Town(PLAN))])


def test_the_next_root_has_no_reward():
    env = PettingZooEnv(Town(PLAN))
    stepped, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert ("agents", "reward") in stepped["next"].keys(True)
    assert ("agents", "reward") not in root.keys(True)
