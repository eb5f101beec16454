"""TorchRL's own buffers, filled by every kind of collector. (What TorchRL writes there: tests/interop.)"""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("torchrl")
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)

from reap.collectors import Collector, MultiSyncCollector
from reap.envs import GymEnv
from reap.errors import UsageError, WorkerRaised
from reap.testing import CountingEnv, no_leaks
from tests.worlds.background import IN_STEP, KINDS, EchoPolicy, check_rows, check_streams, lanes, make
from tests.worlds.faults import BOUND, within
from tests.worlds.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", IN_STEP)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage], ids=["tensor", "memmap"])
def test_every_lane_is_a_row_of_its_worker(kind, storage):
    """`[P, T]` into one dimension: rows of length T, as TorchRL has it; with ndim=2 they are steps."""
    memory = ReplayBuffer(storage=storage(1000), batch_size=8)
    collector = make(kind, memory, total_frames=200)
    assert list(collector) == [None] * 10
    steps = 5 if kind == "sync" else 10  # a worker's share of the batch
    assert memory[:].batch_size == torch.Size([200 // steps, steps])
    assert sum(check_streams(memory[:].reshape(-1)).values()) == 200
    collector.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_whole_episodes_as_flat_rows(kind):
    sampler = SliceSampler(slice_len=2, traj_key=("collector", "traj_ids"))
    memory = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=16)
    collector = make(kind, memory, total_frames=200, trajs_per_batch=2, trajs_per_write=2)
    assert list(collector) == [None] * 10
    rows = memory[:]
    assert rows.ndim == 1
    assert sum(check_streams(rows, whole=True).values()) >= 150
    pairs = memory.sample()["observation"].reshape(-1, 2, 3)
    assert (pairs[:, 1] - pairs[:, 0] == torch.tensor([0.0, 0.0, 1.0])).all()
    collector.shutdown()


@pytest.mark.parametrize("kind", IN_STEP)
def test_in_the_background(kind):
    memory = ReplayBuffer(storage=LazyTensorStorage(1000, ndim=2), batch_size=8)
    collector = make(kind, memory, total_frames=400)
    collector.start()
    for _ in range(3):
        with collector.pause():
            count = memory.write_count
            collector.update_policy_weights_()
            assert memory.write_count == count
        until(lambda: not collector.is_running() or memory.write_count > count)
    until(lambda: not collector.is_running())
    assert collector.stats()["frames"] == 400
    collector.async_shutdown()
    assert sum(check_streams(memory[:].reshape(-1)).values()) == 400


@pytest.mark.parametrize("kind", KINDS)
def test_broken_off_and_broken(kind, tmp_path):
    """In the middle of a rollout, and by an error: at once, with its cause, and nothing is left behind."""
    begun = tmp_path / "begun"

    class Slow(CountingEnv):
        def step(self, action):
            begun.touch()
            time.sleep(0.01)
            if self.lane == 1 and self.episode == 2:
                raise OverflowError("boom")
            return super().step(action)

    def life(frames):
        begun.unlink(missing_ok=True)
        memory = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
        collector = make(kind, memory, env=Slow, frames_per_batch=frames)
        collector.start()
        if frames > 1000:
            until(begun.exists)
            with within(BOUND):
                collector.async_shutdown()
        else:
            with pytest.raises(WorkerRaised, match="boom"):
                until(lambda: not collector.is_running())
            assert collector.closed

    life(20)
    for frames in (20, 100_000):
        with no_leaks():
            life(frames)


def test_list_storage_keeps_frames_that_do_not_change():
    memory = ReplayBuffer(storage=ListStorage(1000), collate_fn=torch.stack, batch_size=8)
    collector = Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=10, total_frames=100, replay_buffer=memory)
    seen = []
    collector.set_post_collect_hook(lambda batch: seen.append(batch["observation"].clone()))
    list(collector)
    kept = torch.stack([memory[i]["observation"] for i in range(100)])
    assert torch.equal(kept, torch.cat(seen))


def test_rows_of_two_dimensions_hold_no_episodes():
    with pytest.raises(UsageError, match="ndim=1"):
        make("single", ReplayBuffer(storage=LazyTensorStorage(100, ndim=2)), trajs_per_batch=2)


def test_workers_of_different_lengths():
    memory = ReplayBuffer(storage=ListStorage(1000), collate_fn=lambda rows: rows, batch_size=4)
    collector = MultiSyncCollector(
        [lanes(0), lanes(2)],
        EchoPolicy(),
        frames_per_batch=[8, 12],
        cat_results=-1,
        total_frames=100,
        replay_buffer=memory,
    )
    list(collector)
    rows = torch.cat([memory[i] for i in range(len(memory))])
    assert sum(check_streams(rows).values()) == 100
    check_rows(rows)
    collector.shutdown()


def test_frames_one_after_another_need_one_dimension():
    with pytest.raises(UsageError, match="stores rows of 2 dimensions, but AsyncBatchedCollector delivers"):
        make("ready", ReplayBuffer(storage=LazyTensorStorage(1000, ndim=2)))
    memory = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    collector = make("ready", memory, total_frames=400)
    collector.start()
    until(lambda: not collector.is_running())
    collector.async_shutdown()
    assert memory[:].batch_size == torch.Size([400])
    assert sum(check_streams(memory[:]).values()) == 400
