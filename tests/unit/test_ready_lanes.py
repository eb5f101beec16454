"""Lanes that answer in any order: every schedule is sorted into the same frames, without a process or a thread."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.core.worker import Plan, Worker
from reap.testing import CountingWorld, EchoPolicy, assert_same
from tests.worlds.ready import Scripted


def schedule(seed, uneven):
    """Return a function that draws which of the waiting lanes answer; `uneven`: how often the last one does first."""
    generator = np.random.default_rng(seed)

    def choose(waiting, most):
        left = range(waiting, waiting - generator.integers(1, min(waiting, most) + 1), -1)
        return [n - 1 if generator.random() < uneven else int(generator.integers(n)) for n in left]

    return choose


schedules = given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 6),
    st.builds(schedule, st.integers(0, 2**32), st.sampled_from([0, 0.5, 0.95])),
)


@schedules
def test_any_schedule_gives_every_lane_its_frames_in_order(lengths, most, steps, choose):
    lanes = len(lengths)
    env = Scripted(lengths, min(most, lanes), choose)
    world = CountingWorld(lengths)
    with Collector(env, EchoPolicy(), frames_per_batch=lanes * steps, total_frames=lanes * steps * 4) as collector:
        batches = [batch.clone() for batch in collector]
    assert len(batches) == 4
    for batch in batches:
        want = world.batch(steps)
        want[("collector", "traj_ids")] = batch["collector", "traj_ids"].numpy()  # numbered as episodes end
        assert_same(batch, want)
    frames = torch.cat(batches, 1).reshape(-1)
    check_ids(frames["collector", "traj_ids"], frames["observation"])


@schedules
def test_any_schedule_gives_a_stream_in_which_every_lane_is_whole(lengths, most, size, choose):
    env = Scripted(lengths, min(most, len(lengths)), choose)
    worker = Worker(Plan(lambda: env, EchoPolicy, lambda lanes: size, stream=True))
    batches = []
    for _ in range(4):
        slot = worker.pool.acquire()
        assert worker.fill(slot) == size
        batches.append({key: array[:, 0].copy() for key, array in slot.arrays.items()})
        worker.pool.release(slot)
    worker.close()
    columns = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    ids, lane_of = columns.pop(("collector", "traj_ids")), columns.pop(("env_index",))
    for lane, own in enumerate(lengths):
        want = CountingWorld([own], first_lane=lane).batch(int((lane_of == lane).sum()))
        for key, column in columns.items():
            np.testing.assert_array_equal(column[lane_of == lane], want[key][0], str(key))
    check_ids(ids, columns["observation",])


def check_ids(ids, seen):
    """Check that each trajectory id stands for one episode of one lane, and that each episode has one id."""
    pairs = {*zip(ids.tolist(), map(tuple, seen[:, :2].tolist()))}
    assert len(pairs) == len({trajectory for trajectory, _ in pairs}) == len({episode for _, episode in pairs})
