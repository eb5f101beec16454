"""Rows without a frame: lanes that rest, and everything that counts frames."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from reap.collectors import Collector, Evaluator
from reap.envs import PettingZooEnv, SerialEnv
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.envs import PLAN, CountingVector, Town
from tests.worlds.pettingzoo import Table


def test_set_truncated_marks_the_last_frame_of_a_short_batch():
    class Stop:
        def collection_stopped(self):
            Stop.n = getattr(Stop, "n", 0) + 1
            return Stop.n % 2 == 0

    batch = Collector(
        SerialEnv(2, lambda: CountingEnv((9,))),
        EchoPolicy(),
        frames_per_batch=8,
        set_truncated=True,
        interruptor=Stop(),
    ).next()
    assert batch["next", "truncated"][..., 0].tolist() == [[False, True, False, False]] * 2
    assert batch["next", "done"][..., 0].tolist() == [[False, True, False, False]] * 2


def test_lengths_count_frames_only():
    c = Collector(CountingVector([(3,), (2,)], AutoresetMode.NEXT_STEP), EchoPolicy(), frames_per_batch=40)
    for _ in range(3):
        c.next()
    assert {one["length"] for one in c.episodes()} == {2, 3}


def test_resting_lanes_show_the_policy_nothing_old():
    seen = []

    def policy(observation):
        seen.append(observation.clone())
        return observation[..., :1]

    c = Collector(
        SerialEnv(2, [lambda: CountingEnv((1,)), lambda: CountingEnv((9,), 1)]),
        policy,
        frames_per_batch=8,
        reset_when_done=False,
    )
    for _ in range(4):
        batch = c.next()
        batch["next", "observation"].fill_(float("nan"))
        del batch
    assert not torch.stack(seen).isnan().any()


def test_masked_rows_have_no_version():
    c = Collector(
        SerialEnv(2, [lambda: CountingEnv((1,)), lambda: CountingEnv((9,), 1)]),
        EchoPolicy(),
        frames_per_batch=8,
        reset_when_done=False,
        track_policy_version=True,
    )
    c.update_policy_weights_()
    batch = c.next()
    assert torch.equal(batch["policy_version"], batch["collector", "mask"].long())


def test_set_truncated_marks_frames_only():
    c = Collector(
        PettingZooEnv(Town(PLAN), mode="lanes"),
        lambda observation: observation[..., :1],
        frames_per_batch=4 * 3,
        set_truncated=True,
    )
    for _ in range(4):
        batch = c.next()
        mask, cut = batch["collector", "mask"], batch["next", "truncated"][..., 0]
        assert not cut[~mask].any()
        for lane in range(4):
            frames = mask[lane].nonzero().reshape(-1).tolist()
            assert not frames or cut[lane, frames[-1]]


def test_a_lane_without_a_frame_in_a_rollout_keeps_its_episode():
    """Two players, rollouts of one move each: half of the lanes make no frame, and their episode is not over."""
    c = Collector(Table(length=6), lambda observation: observation[..., :1], frames_per_batch=3, trajs_per_batch=2)
    whole = Collector(Table(length=6), lambda observation: observation[..., :1], frames_per_batch=60, trajs_per_batch=2)
    assert sorted(c.next()["collector", "mask"].sum(-1)) == sorted(whole.next()["collector", "mask"].sum(-1))


def test_evaluation_counts_frames_only():
    worlds = CountingVector(
        [(3,), (2,)], AutoresetMode.NEXT_STEP
    )  # every episode is followed by a step without a frame
    with Evaluator(lambda: worlds, EchoPolicy(), num_trajectories=4, frames_per_batch=40) as evaluator:
        assert evaluator.evaluate()["eval/episode_length"] == 2.5


def test_the_last_frame_is_marked_not_a_blank_one():
    from reap.core.columns.assemble_frames import mark_frames
    from reap.core.slot import FRAME

    frames = [TensorDict({"next": {"truncated": torch.zeros(1, dtype=torch.bool)}}, []) for _ in range(2)]
    column = np.full((4, 1), None, object)
    column[0, 0], column[1, 0] = frames
    mark_frames({FRAME: column})
    assert [bool(frame["next", "truncated"]) for frame in frames] == [False, True]
