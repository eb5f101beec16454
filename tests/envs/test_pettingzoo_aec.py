"""One agent at a time: every delivered row is a true transition of its agent, as PettingZoo's own loop tells it."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from reap.collectors import Collector
from reap.envs import PettingZooEnv, SerialEnv
from reap.envs.adapters.pettingzoo_aec import TurnLanes
from reap.errors import SpecMismatch, UsageError, WorkerRaised
from tests import example_count

pytest.importorskip("pettingzoo")
from tests.worlds.envs import PLAN, Town
from tests.worlds.pettingzoo import Table

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
MIX = torch.tensor([3.0, 5.0, 7.0])


def by_hand(env, choose, turns):
    """PettingZoo's loop: per agent, (seen, action, reward, seen next, terminated, truncated, game) in order of time."""
    streams = {name: [] for name in env.possible_agents}
    open_moves, game = {}, 0
    env.reset()
    while True:
        if not env.agents:
            assert not open_moves
            env.reset()
            game += 1
        name = env.agent_selection
        seen, earned, terminated, truncated, _ = env.last()
        if name in open_moves:
            streams[name].append((*open_moves.pop(name), earned, seen, terminated, truncated, game))
        if terminated or truncated:
            env.step(None)
            continue
        action = choose(name, seen) if turns else None
        if action is None:
            return streams
        open_moves[name] = seen, action
        env.step(action)
        turns -= 1


def echo(observation):
    return (observation * MIX).sum(-1, keepdim=True)


def echo_by_hand(name, seen):
    return echo(torch.from_numpy(seen)).numpy()


def frames(batches, lane):
    """One lane's frames of many batches, one after another."""
    kept = []
    for batch in batches:
        mask = batch["collector", "mask"][lane]
        assert not mask[int(mask.sum()) :].any()  # later rows have moved up
        kept.append(batch[lane][mask])
    return torch.cat(kept)


def compare(got, want):
    """A lane's frames are exactly these transitions; a new id for every game."""
    assert len(got) == len(want)
    if not want:
        return
    seen, action, reward, following, terminated, truncated, game = zip(*want)
    keys = list(seen[0]) if isinstance(seen[0], dict) else ["observation"]
    for key in keys:
        pick = (lambda o: o[key]) if isinstance(seen[0], dict) else (lambda o: o)
        assert np.array_equal(got[key].numpy(), np.stack([pick(o) for o in seen]))
        assert np.array_equal(got["next", key].numpy(), np.stack([pick(o) for o in following]))
    assert np.array_equal(got["action"].numpy(), np.stack(action))
    assert np.array_equal(got["next", "reward"][:, 0].numpy(), np.array(reward, np.float32))
    assert got["next", "terminated"][:, 0].tolist() == list(terminated)
    assert got["next", "truncated"][:, 0].tolist() == list(truncated)
    assert torch.equal(got["next", "done"], got["next", "terminated"] | got["next", "truncated"])
    ids = got["collector", "traj_ids"].tolist()
    assert len(set(zip(ids, game))) == len(set(ids)) == len(set(game))


tables = st.integers(1, 4).flatmap(
    lambda count: st.fixed_dictionaries(
        {
            "count": st.just(count),
            "order": st.lists(st.integers(0, count - 1), max_size=6),
            "deaths": st.dictionaries(st.integers(1, 9), st.lists(st.integers(0, count - 1), max_size=3), max_size=4),
            "length": st.integers(1, 10),
        }
    )
)


@given(settings_=st.lists(tables, min_size=1, max_size=3), steps=st.integers(1, 7), batches=st.integers(1, 4))
@settings(max_examples=example_count(80), deadline=None)
def test_any_order_and_any_deaths(settings_, steps, batches):
    settings_ = [{**one, "count": settings_[0]["count"]} for one in settings_]  # worlds of one kind
    count = settings_[0]["count"]
    for one in settings_:
        one["order"] = [i % count for i in one["order"]]
    lanes = count * len(settings_)
    makers = [lambda one=one: PettingZooEnv(Table(**one)) for one in settings_]
    c = Collector(SerialEnv(len(makers), makers), echo, frames_per_batch=steps * lanes)
    got = [c.next() for _ in range(batches)]
    made = 0
    for w, one in enumerate(settings_):
        streams = by_hand(Table(**one), echo_by_hand, steps * batches)
        for i, stream in enumerate(streams.values()):
            compare(frames(got, w * count + i), stream)
            made += len(stream)
    assert c.stats()["frames"] == made
    for batch in got:
        mask = batch["collector", "mask"]
        assert torch.equal(batch["agent"][mask], (torch.arange(lanes) % count).unsqueeze(1).expand(-1, steps)[mask])


