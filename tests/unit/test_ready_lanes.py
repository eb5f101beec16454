"""Lanes that answer in any order: every schedule is sorted into the same frames, without a process or a thread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.core.env import Env
from reap.core.worker import Plan, Worker
from reap.envs import GymEnv, as_env
from reap.spec import LANE_AT, Leaf
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same


class Scripted(Env):
    """Lanes of CountingEnv. Of the lanes that were stepped, those that `choose` names answer."""

    runs_elsewhere = True

    def __init__(self, lengths, most, choose):
        self.envs = [CountingEnv(one, lane) for lane, one in enumerate(lengths)]
        spec = as_env(GymEnv(CountingEnv())).spec
        lane = {LANE_AT: Leaf((), torch.int64)}
        self.spec = replace(
            spec,
            observation={**spec.observation, **lane},
            lanes=most,
            ready_of=len(lengths),
            batched=True,
            rows="skipping",
            single_steps=False,
            single_resets=False,
            side=frozenset(lane),
        )
        self.has_after_step = True
        self._choose = choose

    def expect(self, action):
        pass

    def reset(self, lanes, into, seeds=None):
        self._seen = [env.reset()[0] for env in self.envs]
        self._stepped, self._new = [], list(range(len(self.envs)))
        self._hand = [self._new.pop(0) for _ in range(self.spec.lanes)]
        self._write(into)

    def _write(self, into):
        seen, lane_at = into
        seen[: len(self._hand)] = [self._seen[lane] for lane in self._hand]
        lane_at[:] = -1
        lane_at[: len(self._hand)] = self._hand

    def send(self, lanes, row):
        self._row = row
        self._stepped += zip(self._hand, row.action[0].copy())

    def recv(self):
        row, self._began = self._row, []
        if self._new:  # these lanes come back from the reset, without a frame
            self._hand = [self._new.pop(0) for _ in range(min(len(self._new), self.spec.lanes))]
            self._write(row.next)
            row.mask[:] = False
            return []
        came = [self._stepped.pop(at) for at in self._choose(len(self._stepped), self.spec.lanes)]
        self._hand = [lane for lane, _ in came]
        row.mask[len(came) :] = False
        for at, (lane, action) in enumerate(came):
            self._seen[lane], reward, terminated, truncated, _ = self.envs[lane].step(action)
            row.rewards[0][at] = reward
            row.terminated[at], row.truncated[at], row.done[at] = terminated, truncated, terminated or truncated
        self._write(row.next)
        for at, (lane, _) in enumerate(came):
            if row.done[at]:
                self._seen[lane] = self.envs[lane].reset()[0]
                self._began.append((at, lane))
        return []

    def after_step(self, row):
        for at, lane in self._began:
            row.after[0][at] = self._seen[lane]

    def close(self):
        pass


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
