"""PufferLib-style envs: the predictable world with and without a copy, and what becomes of lost observations.

PufferLib itself pins an old Gymnasium and is not installed with reap; its interface is written out here, and its own
base class is used where it is there.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import PufferLibEnv
from reap.envs.adapters.puffer import PufferLanes
from reap.errors import SpecMismatch, UsageError, WorkerRaised, WrongArgument, WrongState
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from tests import example_count
from tests.worlds.envs import Auto, Bindable, Honest


class BoundForGood(Honest):
    """As C code does it: the addresses are taken once, whatever the attributes say later."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self._c = Bindable(lengths)
        self._c.bind(self.observations, self.rewards, self.terminals, self.truncations)

    def reset(self, seed=None):
        self._c.reset(seed)
        return self.observations, []

    def step(self, actions):
        self._c.step(actions)
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def reset_lanes(self, mask):
        self._c.reset_lanes(mask)


TRUE = {
    "copied": lambda lengths: PufferLibEnv(Honest(lengths)),
    "copied from C": lambda lengths: PufferLibEnv(BoundForGood(lengths)),
    "bound": lambda lengths: PufferLibEnv(Bindable(lengths)),
    "attributes": lambda lengths: PufferLibEnv(Honest(lengths), rebind=True),
    "as it is": Bindable,
}
worlds = given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
)


@pytest.mark.parametrize("door", TRUE)
@worlds
@example(lengths=[(1,), (1,), (1,)], steps=6, limit=None)  # every step ends every lane
@example(lengths=[(4,), (4, 2)], steps=4, limit=None)  # together, at the edge of the batch
@settings(max_examples=example_count(25), deadline=None)
def test_the_predictable_world(door, lengths, steps, limit):
    env = TRUE[door](lengths)
    c = Collector(env, EchoPolicy(), frames_per_batch=steps * len(lengths), max_frames_per_traj=limit)
    world = CountingWorld(lengths, limit=limit)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


class RepeatingWorld(CountingWorld):
    """What can be said where the last observation is lost: the one before it, and that it is not the true one."""

    def batch(self, steps):
        out = super().batch(steps)
        done = out[("next", "done")]
        out[("final_lost",)], out[("next", "final_lost")] = np.zeros_like(done), done
        out[("next", "observation")] = np.where(done, out[("observation",)], out[("next", "observation")])
        return out


@pytest.mark.parametrize("rebind", [False, True])
@worlds
@example(lengths=[(1,), (1,), (1,)], steps=6, limit=None)
@example(lengths=[(4,), (4, 2)], steps=4, limit=None)
@settings(max_examples=example_count(25), deadline=None)
def test_lost_finals_are_repeated_and_marked(rebind, lengths, steps, limit):
    env = PufferLibEnv(Auto(lengths), lost_finals="repeat", rebind=rebind)
    c = Collector(env, EchoPolicy(), frames_per_batch=steps * len(lengths))
    world = RepeatingWorld(lengths)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


@pytest.mark.parametrize("door", ["bound", "attributes"])
def test_the_envs_write_is_the_only_one(door):
    env = TRUE[door]([(3, 1), (2,)])
    inner, written, kept = env.lanes_env.env, [], []
    step = inner.step

    def watched(actions):
        written.append((inner.observations, inner.rewards, inner.terminals, inner.truncations))
        return step(actions)

    inner.step = watched
    c = Collector(env, EchoPolicy(), frames_per_batch=10)
    for _ in range(2):  # a third batch, while these are kept, would be copied out of its slot
        batch = c.next()
        kept.append((batch, batch.clone()))
        for t, (observations, *columns) in enumerate(written):
            assert np.shares_memory(observations, batch["next", "observation"].numpy())
            assert observations.ctypes.data == batch["next", "observation"][:, t].data_ptr()
            for column, key in zip(columns, ("reward", "terminated", "truncated")):
                assert column.ctypes.data == batch["next", key][:, t].data_ptr()
        written.clear()
        assert not np.shares_memory(inner.observations, batch["next", "observation"].numpy())  # nothing is kept
    c.next()
    for batch, copy in kept:
        assert (batch == copy).all()


def test_seeds():
    env = Auto([(3,), (2,)])
    c = Collector(PufferLibEnv(env, lost_finals="repeat"), EchoPolicy(), frames_per_batch=8, reset_at_each_iter=True)
    c.set_seed(2**40)
    c.next()
    c.next()
    assert env.seeds[1] == 2**40 % 2**31 == 0
    first = env.seeds[1:]
    assert len(set(first)) == len(first)  # the same seed again would be the same episodes again
    c.set_seed(2**40)
    assert env.seeds[-1] == 0
    c.shutdown()
    c.shutdown()
    assert env.closed == 1


def test_single_resets():
    c = Collector(PufferLibEnv(Bindable([(9,), (9,)])), EchoPolicy(), frames_per_batch=4)
    c.next()
    c.reset([1])
    assert c.next()["observation"][:, 0].tolist() == [[0, 0, 2], [1, 1, 0]]
    c = Collector(PufferLibEnv(Auto([(9,), (9,)]), lost_finals="repeat"), EchoPolicy(), frames_per_batch=4)
    with pytest.raises(UsageError, match="cannot reset single lanes"):
        c.reset([1])