def test_what_the_policy_said_stays_with_the_move():
    class Noisy(nn.Module):
        def forward(self, observation):
            noise = torch.rand(len(observation), 1)
            return echo(observation) + noise, noise

    c = Collector(Table(deaths={3: [1]}), Noisy(), frames_per_batch=9)
    got = [c.next() for _ in range(20)]
    for lane in range(3):
        rows = frames(got, lane)
        assert len(rows) > 5
        assert torch.equal(rows["action"], echo(rows["observation"]) + rows["output1"])
        assert len(rows["output1"].unique()) == len(rows)
        # the env got the very action that is delivered: a lone mover's reward tells
    alone = Collector(Table(count=1, order=(), length=4), Noisy(), frames_per_batch=12).next()[0]
    assert torch.equal(alone["next", "reward"], alone["next", "observation"][:, 2:] + alone["action"] / 64)


def test_memory_waits_with_its_lane():
    class Recurrent(nn.Module):
        carry = {"moves": torch.zeros(1)}

        def forward(self, observation, moves):
            return echo(observation), moves + 1

    c = Collector(Table(order=(0, 1, 1, 2), deaths={4: [2]}), Recurrent(), frames_per_batch=9)
    got = [c.next() for _ in range(20)]
    for lane in range(3):
        rows = frames(got, lane)
        ids = rows["collector", "traj_ids"]
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[1:] = ids[1:] != ids[:-1]
        number = torch.arange(len(ids)) - torch.where(begins, torch.arange(len(ids)), 0).cummax(0).values
        assert number.max() > 0 or lane == 2
        assert torch.equal(rows["moves"][:, 0], number.float())
        assert torch.equal(rows["next", "moves"][:, 0], number + 1.0)
        assert torch.equal(rows["is_init"][:, 0], begins)


def test_a_reset_in_the_middle_of_a_game():
    c = Collector(Table(length=20), echo, frames_per_batch=15)
    first = c.next()
    c.reset()
    second = c.next()
    for lane, stream in enumerate(by_hand(Table(length=20), echo_by_hand, 5).values()):
        compare(frames([first], lane), stream)
    table = Table(length=20)
    table.day = 0
    for lane, stream in enumerate(by_hand(table, echo_by_hand, 5).values()):
        compare(frames([second], lane), stream)
    assert not set(first["collector", "traj_ids"].unique().tolist()) & set(
        second["collector", "traj_ids"].unique().tolist()
    ) - {-1}


def test_by_hand_and_in_whole_episodes():
    batch = PettingZooEnv(Table(length=6)).rollout(20)
    assert batch.batch_size == (3, 6)
    assert batch["collector", "mask"].sum(1).tolist() == [2, 2, 2]
    whole = Collector(Table(length=6), echo, frames_per_batch=30, trajs_per_batch=4).next()
    assert whole["collector", "mask"].sum(1).tolist() == [2, 2, 2, 2]
    assert whole["next", "done"][:, 1].all()


@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3"])
def test_real_games_with_legal_moves(name):
    pytest.importorskip("pygame")
    game = __import__(f"pettingzoo.classic.{name}", fromlist=["env"])

    def legal(observation, action_mask):
        return (action_mask * (torch.rand(action_mask.shape) + 0.1)).argmax(-1)

    torch.manual_seed(0)
    c = Collector(game.env, legal, frames_per_batch=2 * 61)
    assert isinstance(c.env, TurnLanes)
    got = [c.next() for _ in range(8)]
    lanes = [frames(got, 0), frames(got, 1)]
    assert all((f["action_mask"].gather(1, f["action"].unsqueeze(1)) == 1).all() for f in lanes)  # none illegal
    moves = {f"player_{i + 1 if name.startswith('tic') else i}": iter(f["action"]) for i, f in enumerate(lanes)}

    def same(player, _):
        move = next(moves[player], None)
        return None if move is None else move.numpy()

    streams = by_hand(game.env(), same, 10**6)
    for got_, want in zip(lanes, streams.values()):
        # the last move of one is not delivered yet, so the other's answer is missing here
        assert 0 <= len(got_) - len(want) <= 1
        assert len(want) > 200
        compare(got_[: len(want)], want)
    ends = [f["next", "reward"][f["next", "done"]] for f in lanes]
    assert len(ends[0]) > 5
    both = min(map(len, ends))
    assert torch.equal(ends[0][:both], -ends[1][:both])  # what one wins the other loses


