"""An env that raised is made anew in its place: the process lives, the other lanes go on, one step is no frame."""

from __future__ import annotations

import functools

import pytest
import torch

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, ParallelEnv, SerialEnv
from reap.errors import UsageError, WorkerRaised
from reap.testing import CountingEnv, EchoPolicy, FaultyEnv
from tests.worlds.faults import healthy
from tests.worlds.restarts import Once, check_lane, check_lane_exactly, failing
from tests.worlds.waiting import until


def four(tmp_path, fault="raise"):
    """Lanes of which the second and the last one fail, in the middle of a rollout and in its last step."""
    return [
        healthy(),
        failing(tmp_path / "a", fault, at=20),
        healthy(2),
        failing(tmp_path / "b", fault, at=32, lane=3),
    ]


def here(makers, **options):
    return Collector(lambda: SerialEnv(4, makers), EchoPolicy(), frames_per_batch=64, total_frames=384, **options)


def parallel(makers, **options):
    limit = options.pop("max_frames_per_traj", None)
    env = ParallelEnv(4, makers, num_workers=2, **options)
    return Collector(env, EchoPolicy(), frames_per_batch=64, total_frames=384, max_frames_per_traj=limit)


def ready(makers, **options):
    """Those of a process are sorted into batches that hold as much of every lane."""
    pool = AsyncEnvPool(makers, envs_per_worker=2, backend="multiprocessing", **options)
    return Collector(pool, EchoPolicy(), frames_per_batch=64, total_frames=384)


def threads(makers, **options):
    pool = AsyncEnvPool(makers, envs_per_worker=2, **options)
    return Collector(pool, EchoPolicy(), frames_per_batch=64, total_frames=384)


def workers(makers, **options):
    halves = [lambda: SerialEnv(2, makers[:2]), lambda: SerialEnv(2, makers[2:])]
    return MultiSyncCollector(halves, EchoPolicy(), frames_per_batch=64, total_frames=384, cat_results=0, **options)


def workers_here(makers, **options):
    return workers(makers, workers="inline", **options)


def pids(collector):
    backend = collector._backend
    if hasattr(backend, "workers"):
        return [worker.child.pid for worker in backend.workers]
    lanes = getattr(backend.worker.env, "lane_workers", backend.worker.env)
    processes = getattr(lanes, "_processes", None) or getattr(lanes, "processes", None) or ()
    return [process.child.pid for process in processes]


@pytest.mark.parametrize("kind", [here, parallel, ready, threads, workers, workers_here])
@pytest.mark.parametrize("limit", [None, 4])
def test_only_that_lane_begins_anew(kind, limit, tmp_path):
    told = []
    options = {"on_failure": "restart", "on_restart": told.append, "max_frames_per_traj": limit}
    with kind(four(tmp_path), **options) as c:
        before = pids(c)
        rows = torch.cat([batch.clone() for batch in c], 1)
        assert pids(c) == before, "the process lives"
        stats = c.stats()
    mask = rows["collector", "mask"]
    assert stats["restarts"] == 2
    assert stats["frames"] == int(mask.sum())
    assert stats["episodes"] == int(rows["next", "done"].sum())
    assert sorted((~mask).sum(1).tolist()) == ([0, 0, 0, 0] if kind in (ready, threads) else [0, 0, 1, 1])
    for lane in range(4):
        assert not rows["observation"][lane][~mask[lane]].any()
        assert check_lane(rows[lane][mask[lane]], lane, limit) == lane % 2
        if limit is None:
            check_lane_exactly(rows[lane][mask[lane]], lane)
        else:
            count = rows["step_count"][lane][mask[lane]][:, 0]
            assert torch.equal(count.float(), rows["observation"][lane][mask[lane]][:, 2])
    for failure in told:
        assert failure.action == "restart"
        assert isinstance(failure.cause, WorkerRaised)
        assert isinstance(failure.cause.__cause__, RuntimeError)
        assert "env.step raised RuntimeError('an injected fault')" in str(failure.cause)
    lanes = {failure.cause.lane for failure in told}
    assert lanes == ({1} if kind in (workers, workers_here) else {1, 3})  # those of workers are counted by each


def test_a_reset_that_raises_cuts_nothing(tmp_path):
    """The episode before it is whole."""
    told = []

    class FailsToBegin(CountingEnv):
        def reset(self, **options):
            note = tmp_path / "note"
            if note.exists() and self.lane == 1 and self.resets == 3:
                note.unlink()
                raise RuntimeError("not this time")
            self.resets += 1
            return super().reset(**options)

        resets = 0

    (tmp_path / "note").touch()
    makers = [lambda n=n: FailsToBegin((3, 1, 5), n) for n in range(4)]
    with here(makers, on_failure="restart", on_restart=told.append) as c:
        rows = torch.cat([batch.clone() for batch in c], 1)
    (failure,) = told
    assert "lane 1: env.reset raised RuntimeError('not this time')" in str(failure.cause)
    assert rows["collector", "mask"].all()
    assert not rows["collector", "cut"].any()
    for lane in range(4):
        check_lane(rows[lane], lane)