def test_by_hand_a_step_after_the_end_is_a_new_episode():
    env = PufferLibEnv(Auto([(1, 3)]), lost_finals="repeat")
    td = env.reset()
    for _ in range(2):  # the first of them ends
        td["action"] = torch.zeros(1, 1)
        td = env.step(td)["next"]
    assert td["observation"].tolist() == [[0, 1, 1]]
    assert env.reset()["observation"].tolist() == [[0, 2, 0]]


def test_discrete_actions_and_pixels():
    class Camera(Bindable):
        single_observation_space = gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)
        single_action_space = gym.spaces.MultiDiscrete([3, 2])

        def __init__(self, lengths):
            super().__init__(lengths)
            self.observations = np.zeros((self.num_agents, 4, 4, 3), np.uint8)

        def reset(self, seed=None):
            self.observations[:] = 7
            return self.observations, []

        def step(self, actions):
            assert actions.shape == (2, 2)
            self.observations[:] = actions.sum(1)[:, None, None, None]
            self.rewards[:] = actions[:, 0]
            return self.observations, self.rewards, self.terminals, self.truncations, []

    batch = Collector(PufferLibEnv(Camera([(3,)] * 2), categorical_action_encoding=True), frames_per_batch=8).next()
    assert (batch["pixels"][:, 0] == 7).all()
    assert torch.equal(batch["next", "pixels"][..., 0, 0, 0].long(), batch["action"].sum(-1))
    assert torch.equal(batch["next", "reward"][..., 0].long(), batch["action"][..., 0])


def test_what_is_refused():
    with pytest.raises(UsageError, match="Auto resets inside step, .* autoreset = False .* lost_finals='repeat'"):
        Collector(Auto([(3,)]), frames_per_batch=2)
    with pytest.raises(WrongArgument, match="lost_finals must be 'error' or 'repeat', got 'zero'"):
        PufferLibEnv(Auto([(3,)]), lost_finals="zero")
    with pytest.raises(WrongArgument, match="PufferLibEnv takes an env with .*; CountingEnv lacks some"):
        PufferLibEnv(CountingEnv())
    with pytest.raises(WrongState, match="the env is already made"):
        Collector(Bindable([(3,)]), create_env_kwargs={"a": 1}, frames_per_batch=2)
    with pytest.raises(UsageError, match="BoundForGood ignores buffers assigned after construction"):
        Collector(PufferLibEnv(BoundForGood([(3,)]), rebind=True), frames_per_batch=2)

    class NoResets(Auto):
        autoreset = False

    with pytest.raises(UsageError, match=r"no reset_lanes\(mask\)"):
        PufferLibEnv(NoResets([(3,)]))

    class Emulated(Auto):
        emulated = {"observation_dtype": None}

    with pytest.raises(UsageError, match="Emulated is a PufferLib wrapper"):
        PufferLibEnv(Emulated([(3,)]))

    class Replaces(Bindable):
        def step(self, actions):
            return (self.observations.copy(), *super().step(actions)[1:])

    with pytest.raises(SpecMismatch, match="other arrays than the buffers"):
        Collector(PufferLibEnv(Replaces([(3,)])), EchoPolicy(), frames_per_batch=2).next()

    class Leaves(Honest):
        def step(self, actions):
            self.masks[1] = False
            return super().step(actions)

    with pytest.raises(UsageError, match=r"agents \[1\] have left"):
        Collector(PufferLibEnv(Leaves([(3,), (3,)])), EchoPolicy(), frames_per_batch=4).next()

    class Raises(Honest):
        def step(self, actions):
            raise OSError("out of memory")

    with pytest.raises(WorkerRaised, match="step 0: env.step raised OSError"):
        Collector(PufferLibEnv(Raises([(3,)])), EchoPolicy(), frames_per_batch=2).next()

    class Narrow(Honest):
        def step(self, actions):
            return (self.observations[:, :2], *super().step(actions)[1:])

    with pytest.raises(SpecMismatch, match="env returned observation"):
        Collector(PufferLibEnv(Narrow([(3,)])), EchoPolicy(), frames_per_batch=2).next()


def test_pufferlibs_own_base_class():
    pufferlib = pytest.importorskip("pufferlib")

    class Native(pufferlib.PufferEnv):
        def __init__(self, lengths, buf=None):
            self.single_observation_space = CountingEnv.observation_space
            self.single_action_space = CountingEnv.action_space
            self.num_agents = len(lengths)
            super().__init__(buf)
            self.envs = [CountingEnv(one, lane) for lane, one in enumerate(lengths)]

        reset, step, after_end = Auto.reset, Auto.step, Auto.after_end
        seeds: list = []

        def close(self): ...

    lengths = [(3, 1), (2,)]
    with pytest.raises(UsageError, match="Native resets inside step"):
        Collector(Native(lengths), frames_per_batch=8)
    for rebind in (False, True):
        env = PufferLibEnv(Native(lengths), lost_finals="repeat", rebind=rebind)
        c = Collector(env, EchoPolicy(), frames_per_batch=8)
        assert type(c.env) is PufferLanes
        world = RepeatingWorld(lengths)
        for _ in range(3):
            assert_same(c.next(), world.batch(4))
