"""What is recorded is what comes back, bit for bit and in whole episodes, in every format."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer, SliceSampler, export, load, record
from reap.envs import GymEnv, SerialEnv
from reap.errors import CorruptState, SpecMismatch, UsageError, WrongArgument
from reap.testing import CountingEnv
from tests.worlds.datasets import FORMATS, Everything, policy, same, whole_episodes


@pytest.mark.parametrize("format", FORMATS)
def test_every_column_of_every_type_comes_back(tmp_path, format):
    collector = Collector(SerialEnv(3, Everything), policy, frames_per_batch=36, total_frames=360)
    collector.set_seed(0)
    path = tmp_path / ("everything.npz" if format == "npz" else "everything.hdf5" if format == "hdf5" else "everything")
    seen = [batch.clone() for batch in record(collector, path, format, seed=0, metadata={"note": "a"})]
    collector.shutdown()
    expected = whole_episodes(seen)
    dataset = load(path)
    assert dataset.format == format
    assert len(dataset) == len(expected) > 20
    by_id = {int(one["collector", "traj_ids"][0]): one for one in expected}
    for episode in dataset:
        assert same(episode, by_id.pop(int(episode["collector", "traj_ids"][0])))
    assert not by_id
    assert dataset[-1]["value"].dtype is torch.bfloat16
    assert same(dataset[3], next(iter(dataset[3:4])))
    about = dataset.metadata
    assert (about["seed"], about["note"], about["collector"]) == (0, "a", "Collector")
    assert about["versions"]["torch"] == str(torch.__version__)


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataset_goes_from_every_format_to_every_other(tmp_path, format):
    collector = Collector("CartPole-v1", None, frames_per_batch=100, total_frames=400)
    collector.set_seed(1)
    for _ in record(collector, tmp_path / "first", "memmap", seed=1):
        pass
    collector.shutdown()
    first = load(tmp_path / "first")
    there = export(first, tmp_path / "there", format)
    back = export(there, tmp_path / "back", "memmap")
    assert there.metadata["env"] == back.metadata["env"] == "CartPole-v1"
    assert same(first.frames, there.frames)
    assert same(first.frames, back.frames)
    assert first.lengths == there.lengths == back.lengths
    assert there.metadata["created"] == first.metadata["created"]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_episodes_are_whole(tmp_path, kind):
    collector = kind([lambda: SerialEnv(2, Everything)] * 2, policy, frames_per_batch=24, total_frames=480)
    with record(collector, tmp_path / "of_workers", "parquet") as recording:
        batches = [batch.clone() for batch in collector]
    collector.shutdown()
    expected = whole_episodes(batches)
    found = load(tmp_path / "of_workers")
    assert recording.episodes == len(found) == len(expected)
    assert recording.frames == sum(found.lengths)
    by_id = {int(one["collector", "traj_ids"][0]): one for one in expected}
    assert all(same(one, by_id[int(one["collector", "traj_ids"][0])]) for one in found)


def test_a_collector_that_fills_a_buffer_is_recorded(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = Collector(CountingEnv, None, frames_per_batch=50, total_frames=200, replay_buffer=buffer)
    for nothing in record(collector, tmp_path / "counting"):
        assert nothing is None
    collector.shutdown()
    dataset = load(tmp_path / "counting")
    written = buffer[: sum(dataset.lengths)]
    assert torch.equal(dataset.frames["observation"], written["observation"])


@pytest.mark.parametrize("format", ["parquet", "memmap"])
def test_a_dataset_fills_a_buffer(tmp_path, format):
    collector = Collector(SerialEnv(2, Everything), policy, frames_per_batch=50, total_frames=200)
    for _ in record(collector, tmp_path / "one", format):
        pass
    collector.shutdown()
    dataset = load(tmp_path / "one")
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=SliceSampler(num_slices=4, strict_length=False), batch_size=16
    )
    buffer.extend(dataset.frames)
    assert len(buffer) == sum(dataset.lengths)
    ids = buffer.sample()["collector", "traj_ids"]
    assert set(ids.tolist()) <= {int(one["collector", "traj_ids"][0]) for one in dataset}


def test_after_it_is_closed_nothing_more_is_recorded(tmp_path):
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    with record(collector, tmp_path / "one") as one, record(collector, tmp_path / "two") as two:
        collector.next()
        one.close()
        collector.next()
    collector.next()
    collector.shutdown()
    assert load(tmp_path / "one").lengths == load(tmp_path / "two").lengths[: one.episodes]
    assert two.frames > one.frames
    one.close()


def test_ctrl_c_while_it_writes_costs_no_frame_and_doubles_none(tmp_path):
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    recording = record(collector, tmp_path / "one")
    add, times = recording.add, []

    def interrupted(batch):
        times.append(1)
        if len(times) == 2:
            signal.raise_signal(signal.SIGINT)
        add(batch)

    recording.add = interrupted
    batches = [collector.next().clone()]
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    batches += [collector.next().clone(), collector.next().clone()]
    recording.close()
    collector.shutdown()
    assert len(times) == 3
    assert same(load(tmp_path / "one").frames, torch.cat(whole_episodes(batches)))


def test_workers_that_write_to_a_buffer_are_told(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = MultiSyncCollector([CountingEnv], None, frames_per_batch=10, replay_buffer=buffer)
    with pytest.raises(UsageError, match=r"export\(\) what is in the buffer"):
        record(collector, tmp_path / "one")
    collector.shutdown()


def test_unfinished_episodes_are_left_out_or_kept(tmp_path):
    collector = Collector(Everything, policy, frames_per_batch=50, total_frames=50)
    collector.set_seed(3)
    batch = collector.next().clone()
    collector.shutdown()
    ended = whole_episodes([batch])
    open_frames = 50 - sum(map(len, ended))
    assert open_frames
    assert export(batch, tmp_path / "whole").lengths == [len(one) for one in ended]
    everything = export(batch, tmp_path / "all", unfinished=True)
    assert everything.lengths == [*(len(one) for one in ended), open_frames]
    assert not everything[-1]["next", "done"].any()


@pytest.mark.parametrize("option", ["compact_obs", "split_trajs", "return_same_td", "trajs_per_batch"])
def test_other_shapes_of_batches_hold_the_same_episodes(tmp_path, option):
    more = {option: 3 if option == "trajs_per_batch" else True}
    plain = Collector(SerialEnv(2, Everything), policy, frames_per_batch=40, total_frames=200)
    other = Collector(SerialEnv(2, Everything), policy, frames_per_batch=40, total_frames=200, **more)
    for name, collector in (("plain", plain), ("other", other)):
        collector.set_seed(5)
        for _ in record(collector, tmp_path / name):
            pass
        collector.shutdown()
    plain, other = load(tmp_path / "plain"), load(tmp_path / "other")
    by_id = {int(one["collector", "traj_ids"][0]): one for one in plain}
    assert len(other) > 10
    assert all(same(one, by_id[int(one["collector", "traj_ids"][0])]) for one in other)
    if option != "trajs_per_batch":  # which keeps those that do not fill a batch for itself
        assert len(other) == len(plain)


def test_only_some_entries_are_recorded(tmp_path):
    collector = Collector(CountingEnv, None, frames_per_batch=50, total_frames=100)
    keys = ["observation", ("next", "reward")]
    for _ in record(collector, tmp_path / "one.npz", keys=keys):
        pass
    collector.shutdown()
    found = load(tmp_path / "one.npz")[0]
    assert {*found.keys(True, True)} == {"observation", ("next", "reward"), ("collector", "traj_ids")}


def test_what_is_refused(tmp_path):
    collector = Collector(CountingEnv, None, frames_per_batch=10)
    batch = collector.next()
    with pytest.raises(UsageError, match="did you mean 'minari'"):
        record(collector, tmp_path / "x", "minary")
    with pytest.raises(WrongArgument, match=r"record\(\) takes a collector"):
        record(batch, tmp_path / "x")
    with pytest.raises(UsageError, match="already exists"):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        record(collector, tmp_path / "full")
    with pytest.raises(UsageError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="keys contains 'nothing'"):
        export(batch, tmp_path / "x", keys=["nothing"], unfinished=True)
    with pytest.raises(UsageError, match="no episode ends"):
        export(batch[:1], tmp_path / "y")
    with pytest.raises(TypeError):
        record(collector, tmp_path / "x", metadata={"a": object()})
    with record(collector, tmp_path / "z"):
        collector.next()
        with pytest.raises(CorruptState, match="written when a recording is closed"):
            load(tmp_path / "z")
    collector.shutdown()


def test_a_batch_of_another_shape_is_told(tmp_path):
    collector = Collector(CountingEnv, None, frames_per_batch=10)
    recording = record(collector, tmp_path / "x")
    batch = collector.next()
    with pytest.raises(SpecMismatch, match="'observation' is torch.float64"):
        recording.add(batch.clone().set("observation", batch["observation"].double()))
    recording.close()
    collector.shutdown()


def test_discrete_actions_are_numbers_for_others_and_one_hot_for_us(tmp_path):
    h5py = pytest.importorskip("h5py")
    collector = Collector(GymEnv("CartPole-v1"), None, frames_per_batch=200, total_frames=200)
    for batch in record(collector, tmp_path / "one.hdf5"):
        pass
    collector.shutdown()
    dataset = load(tmp_path / "one.hdf5")
    assert dataset[0]["action"].shape[-1] == 2
    with h5py.File(tmp_path / "one.hdf5") as file:
        assert file["actions"].shape == file["rewards"].shape == file["terminals"].shape == (len(dataset.frames),)
        assert np.array_equal(file["actions"][:], dataset.frames["action"].argmax(-1).numpy())
