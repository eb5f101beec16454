"""Checkpoints: whole or not there, whatever happens while they are written; and nothing of them is executed."""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import shutil
import signal
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reap import checkpoint
from reap._system.checked_files import write_manifest
from reap.collectors import Collector, MultiAsyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv, SerialEnv
from reap.errors import CorruptState, NoSpace, UsageError, WrongArgument
from reap.testing.faults import full_disk
from tests.worlds.resume import Samples, same


def parts(seed=0):
    torch.manual_seed(seed)
    policy = Samples(4, choices=2)
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    return {
        "collector": Collector(env, policy, frames_per_batch=26),
        "policy": policy,
        "optimizer": torch.optim.Adam(policy.parameters()),
    }


def learn(made):
    batch = made["collector"].next()
    loss = made["policy"].net(batch["observation"]).square().mean()
    made["optimizer"].zero_grad()
    loss.backward()
    made["optimizer"].step()
    return batch


def test_a_run_goes_on(tmp_path):
    one = parts()
    one["collector"].set_seed(3)
    for step in range(4):
        learn(one)
        checkpoint.save(tmp_path, step=step, **one)
    expected = [learn(one).clone() for _ in range(3)]
    two = parts(seed=1)
    learn(two)
    loaded = checkpoint.load(tmp_path, trusted=True, **two)
    assert (loaded.number, loaded.values) == (4, {"step": 3})
    for batch in expected:
        same(learn(two), batch)
    assert all(torch.equal(a, b) for a, b in zip(one["policy"].parameters(), two["policy"].parameters()))


def test_without_trust_nothing_is_unpickled(tmp_path, monkeypatch):
    one = parts()
    learn(one)
    used = one["collector"].state_dict()["traj_pool"]["traj_id"]
    checkpoint.save(tmp_path, **one)
    two = parts()
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr("reap.envs.adapters.gymnasium_state._Unpickler", None)
    checkpoint.load(tmp_path, **two)
    batch = two["collector"].next()
    assert batch["collector", "traj_ids"].min() >= used, "its episodes are new ones"
    assert two["collector"].stats()["frames"] == 52


def test_older_ones_are_kept_and_unfinished_ones_removed(tmp_path):
    for n in range(5):
        checkpoint.save(tmp_path, keep=2, n=n)
        if n == 2:
            (tmp_path / "checkpoint-00000004").mkdir()  # whoever wrote it was killed
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-0000000{n}" for n in (3, 5, 6)]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-00000006"
    assert checkpoint.load(tmp_path / "checkpoint-00000003").values == {"n": 2}


def test_killed_at_any_byte_the_one_before_is_whole(tmp_path):
    """A checkpoint of which only the first files, and of the last only the first bytes, are on the disk."""
    layer = nn.Linear(3, 2)
    checkpoint.save(tmp_path, layer=layer, n=1)
    whole = checkpoint.save(tmp_path, layer=layer, n=2)
    files = [whole / name for name in ("layer.pt", "n.pt", "checkpoint.json")]
    contents = [file.read_bytes() for file in files]
    for last, content in enumerate(contents):
        for size in {0, 1, len(content) // 2, len(content) - 1}:
            for place, file in enumerate(files):
                file.unlink(missing_ok=True)
                if place <= last:
                    file.write_bytes(contents[place][: size if place == last else None])
            assert checkpoint.load(tmp_path, layer=layer).values == {"n": 1}
    for file, content in zip(files, contents):
        file.write_bytes(content)
    assert checkpoint.load(tmp_path, layer=layer).values == {"n": 2}


@given(data=st.data())
def test_a_changed_byte_is_seen(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("changed")
    place = checkpoint.save(path, layer=nn.Linear(3, 2), n=1)
    file = data.draw(st.sampled_from(sorted(place.iterdir())))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    layer = nn.Linear(3, 2)
    before = [p.clone() for p in layer.parameters()]
    with pytest.raises(CorruptState):
        checkpoint.load(path, layer=layer)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters()))


