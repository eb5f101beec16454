"""A collector that failed still gives its state; and no trajectory id is ever given twice, whatever state is loaded."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from reap import checkpoint
from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import GymEnv, SerialEnv
from reap.errors import WorkerDied, WorkerRaised, WrongState
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.background import KINDS, LENGTHS, MIX, buffer, check_rows, frame_numbers, make
from tests.worlds.faults import BOUND, pids, within
from tests.worlds.resume import through_a_file
from tests.worlds.waiting import until


class Boom(CountingEnv):
    """Raises in its episode 20."""

    def step(self, action):
        if self.episode == 20:
            raise OverflowError("boom")
        return super().step(action)


def ids_of(batch):
    return batch["collector", "traj_ids"].reshape(-1).tolist()


def until_it_fails(collector):
    ids, frames = set(), 0
    with pytest.raises((WorkerRaised, WorkerDied)):
        for batch in collector:
            ids.update(ids_of(batch))
            frames += batch.numel()
    return ids, frames


@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_that_failed_gives_its_state(kind, tmp_path):
    mine = EchoPolicy()
    first = make(kind, None, policy=mine, env=Boom, track_policy_version=True)
    with torch.no_grad():
        mine.weight.fill_(3.0)
    first.update_policy_weights_(mine)
    ids, frames = until_it_fails(first)
    state = through_a_file(first.state_dict())
    assert state["frames"] == frames == first.stats()["frames"]
    parts = [part for name, part in state.items() if name.startswith("worker")] or [state]
    assert all("boom" in part["resume"]["why"] for part in parts)
    checkpoint.save(tmp_path, collector=first)

    second = make(kind, None, policy=EchoPolicy(), track_policy_version=True)
    checkpoint.load(tmp_path, collector=second)
    assert second.stats()["frames"] == frames
    for _ in range(3):
        batch = second.next()
        assert ids.isdisjoint(ids_of(batch)), "an id that was delivered before"
        seen = batch["observation"]
        assert torch.equal(batch["action"], (seen * MIX).sum(-1, keepdim=True) * 3.0), "weights go on"
        assert (batch["policy_version"] == 1).all()
    assert second.stats()["frames"] == frames + 60
    assert second.stats()["episodes"] > first.stats()["episodes"]
    second.shutdown()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_that_was_killed(kind):
    """Twice over: ids stay new also after the second failure."""
    state, ids, frames = None, set(), 0
    for turn in range(3):
        collector = make(kind, None)
        if state is not None:
            collector.load_state_dict(state)
        for _ in range(4):
            batch = collector.next()
            assert turn == 0 or ids.isdisjoint(ids_of(batch))
            frames += batch.numel()
            del batch
        new = {i for _ in range(2) for i in ids_of(collector.next())}
        frames += 40
        os.kill(pids(collector)[1], signal.SIGKILL)
        with within(BOUND), pytest.raises(WorkerDied):
            for batch in collector:
                new.update(ids_of(batch))
                frames += batch.numel()
        assert ids.isdisjoint(new)
        ids |= new
        state = through_a_file(collector.state_dict())
        assert state["frames"] == frames
        assert "SIGKILL" in state["worker1"]["resume"]["why"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_failed_in_the_background(kind):
    memory = buffer()
    collector = make(kind, memory, env=Boom)
    collector.start()
    until(lambda: collector._runner.failure() is not None)
    with pytest.raises(WorkerRaised, match="boom"):
        collector.state_dict()  # told once
    state = collector.state_dict()
    # A worker that is ended between its last write and saying so has written a rollout that is not counted.
    assert 0 <= memory.write_count - state["frames"] <= (20 if kind in ("sync", "async") else 0)
    check_rows(memory[:], 1.0)


def test_one_that_was_shut_down_has_none():
    collector = make("single", None)
    collector.shutdown()
    with pytest.raises(WrongState, match="closed"):
        collector.state_dict()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_ids_are_new_with_more_or_fewer_workers(before, after):
    """One worker's episodes are much shorter than the others': its ids are far ahead."""

    def some(count):
        lanes = [lambda n=n: GymEnv(CountingEnv((1,) if n == 1 else (30,), n)) for n in range(count)]
        return MultiSyncCollector(lanes, EchoPolicy(), frames_per_batch=20 * count)

    first = some(before)
    ids = {i for _ in range(5) for i in ids_of(first.next())}
    state = first.state_dict()
    open_ids = {i for worker in range(before) for i in state[f"worker{worker}"]["resume"]["ids"].tolist()}
    first.shutdown()
    second = some(after)
    second.load_state_dict(state)
    new = {i for _ in range(5) for i in ids_of(second.next())}
    second.shutdown()
    assert new & ids <= open_ids, "only open episodes go on"


def test_what_asynchronous_workers_had_on_the_way_is_said():
    """Everything delivered stays delivered once, nothing comes twice, and what is missing is what the state says."""

    def some():
        lanes = [lambda w=w: SerialEnv(2, [lambda i=i: CountingEnv(LENGTHS[i], i) for i in (w, w + 1)]) for w in (0, 2)]
        return MultiAsyncCollector(lanes, EchoPolicy(), frames_per_batch=20)

    rows = []
    first = some()
    rows += [first.next().reshape(-1).clone() for _ in range(7)]
    state = through_a_file(first.state_dict())
    first.shutdown()
    second = some()
    second.load_state_dict(state)
    later: list = []
    while len(later) < 12 or {*torch.cat(later)["observation"][:, 0].tolist()} != {0, 1, 2, 3}:  # all have their turn
        later.append(second.next().reshape(-1).clone())
    second.shutdown()
    rows, missing = rows + later, 0
    seen = torch.cat(rows)["observation"].long().numpy()
    for lane in range(4):
        steps = np.diff(frame_numbers(lane, seen[seen[:, 0] == lane]))
        assert (steps > 0).all(), "none comes twice, and all in order"
        missing += int((steps - 1).sum())
    assert missing == state["in_flight"]["frames"] == 20 * state["in_flight"]["rollouts"]


def test_nothing_is_on_the_way_in_step():
    collector = make("sync", None)
    collector.next()
    assert collector.state_dict()["in_flight"] == {"frames": 0, "rollouts": 0}
    collector.shutdown()


def test_a_single_collector_whose_policy_raised():
    calls = []

    class Tired(EchoPolicy):
        def forward(self, observation):
            calls.append(1)
            if len(calls) > 60:
                raise RuntimeError("tired")
            return super().forward(observation)

    collector = Collector(GymEnv(CountingEnv((3,))), Tired(), frames_per_batch=10)
    ids, frames = until_it_fails(collector)
    state = collector.state_dict()
    assert state["frames"] == frames > 0
    assert int(state["traj_pool"]["traj_id"]) > max(ids)