@pytest.mark.parametrize("kind", [here, parallel, threads, workers])
def test_too_often(kind):
    makers = [healthy(), lambda: FaultyEnv(CountingEnv((3, 1, 5), 1), at=7, fault="raise"), healthy(2), healthy(3)]
    words = r"an injected fault.*the restart limit is reached: 3 within.*max_restarts=3"
    with kind(makers, on_failure="restart", max_restarts=3) as c, pytest.raises(WorkerRaised, match=words):
        list(c)


def test_where_it_cannot_be_made_anew_its_process_is_replaced(tmp_path):
    """The factory fails the second time: that is a failure of the process, which is replaced, its lanes with it."""
    told, note = [], tmp_path / "note"

    class Twice(Once):
        def __init__(self):
            if not note.exists() and not (tmp_path / "tried").exists():
                (tmp_path / "tried").touch()
                raise RuntimeError("the simulator is still there")
            super().__init__(note, "raise")

    note.touch()
    makers = [healthy(), Twice, healthy(2), healthy(3)]
    with parallel(makers, on_failure="restart", on_restart=told.append) as c:
        before = pids(c)
        rows = torch.cat([batch.clone() for batch in c], 1)
        assert [old == new for old, new in zip(before, pids(c))] == [False, True]
    (failure,) = told
    assert "the simulator is still there" in str(failure.cause)
    mask = rows["collector", "mask"]
    assert [check_lane(rows[lane][mask[lane]], lane) for lane in range(4)] == [1, 1, 0, 0]


def test_seeded_runs_are_the_same_again(tmp_path):
    found = []
    for _ in range(2):
        with here(four(tmp_path), on_failure="restart") as c:
            c.set_seed(3)
            found.append(torch.cat([batch.clone() for batch in c], 1))
        assert found[-1]["collector", "cut"].sum() == 2
    assert (found[0] == found[1]).all()


def test_into_a_buffer_in_the_background(tmp_path):
    """Workers write the rows themselves, and tell of what they have made anew."""
    told = []
    makers = four(tmp_path)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=8)
    halves = [lambda: SerialEnv(2, makers[:2]), lambda: SerialEnv(2, makers[2:])]
    options = {"on_failure": "restart", "on_restart": told.append, "replay_buffer": buffer}
    # As many frames as the buffer holds: how many are made while the faults are waited for is the machine's choice.
    with MultiAsyncCollector(halves, EchoPolicy(), frames_per_batch=16, total_frames=19_200, **options) as c:
        c.start()
        until(lambda: not c.is_running() and len(told) == 2)
        rows = buffer[:]
        assert len(rows) == c.stats()["frames"] >= 19_200
        assert c.stats()["restarts"] == 2
        assert c.stats()["workers_alive"] == 2
    for lane in range(4):
        assert check_lane(rows[rows["observation"][:, 0] == lane], lane) == lane % 2


def test_a_collector_here_says_why_it_cannot(tmp_path):
    for env, options, words in (
        (CountingEnv((3,)), {}, "use a factory of Gymnasium envs"),
        (healthy(), {"compact_obs": True}, "compact_obs needs whole rows"),
        (healthy(), {"reset_when_done": False}, "lets lanes rest"),
        (healthy(), {"deterministic": True}, "exactly where it was"),
        (healthy(), {"failure_dir": str(tmp_path)}, "no failure_dir"),
    ):
        with pytest.raises(UsageError, match=f"on_failure='restart' rebuilds the env of a lane that raised.*{words}"):
            Collector(env, EchoPolicy(), frames_per_batch=8, on_failure="restart", **options)
    with pytest.raises(UsageError, match=r"on_failure='drop' needs several workers"):
        Collector(healthy(), EchoPolicy(), frames_per_batch=8, on_failure="drop")


@pytest.mark.parametrize("kind", ["ParallelEnv", "SerialEnv"])
def test_torchrl_s_envs_say_why_they_cannot(kind):
    torchrl = pytest.importorskip("torchrl.envs")
    env = getattr(torchrl, kind)(2, functools.partial(torchrl.GymEnv, "CartPole-v1"))
    with pytest.raises(UsageError, match=r"on_failure='restart'.*TorchRL.*reap\.envs\.ParallelEnv"):
        Collector(env, frames_per_batch=8, on_failure="restart")