def test_masked_distributions_and_log_probabilities():
    pytest.importorskip("pygame")
    from pettingzoo.classic import tictactoe_v3

    class Net(nn.Module):
        def forward(self, observation, action_mask):
            scores = torch.linspace(0, 1, 9) + observation.float().flatten(-3).sum(-1, keepdim=True)
            return scores.masked_fill(action_mask == 0, -torch.inf)

    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(Net(), in_keys=["observation", "action_mask"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )
    c = Collector(SerialEnv(2, lambda: PettingZooEnv(tictactoe_v3.env())), policy, frames_per_batch=4 * 30)
    got = [c.next() for _ in range(3)]
    for lane in range(4):
        rows = frames(got, lane)
        wanted = policy.module[0].module(rows["observation"], rows["action_mask"])
        assert torch.equal(rows["logits"], wanted)
        assert torch.allclose(rows["action_log_prob"], Categorical(logits=wanted).log_prob(rows["action"]))
        assert rows["action_log_prob"].isfinite().all()


def test_a_world_that_could_be_parallel():
    pytest.importorskip("pygame")
    from pettingzoo.classic import rps_v2

    batch = Collector(PettingZooEnv(rps_v2.env(max_cycles=6), mode="turns"), frames_per_batch=48).next()
    rows = [frames([batch], lane) for lane in range(2)]
    assert [len(r) for r in rows] == [12, 12]
    assert [int(r["next", "truncated"].sum()) for r in rows] == [2, 2]


def test_what_is_refused():
    class Mixed(Table):
        def action_space(self, agent):
            return gym.spaces.Discrete(2 if agent == "a0" else 3)

    with pytest.raises(SpecMismatch, match="agent 'a1' has action_space Discrete.3., 'a0' has Discrete.2."):
        PettingZooEnv(Mixed())
    with pytest.raises(UsageError, match="cannot make it parallel; use mode='turns'"):
        PettingZooEnv(Table(), mode="group")
    with pytest.raises(UsageError, match=r"lane 2 has agents \['a0', 'a1', 'a2'\], lane 0 has \['a0', 'a1'\]"):
        SerialEnv(2, [lambda: PettingZooEnv(Table(2)), lambda: PettingZooEnv(Table(3))])
    with pytest.raises(UsageError, match="steps all its lanes at once"):
        Collector(Table(), frames_per_batch=9, reset_when_done=False)
    with pytest.raises(UsageError, match="resets single lanes"):
        Collector(Table(), frames_per_batch=9, max_frames_per_traj=3)

    class Raises(Table):
        def step(self, action):
            raise OSError("spilt")

    with pytest.raises(WorkerRaised, match="lane 0, step 0: env.step raised OSError"):
        Collector(Raises(), frames_per_batch=9).next()

    class Vanishes(Table):
        def step(self, action):
            super().step(action)
            self.agents = []

    with pytest.raises(SpecMismatch, match="agent 'a0' was removed from env.agents, but was neither"):
        Collector(Vanishes(), frames_per_batch=9).next()


@pytest.mark.parametrize("what", ["observation_space", "action_space"])
@pytest.mark.parametrize(("make", "mode", "lane"), [(Table, "turns", 3), (lambda: Town(PLAN), "group", 1)])
def test_worlds_with_other_spaces_are_not_joined(what, make, mode, lane):
    """Spaces that are equal may be other objects; of those that differ, both agents and both spaces are named."""
    SerialEnv(2, lambda: PettingZooEnv(make(), mode=mode)).close()
    other = make()
    setattr(other, what, lambda agent: gym.spaces.Discrete(3))
    told = rf"agent 'a0' in lane {lane} has {what} Discrete\(3\), agent 'a0' in lane 0 has Box.*; they must be equal"
    with pytest.raises(SpecMismatch, match=told):
        SerialEnv(2, [lambda: PettingZooEnv(make(), mode=mode), lambda: PettingZooEnv(other, mode=mode)])
