"""trajs_per_batch: complete episodes only, in the order in which they end, none cut and none lost."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import SerialEnv
from reap.errors import UsageError
from reap.testing import CountingEnv, CountingWorld, EchoPolicy
from reap.trajectories import cu_seqlens
from tests import example_count
from tests.worlds.envs import CountingVector


def lanes(lengths):
    return SerialEnv(len(lengths), [lambda one=one, i=i: CountingEnv(one, i) for i, one in enumerate(lengths)])


def episodes(lengths, steps):
    """Complete episodes of the first `steps` steps of every lane, in the order in which they end: columns by key."""
    world = CountingWorld(lengths).batch(steps)
    ends = np.argwhere(world[("next", "done")][..., 0])
    begun = [0] * len(lengths)
    found = []
    for lane, t in sorted(ends.tolist(), key=lambda e: (e[1], e[0])):
        found.append({key: column[lane, begun[lane] : t + 1] for key, column in world.items()})
        begun[lane] = t + 1
    return found


patterns = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4)


@given(lengths=patterns, steps=st.integers(1, 7), wanted=st.integers(1, 5))
@settings(max_examples=example_count(30), deadline=None)
def test_padded_and_cat_hold_the_same_whole_episodes(lengths, steps, wanted):
    size, total = steps * len(lengths), 12 * steps * len(lengths)
    expected = episodes(lengths, 12 * steps)
    for form in ("padded", "cat"):
        c = Collector(
            lanes(lengths),
            EchoPolicy(),
            frames_per_batch=size,
            total_frames=total,
            trajs_per_batch=wanted,
            traj_format=form,
        )
        got = []
        for batch in c:
            if form == "padded":
                mask = batch["collector", "mask"]
                assert batch.batch_size == torch.Size([wanted, int(mask.sum(1).max())])
                got += [row[m] for row, m in zip(batch, mask)]
                assert (batch["observation"][~mask] == 0).all()
            else:
                assert batch.ndim == 1
                assert ("collector", "mask") not in batch.keys(True)
                offsets = cu_seqlens(batch)
                assert offsets.dtype is torch.int32
                assert len(offsets) == wanted + 1
                got += [batch[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
        assert len(got) == len(expected) // wanted * wanted
        for have, want in zip(got, expected):
            for key, column in want.items():
                assert np.array_equal(have[key].numpy(), column), key
            assert bool(have["next", "done"][-1])
            assert int(have["next", "done"].sum()) == 1


def test_one_env():
    c = Collector(CountingEnv((3, 1, 5)), EchoPolicy(), frames_per_batch=4, trajs_per_batch=3)
    batch = c.next()
    assert batch["collector", "mask"].sum(1).tolist() == [3, 1, 5]
    assert batch["observation"][2, :, 2].tolist() == [0, 1, 2, 3, 4]


def test_no_length_bias():
    class Random(gym.Env):
        observation_space = action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

        def __init__(self, seed):
            self.rng = np.random.default_rng(seed)

        def reset(self, *, seed=None, options=None):
            self.left = 1 + self.rng.geometric(0.1)
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.left -= 1
            return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}

    c = Collector(
        SerialEnv(8, [lambda s=s: Random(s) for s in range(8)]),
        frames_per_batch=160,
        trajs_per_batch=50,
        traj_format="cat",
    )
    lengths = []
    while len(lengths) < 6000:
        lengths += cu_seqlens(c.next()).diff().tolist()
    sequential = 1 + np.random.default_rng(99).geometric(0.1, 200_000)
    error = sequential.std() / np.sqrt(len(lengths))
    assert abs(np.mean(lengths) - sequential.mean()) < 4 * error
    for q in (0.5, 0.9, 0.99):
        assert (
            abs(
                np.mean(np.array(lengths) <= np.quantile(sequential, q))
                - np.mean(sequential <= np.quantile(sequential, q))
            )
            < 0.03
        )


def test_episodes_broken_off_are_dropped():
    c = Collector(lanes([(3,), (50,)]), EchoPolicy(), frames_per_batch=8, trajs_per_batch=1, reset_at_each_iter=True)
    for _ in range(5):
        batch = c.next()
        assert batch["observation"][0, :, 0].unique().tolist() == [0]  # lane 1 never gets to its end
        assert batch["observation"][0, :, 2].tolist() == [0, 1, 2]
    assert len(c._pipeline.whole._held[0]) <= 8


def test_longer_than_many_batches():
    c = Collector(lanes([(40,), (40,)]), EchoPolicy(), frames_per_batch=6, trajs_per_batch=2)
    batch = c.next()
    assert batch.batch_size == torch.Size([2, 40])
    assert torch.equal(batch["observation"][..., 2], torch.arange(40.0).expand(2, 40))


def test_postproc_hook_and_counts():
    seen = []
    c = Collector(
        lanes([(3,)]),
        EchoPolicy(),
        frames_per_batch=4,
        total_frames=12,
        trajs_per_batch=2,
        postproc=lambda b: b.set("x", b["action"]),
        post_collect_hook=seen.append,
    )
    batches = list(c)
    assert [b.batch_size[0] for b in batches] == [2, 2]
    assert [id(b) for b in seen] == [id(b) for b in batches]
    assert c.next() is None
    assert c.stats()["batches"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"traj_format": "ragged", "trajs_per_batch": 2}, "'padded' or 'cat', got 'ragged'"),
        ({"traj_format": "cat"}, "needs trajs_per_batch"),
        ({"trajs_per_batch": 0}, "at least 1"),
        ({"trajs_per_batch": 2, "split_trajs": True}, "split_trajs=True cannot be combined with it"),
        ({"trajs_per_batch": 2, "track_traj_ids": False}, "track_traj_ids=False"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(UsageError, match=message):
        Collector(lanes([(3,)]), EchoPolicy(), frames_per_batch=4, **options)


def test_cu_seqlens_wants_a_packed_batch():
    with pytest.raises(UsageError, match="packed batch"):
        cu_seqlens(Collector(lanes([(3,), (3,)]), EchoPolicy(), frames_per_batch=4).next())


def test_whole_episodes_of_a_seeded_or_restored_run_begin_there():
    c = Collector(CountingEnv((5,)), EchoPolicy(), frames_per_batch=3, trajs_per_batch=1)
    c.next()
    c.set_seed(1)
    assert c.next()["observation"][0, 0].tolist() == [0, 0, 0]
    c.load_state_dict(c.state_dict())
    assert c.next()["observation"][0, :, 2].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="set_truncated"):
        Collector(CountingEnv(), frames_per_batch=3, trajs_per_batch=1, set_truncated=True)


def test_whole_episodes_that_can_never_come():
    c = Collector(CountingEnv((50,)), EchoPolicy(), frames_per_batch=3, trajs_per_batch=1, reset_at_each_iter=True)
    with pytest.raises(UsageError, match="no episode can ever be complete"):
        c.next()


def test_whole_episodes_of_a_rollout_without_a_frame():
    env = CountingVector([(1,), (1,)], AutoresetMode.NEXT_STEP)
    c = Collector(env, EchoPolicy(), frames_per_batch=2, trajs_per_batch=4)
    assert c.next()["collector", "mask"].tolist() == [[True]] * 4
