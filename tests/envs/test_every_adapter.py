"""The predictable world through every door: each adapter and mode must deliver it, bit for bit."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import AsyncEnvPool, DMEnv, GymEnv, ParallelEnv, PufferLibEnv, SerialEnv, TorchEnv
from reap.errors import UsageError, WorkerRaised
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from tests import example_count
from tests.worlds.dm import CountingDm
from tests.worlds.envs import Bindable, CountingPool, CountingTorch, CountingVector, Honest, ReadyPool, SkippingWorld

MODES = list(AutoresetMode)


def makers(lengths):
    return [lambda one=one, lane=lane: CountingEnv(one, lane) for lane, one in enumerate(lengths)]


DOORS = {
    "serial": lambda lengths: SerialEnv(len(lengths), makers(lengths)),
    "same step, by hand": lambda lengths: CountingVector(lengths, AutoresetMode.SAME_STEP),
    **{
        f"sync vector, {mode.value}": lambda lengths, mode=mode: SyncVectorEnv(makers(lengths), autoreset_mode=mode)
        for mode in MODES
    },
    "sync vector without copies": lambda lengths: SyncVectorEnv(
        makers(lengths), copy=False, autoreset_mode=AutoresetMode.SAME_STEP
    ),
    "pool": lambda lengths: CountingPool(lengths),
    "torch": lambda lengths: TorchEnv(CountingTorch(lengths)),
    "dm_env": lambda lengths: SerialEnv(
        len(lengths), [lambda one=one, i=i: DMEnv(CountingDm(one, i)) for i, one in enumerate(lengths)]
    ),
    "buffers copied": lambda lengths: PufferLibEnv(Honest(lengths)),
    "buffers of the slot": lambda lengths: PufferLibEnv(Bindable(lengths)),
    "processes": lambda lengths: ParallelEnv(len(lengths), makers(lengths), num_workers=min(2, len(lengths))),
}
# Lanes that come as they are ready cannot be cut short one by one.
READY = {
    "processes as they are ready": lambda lengths: (
        ParallelEnv(len(lengths), makers(lengths), ready=1) if len(lengths) > 1 else SerialEnv(1, makers(lengths))
    ),
    "threads as they are ready": lambda lengths: AsyncEnvPool(makers(lengths)),
    "as they are ready": lambda lengths: ReadyPool(lengths, max(1, len(lengths) // 2), seed=len(lengths)),
}

patterns = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)


@pytest.mark.parametrize("door", [*DOORS, *READY])
@given(lengths=patterns, steps=st.integers(1, 6), batches=st.integers(1, 5))
@example(lengths=[[1], [1]], steps=3, batches=3)  # every step ends an episode, in all lanes together
@example(lengths=[[3], [3]], steps=3, batches=3)  # every end is the end of a batch
@settings(max_examples=example_count(20), deadline=None)
def test_every_door(door, lengths, steps, batches):
    env = {**DOORS, **READY}[door](lengths)
    with Collector(env, EchoPolicy(), frames_per_batch=steps * len(lengths)) as c:
        world = CountingWorld(lengths)
        for _ in range(batches):
            batch = c.next()
            assert_same(batch.reshape(len(lengths), steps), world.batch(steps))


@pytest.mark.parametrize("door", [d for d in DOORS if "by hand" not in d])
@given(lengths=patterns, steps=st.integers(1, 6), limit=st.integers(1, 4))
@settings(max_examples=example_count(15), deadline=None)
def test_every_door_with_a_limit(door, lengths, steps, limit):
    env, size = DOORS[door](lengths), steps * len(lengths)
    with Collector(env, EchoPolicy(), frames_per_batch=size, max_frames_per_traj=limit) as c:
        world = CountingWorld(lengths, limit=limit)
        for _ in range(4):
            assert_same(c.next().reshape(len(lengths), steps), world.batch(steps))


@given(lengths=patterns, steps=st.integers(1, 8), batches=st.integers(1, 5))
@settings(max_examples=example_count(60), deadline=None)
def test_next_step_without_single_resets_skips_the_phantom(lengths, steps, batches):
    c = Collector(CountingVector(lengths, AutoresetMode.NEXT_STEP), EchoPolicy(), frames_per_batch=steps * len(lengths))
    world = SkippingWorld(lengths)
    for _ in range(batches):
        assert_same(c.next(), world.batch(steps))


def test_versions_a_policy_writes_move_up_with_their_frames():
    def policy(observation):
        return {"action": observation[..., :1], "policy_version": observation[..., 2].long()}

    env = CountingVector([(3, 1), (2,)], AutoresetMode.NEXT_STEP)
    batch = Collector(env, policy, frames_per_batch=16, track_policy_version=True).next()
    assert not batch["collector", "mask"].all()
    assert torch.equal(batch["policy_version"], batch["observation"][..., 2].long())
    assert torch.equal(batch["next", "policy_version"], batch["policy_version"])


def test_async_vector_env():
    lengths = [(3, 1), (2,)]
    for mode in MODES:
        c = Collector(
            AsyncVectorEnv(makers(lengths), autoreset_mode=mode, context="fork"), EchoPolicy(), frames_per_batch=8
        )
        world = CountingWorld(lengths)
        for _ in range(4):
            assert_same(c.next(), world.batch(4))
        c.shutdown()


def test_num_envs_and_seeds():
    env = GymEnv("CartPole-v1", num_envs=3)
    assert env.batch_size == torch.Size([3])
    c = Collector(env, frames_per_batch=90)
    assert c.set_seed(1) == 1864546186
    batch = c.next()
    assert np.array_equal(batch["observation"][0, 0], gym.make("CartPole-v1").reset(seed=1)[0])
    assert np.array_equal(batch["observation"][1, 0], gym.make("CartPole-v1").reset(seed=4087425277)[0])


def test_num_envs_and_vectors_are_the_lanes_of_a_serial_env():
    def run(env):
        c = Collector(env, lambda observation: (observation[..., 0] > 0).long(), frames_per_batch=300)
        c.set_seed(4)
        return c.next()

    want = run(SerialEnv(3, "CartPole-v1"))
    assert (run(GymEnv("CartPole-v1", num_envs=3)) == want).all()
    for mode in MODES:
        vector = GymEnv("CartPole-v1", num_envs=3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
        assert (run(vector) == want).all()


def test_native_vector_env():
    c = Collector(gym.make_vec("CartPole-v1", 16, vectorization_mode="vector_entry_point"), frames_per_batch=16 * 100)
    for _ in range(3):
        batch = c.next()
        mask = batch["collector", "mask"]
        assert 0.8 < mask.float().mean() < 1
        rows = [batch[lane][mask[lane]] for lane in range(16)]
        for row in rows:
            going = ~row["next", "done"][:-1, 0]
            assert torch.equal(row["next", "observation"][:-1][going], row["observation"][1:][going])
            assert (row["observation"][1:][~going].abs() < 0.05).all()  # reset observations, never a last one
            assert (row["next", "reward"] == 1).all()  # a phantom's reward would be 0
    with pytest.raises(UsageError, match="cannot reset single lanes"):
        c.reset(3)


class Spaces(gym.Env):
    observation_space = gym.spaces.Dict(
        box=gym.spaces.Box(-1, 1, (2,), np.float32),
        one=gym.spaces.Discrete(3, start=2),
        inner=gym.spaces.Dict(many=gym.spaces.MultiDiscrete([2, 3]), same=gym.spaces.MultiDiscrete([4, 4])),
        pair=gym.spaces.Tuple((gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Box(0, 1, (2,), np.float32))),
    )
    action_space = gym.spaces.Dict(
        go=gym.spaces.Discrete(3, start=1),
        push=gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.MultiDiscrete([2, 2]))),
    )

    def __init__(self, seed):
        self.observation_space = gym.spaces.Dict(dict(type(self).observation_space.spaces))
        self.rng, self.t = np.random.default_rng(seed), 0

    def _observe(self):
        r = self.rng
        return {
            "box": r.uniform(-1, 1, 2).astype(np.float32),
            "one": np.int64(r.integers(2, 5)),
            "inner": {"many": np.array([r.integers(2), r.integers(3)]), "same": r.integers(0, 4, 2)},
            "pair": (r.random(2).astype(np.float32), r.random(2).astype(np.float32)),
        }

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._observe(), {"t": 0}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self._observe(), float(action["go"]), self.t >= 4, False, {"t": self.t}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("categorical", [False, True])
def test_vector_envs_read_every_space_as_single_envs_do(mode, categorical):
    def run(env):
        torch.manual_seed(0)
        c = Collector(env, frames_per_batch=30)
        return [c.next() for _ in range(2)]

    options = {"categorical_action_encoding": categorical, "info_keys": {"t": np.int64}}
    serial = SerialEnv(3, [lambda s=s: GymEnv(Spaces(s), **options) for s in range(3)])
    vector = GymEnv(SyncVectorEnv([lambda s=s: Spaces(s) for s in range(3)], autoreset_mode=mode), **options)
    for a, b in zip(run(serial), run(vector)):
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        assert (a == b).all()


def test_vector_env_that_raises_or_ends_without_a_last_observation():
    class Silent(CountingVector):
        def step(self, actions):
            obs, reward, terminated, truncated, _ = super().step(actions)
            return obs, reward, terminated, truncated, {}

    with pytest.raises(ValueError, match="lane 0.*no 'final_obs'"):
        Collector(Silent([(1,)], AutoresetMode.SAME_STEP), EchoPolicy(), frames_per_batch=4).next()

    class Raises(CountingVector):
        def step(self, actions):
            raise OSError("gone")

    with pytest.raises(WorkerRaised, match="step 0: env.step raised OSError"):
        Collector(Raises([(1,)], AutoresetMode.SAME_STEP), EchoPolicy(), frames_per_batch=4).next()

    class Mute(CountingVector):
        def __init__(self, lengths):
            super().__init__(lengths, AutoresetMode.SAME_STEP)
            self.metadata = {}

    with pytest.raises(UsageError, match="does not say how it resets"):
        Collector(Mute([(1,)]), frames_per_batch=4)
