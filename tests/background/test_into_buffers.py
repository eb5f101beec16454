"""replay_buffer=: every kind of collector fills every kind of buffer with the rows that happened."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from reap.collectors import AsyncCollector, Collector
from reap.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from reap.errors import UsageError, WorkerError, WrongState
from reap.testing import CountingEnv, EchoPolicy, no_leaks
from tests.worlds.background import IN_STEP, KINDS, buffer, check_rows, check_streams, lanes, make
from tests.worlds.faults import pids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, False),
        ({"split_trajs": True}, False),
        ({"extend_buffer": False}, False),
        ({"trajs_per_batch": 2}, True),
        ({"trajs_per_batch": 1, "trajs_per_write": 3}, True),
        ({"postproc": lambda batch: batch.set("mine", batch["observation"] * 2)}, False),
    ],
    ids=["plain", "split", "steps", "whole", "grouped", "postproc"],
)
def test_rows_are_what_happened(kind, options, whole):
    memory = buffer()
    collector = make(kind, memory, total_frames=400, **options)
    got = list(collector)
    assert got == [None] * 20
    assert collector.next() is None
    stats = collector.stats()
    assert (stats["frames"], stats["batches"], stats["completed"]) == (400, 20, True)
    rows = memory[:]
    counts = check_streams(rows, whole=whole)
    if whole:
        assert 360 <= sum(counts.values()) == memory.write_count <= 400 - (kind != "ready")  # those may all end at once
        runs = rows["collector", "traj_ids"].diff().ne(0).sum() + 1
        assert runs == len(rows["collector", "traj_ids"].unique())  # one after another, not interleaved
    else:
        assert sum(counts.values()) == memory.write_count == 400
        if kind not in ("async", "ready"):
            assert len(set(counts.values())) == 1
    if "postproc" in options:
        assert torch.equal(rows["mine"], rows["observation"] * 2)
    collector.shutdown()
    assert check_streams(memory[:], whole=whole) == counts  # the buffer outlives its collector


def test_whole_episodes_in_groups_of_their_own_write():
    writes = []

    class Told(ReplayBuffer):
        def extend(self, data):
            writes.append(data["collector", "traj_ids"].unique().numel())
            return super().extend(data)

    memory = Told(storage=LazyTensorStorage(1000))
    collector = make("single", memory, total_frames=200, trajs_per_batch=4, trajs_per_write=3)
    list(collector)
    assert set(writes) == {3}


@pytest.mark.parametrize("kind", IN_STEP)
def test_slices_of_what_workers_wrote(kind):
    memory = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=3), batch_size=63)
    collector = make(kind, memory, total_frames=800)
    list(collector)
    for _ in range(20):
        pieces = memory.sample()
        check_rows(pieces, 1.0)
        seen = pieces["observation"].reshape(-1, 3, 3)
        assert torch.equal(seen[:, 1:] - seen[:, :-1], torch.tensor([0.0, 0.0, 1.0]).expand(len(seen), 2, 3))
    collector.shutdown()


@pytest.mark.parametrize("kind", ["single", "sync"])
def test_a_ring_that_wraps_and_lies_on_disk(kind, tmp_path):
    memory = ReplayBuffer(storage=LazyMemmapStorage(70, scratch_dir=tmp_path), batch_size=32)
    collector = make(kind, memory, total_frames=600)
    for _ in collector:
        check_rows(memory.sample(), 1.0)
    assert (len(memory), memory.write_count) == (70, 600)
    check_rows(memory[:], 1.0)
    collector.shutdown()


@pytest.mark.parametrize("kind", IN_STEP)
def test_random_frames_first(kind):
    memory = buffer()
    collector = make(kind, memory, total_frames=200, init_random_frames=80)
    list(collector)
    rows = memory[:]
    check_rows(rows)
    echoed = (rows["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True)
    assert ((rows["action"] != echoed).sum()) == 80
    collector.shutdown()


@pytest.mark.parametrize("kind", IN_STEP)
def test_options_that_shape_rollouts(kind):
    memory = buffer()
    collector = (
        make(
            kind,
            memory,
            total_frames=120,
            set_truncated=True,
            max_frames_per_traj=4,
            track_policy_version=True,
            update_at_each_batch=True,
        )
        if kind != "single"
        else make(kind, memory, total_frames=120, set_truncated=True, max_frames_per_traj=4, track_policy_version=True)
    )
    list(collector)
    rows = memory[:]
    assert len(rows) == 120
    assert rows["next", "step_count"].max() == 4
    ends = rows["next", "truncated"].sum()
    assert ends >= 12
    assert "policy_version" in rows.keys()
    collector.shutdown()


@pytest.mark.parametrize("kind", ["single", "sync"])
def test_rows_without_a_frame_are_left_out(kind):
    memory = buffer()
    collector = make(kind, memory, total_frames=100, reset_when_done=False)
    list(collector)
    rows = memory[:]
    check_rows(rows, 1.0)
    assert len(rows) == collector.stats()["frames"] >= 100
    collector.shutdown()


@pytest.mark.parametrize("kind", IN_STEP)
def test_compact_rows(kind):
    memory = buffer()
    collector = make(kind, memory, total_frames=60, compact_obs=True)
    list(collector)
    rows = memory[:]
    assert len(rows) == 60
    assert ("next", "observation") not in rows.keys(True)
    assert ("next", "reward") in rows.keys(True)
    collector.shutdown()


def test_a_replacement_has_the_hooks_it_was_made_with_and_those_set_later(tmp_path):
    def before():
        (tmp_path / f"before-{os.getpid()}").touch()

    def after(batch):
        (tmp_path / f"after-{os.getpid()}").touch()

    with make("sync", buffer(), pre_collect_hook=before, on_failure="restart") as collector:
        collector.next()
        collector.set_post_collect_hook(after)
        os.kill(pids(collector)[1], signal.SIGKILL)
        while not collector.stats()["restarts"]:
            collector.next()
        collector.next()
        assert (tmp_path / f"after-{pids(collector)[1]}").exists()
        assert (tmp_path / f"before-{pids(collector)[1]}").exists()


def test_hooks_run_where_rows_are_written():
    """In the worker: what they see is there, and a hook may be changed later."""
    memory = buffer()

    def mark(batch):
        batch.set("who", torch.full(batch.batch_size, os.getpid()))

    collector = make("sync", memory, total_frames=80, post_collect_hook=mark)
    collector.next()
    collector.next()
    pids = set(memory[:]["who"].tolist())
    assert len(pids) == 2
    assert os.getpid() not in pids
    collector.set_post_collect_hook(lambda batch: batch.set("who", torch.zeros(batch.batch_size, dtype=torch.int64)))
    collector.next()
    assert (memory[:]["who"][-20:] == 0).all()
    collector.shutdown()


def test_what_is_written_goes_through_the_inverse_transform():
    class Halved:
        def inv(self, data):
            return data.set("observation", data["observation"] / 2)

        def __call__(self, data):
            return data.set("observation", data["observation"] * 2)

    for kind in ("single", "sync"):
        memory = buffer(transform=Halved())
        collector = make(kind, memory, total_frames=100)
        list(collector)
        fds, about = memory.handle()
        stored = ReplayBuffer.open([os.dup(fd) for fd in fds], about)[:]  # as they lie there: no transform
        assert torch.equal(stored["observation"] * 2, memory[:]["observation"])
        check_rows(memory[:], 1.0)
        check_rows(memory.sample(), 1.0)
        collector.shutdown()


def test_one_worker_and_unbatched_envs():
    memory = buffer()
    for collector in (
        AsyncCollector(
            lambda: CountingEnv((3, 1, 5), 0), EchoPolicy(), frames_per_batch=10, total_frames=50, replay_buffer=memory
        ),
        Collector(CountingEnv((3, 1, 5), 0), EchoPolicy(), frames_per_batch=10, total_frames=50, replay_buffer=memory),
    ):
        assert list(collector) == [None] * 5
        collector.shutdown()
        assert check_streams(memory[:]) == {0: 50}
        memory.empty()


def test_several_collectors_fill_one_buffer():
    memory = buffer()
    one = make("sync", memory, total_frames=100)
    two = make("single", memory, total_frames=100)
    for _ in zip(one, two):
        pass
    assert memory.write_count == 200
    check_rows(memory[:], 1.0)
    one.shutdown()
    two.shutdown()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"replay_buffer": object()}, TypeError, "replay_buffer needs a method extend"),
        ({"replay_buffer": [], "extend_buffer": False}, TypeError, "replay_buffer needs a method add"),
        ({"return_same_td": True}, TypeError, "return_same_td"),
        ({"use_buffers": True}, TypeError, "use_buffers"),
        ({"extend_buffer": False, "postproc": lambda b: b}, TypeError, "postproc"),
        ({"extend_buffer": False, "split_trajs": True}, TypeError, "split_trajs"),
        ({"extend_buffer": False, "trajs_per_batch": 1}, TypeError, "trajs_per_batch"),
        ({"trajs_per_write": 2}, ValueError, "trajs_per_batch"),
        ({"trajs_per_batch": 2, "trajs_per_write": 0}, ValueError, "trajs_per_write"),
        ({"trajs_per_batch": 2, "trajs_per_write": 2, "replay_buffer": None}, ValueError, "replay_buffer"),
    ],
)
def test_wrong_calls(options, kind, message):
    options = {"replay_buffer": buffer(), **options}
    with pytest.raises(kind, match=message) as caught:
        Collector(lanes(), EchoPolicy(), frames_per_batch=20, **options)
    assert isinstance(caught.value, UsageError)


def test_wrong_calls_on_workers():
    with pytest.raises(UsageError, match="max_lag"):
        make("async", buffer(), max_lag=1)
    stays = threading.Lock()
    with pytest.raises(UsageError, match="postproc.*is a threading lock"):
        make("sync", buffer(), postproc=lambda batch: stays and batch)
    collector = make("sync", buffer())
    with pytest.raises(WrongState, match="rollout"):
        collector.rollout()
    collector.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_other_rows_is_an_error_that_says_so(kind):
    memory = buffer()
    memory.extend(torch.zeros(3))
    collector = make(kind, memory)
    with pytest.raises((WorkerError, UsageError), match="the buffer's rows are"):
        collector.next()
    assert collector.closed


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind):
    def life():
        memory = buffer()
        with make(kind, memory, total_frames=60) as collector:
            list(collector)
        assert len(memory) == 60

    life()
    with no_leaks():
        life()