def test_a_really_killed_writer(tmp_path):
    """Killed with SIGKILL while it writes one after another: what is loaded is whole, and never older than it said."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # only plain tensors: nothing of the parent's is touched
        os.close(reader)
        n = 0
        while True:
            n += 1
            checkpoint.save(tmp_path, keep=1, n=n, numbers=torch.full((50_000,), float(n)))
            os.write(writer, bytes([n]))
    os.close(writer)
    said = 0
    while said < 5:
        said = os.read(reader, 1)[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = os.read(reader, 100)
    os.close(reader)
    values = checkpoint.load(tmp_path).values
    assert values["n"] >= (rest[-1] if rest else said)
    assert (values["numbers"] == values["n"]).all()


def test_a_full_disk(tmp_path):
    checkpoint.save(tmp_path, n=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(NoSpace, match="does not fit on the disk; earlier ones are undamaged"):
            checkpoint.save(tmp_path, n=2, numbers=torch.zeros(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoint.load(tmp_path).values == {"n": 1}
    assert len(os.listdir(tmp_path)) == 1


def test_what_does_not_fit_leaves_everything_as_it_was(tmp_path):
    checkpoint.save(tmp_path, first=nn.Linear(3, 2), second=nn.Linear(5, 5))
    first, second = nn.Linear(3, 2), nn.Linear(4, 4)
    before = first.weight.clone()
    with pytest.raises(UsageError, match="(?s)second rejected its state from .*; nothing was loaded"):
        checkpoint.load(tmp_path, first=first, second=second)
    assert torch.equal(first.weight, before)


def test_a_hostile_file_is_not_executed(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    place = checkpoint.save(tmp_path, n=1)
    from reap._system.checked_files import save_tensors

    (place / "n.pt").unlink()
    about = json.loads((place / "checkpoint.json").read_text().splitlines()[0])
    about["files"]["n"] = save_tensors({"n": Hostile()}, place / "n.pt")
    (place / "checkpoint.json").unlink()
    write_manifest(place / "checkpoint.json", about)
    with pytest.raises(CorruptState, match="is damaged"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", ""])
def test_names_that_lead_elsewhere(name, tmp_path):
    place = checkpoint.save(tmp_path, n=1)
    about = json.loads((place / "checkpoint.json").read_text().splitlines()[0])
    about["files"] = {name: about["files"]["n"]}
    (place / "checkpoint.json").unlink()
    write_manifest(place / "checkpoint.json", about)
    with pytest.raises(CorruptState, match="names invalid files"):
        checkpoint.load(tmp_path)


def test_wrong_arguments(tmp_path):
    with pytest.raises(WrongArgument, match="path must be a directory, got 3"):
        checkpoint.save(3, n=1)
    with pytest.raises(UsageError, match="nothing to save"):
        checkpoint.save(tmp_path)
    with pytest.raises(WrongArgument, match="keep must be a whole number >= 0, got -1"):
        checkpoint.save(tmp_path, keep=-1, n=1)
    with pytest.raises(WrongArgument, match="policy is a function: it has no state_dict"):
        checkpoint.save(tmp_path, policy=lambda: 0)
    with pytest.raises(UsageError, match="holds no checkpoint: it is not a directory"):
        checkpoint.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint.load(tmp_path / "empty")
    assert checkpoint.newest(tmp_path / "nowhere") is None
    checkpoint.save(tmp_path / "one", n=1, layer=nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"has no 'policy', only \['layer', 'n'\]"):
        checkpoint.load(tmp_path / "one", policy=nn.Linear(2, 2))
    with pytest.raises(UsageError, match="'n' was saved as a value"):
        checkpoint.load(tmp_path / "one", n=nn.Linear(2, 2))
    with pytest.raises(WrongArgument, match="layer has no load_state_dict: int"):
        checkpoint.load(tmp_path / "one", layer=3)
    shutil.rmtree(tmp_path / "one")
    if os.geteuid():
        os.chmod(tmp_path, 0o500)
        with pytest.raises(UsageError, match="a checkpoint cannot be written there"):
            checkpoint.save(tmp_path / "two", n=1)
        os.chmod(tmp_path, 0o700)


def test_one_that_does_not_fit_holds_on_to_nothing(tmp_path):
    """What was to be saved can go: a collector with its memory, for one."""

    class Part(nn.Linear):
        pass

    part = Part(300, 300)
    gone = weakref.ref(part)
    with pytest.raises(NoSpace, match="does not fit on the disk"), full_disk(1000):
        checkpoint.save(tmp_path, policy=part)
    del part
    gc.collect()
    assert gone() is None


def running(kind):
    def make():
        return SerialEnv(2, lambda: GymEnv("CartPole-v1"))

    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=8)
    env = [make, make] if kind is MultiAsyncCollector else make()
    return kind(env, None, frames_per_batch=20, total_frames=60_000, replay_buffer=buffer), buffer


class Looks:
    """A part that looks, while it is saved, whether the collector rests."""

    def __init__(self, collector):
        self.collector, self.rests = collector, []

    def state_dict(self):
        self.rests.append(self.collector.paused_without(-1))
        return {}


@pytest.mark.parametrize("kind", [Collector, MultiAsyncCollector])
def test_a_collector_in_the_background_is_saved_with_its_buffer_at_one_moment(tmp_path, kind):
    collector, buffer = running(kind)
    collector.start()
    try:
        buffer.sample()
        looks = Looks(collector)
        checkpoint.save(tmp_path, buffer=buffer, looks=looks, collector=collector)
        assert looks.rests == [True]
        assert not collector.paused_without(-1), "it goes on by itself"
    finally:
        collector.async_shutdown()
    collector, buffer = running(kind)
    with collector:
        checkpoint.load(tmp_path, collector=collector, buffer=buffer, trusted=True)
        assert collector.stats()["frames"] == buffer.write_count > 0


def test_objects_that_are_left_out_are_told(tmp_path):
    one = parts()
    checkpoint.save(tmp_path, step=3, **one)
    assert checkpoint.load(tmp_path, policy=one["policy"]).left_out == ("collector", "optimizer")
    assert checkpoint.load(tmp_path, **one).left_out == ()


def test_scalars_of_numpy_are_values(tmp_path):
    values = {"best": np.float32(0.5), "mean": np.float64(3), "seen": [np.int64(2), {np.str_("on"): np.bool_(True)}]}
    checkpoint.save(tmp_path, **values)
    found = checkpoint.load(tmp_path).values
    assert found == {"best": 0.5, "mean": 3.0, "seen": [2, {"on": True}]}
    assert type(found["mean"]) is float
