"""Datasets are read by the libraries whose formats they are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from reap.collectors import Collector
from reap.data import load, record
from reap.envs import SerialEnv
from tests.worlds.datasets import Everything, policy, same


def recorded(path, format, env="CartPole-v1", act=None, frames=300):
    collector = Collector(env, act, frames_per_batch=100, total_frames=frames)
    collector.set_seed(0)
    for _ in record(collector, path, format, seed=0):
        pass
    collector.shutdown()
    return load(path)


def test_minari_loads_it_by_name(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    ours = recorded(tmp_path / "cartpole-v0", "minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    theirs = minari.load_dataset("cartpole-v0")
    assert theirs.total_episodes == len(ours)
    assert theirs.total_steps == sum(ours.lengths)
    assert theirs.env_spec.id == "CartPole-v1"
    env = theirs.recover_environment()
    assert theirs.action_space == env.action_space
    assert theirs.observation_space == env.observation_space
    env.close()
    for found, episode in zip(theirs.iterate_episodes(), ours):
        assert theirs.action_space.contains(found.actions[0])
        assert np.array_equal(found.actions, episode["action"].argmax(-1).numpy())
        seen = torch.cat([episode["observation"], episode["next", "observation"][-1:]])
        assert np.array_equal(found.observations, seen.numpy())
        assert np.array_equal(found.rewards, episode["next", "reward"][:, 0].numpy())
        assert np.array_equal(found.terminations, episode["next", "terminated"][:, 0].numpy())
        assert found.terminations[-1] or found.truncations[-1]
    assert "cartpole-v0" in minari.list_local_datasets()


def test_minari_reads_dictionaries_and_images_without_loss(tmp_path):
    minari = pytest.importorskip("minari")
    ours = recorded(tmp_path / "images", "minari", SerialEnv(2, Everything), policy)
    theirs = minari.MinariDataset(tmp_path / "images" / "data")
    for found, episode in zip(theirs.iterate_episodes(), ours):
        assert np.array_equal(found.observations["image"][:-1], episode["image"].numpy())
        assert np.array_equal(found.infos["value"], episode["value"].view(torch.int16).numpy())


def test_hugging_face_datasets_load_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    ours = recorded(tmp_path / "cartpole", "parquet")
    theirs = datasets.load_dataset(str(tmp_path / "cartpole"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(theirs) == sum(ours.lengths)
    frame = theirs.with_format("numpy")[5]
    assert np.array_equal(frame["observation"], ours.frames["observation"][5].numpy())
    assert theirs["episode_index"][:] == [n for n, length in enumerate(ours.lengths) for _ in range(length)]
    assert theirs["frame_index"][: ours.lengths[0]] == list(range(ours.lengths[0]))


def test_pandas_reads_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    ours = recorded(tmp_path / "cartpole", "parquet")
    table = pandas.read_parquet(tmp_path / "cartpole" / "data")
    returns = table.groupby("episode_index")["next.reward"].apply(
        lambda rewards: float(np.concatenate([*rewards]).sum())
    )
    assert returns.tolist() == [float(one["next", "reward"].sum()) for one in ours]


def test_lerobot_finds_what_its_info_promises(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    ours = recorded(tmp_path / "robot", "lerobot")
    meta = tmp_path / "robot" / "meta"
    info = json.loads((meta / "info.json").read_text())
    assert info["codebase_version"] == "v2.1"
    assert (info["total_episodes"], info["total_frames"]) == (len(ours), sum(ours.lengths))
    lines = [json.loads(line) for line in (meta / "episodes.jsonl").read_text().splitlines()]
    assert [line["length"] for line in lines] == ours.lengths
    stats = [json.loads(line) for line in (meta / "episodes_stats.jsonl").read_text().splitlines()]
    index = 0
    for number, episode in enumerate(ours):
        place = info["data_path"].format(episode_chunk=number // info["chunks_size"], episode_index=number)
        table = parquet.read_table(tmp_path / "robot" / place)
        assert {*table.column_names} == {*info["features"]}
        assert table["index"].to_pylist() == list(range(index, index + len(episode)))
        assert table["next.done"].to_pylist()[-1] == [True]
        state = np.stack(table["observation.state"].to_pylist()).astype(np.float32)
        assert np.array_equal(state, episode["observation"].numpy())
        assert np.allclose(stats[number]["stats"]["observation.state"]["mean"], state.mean(0), atol=1e-6)
        index += len(episode)


def test_d4rl_names_and_shapes(tmp_path):
    h5py = pytest.importorskip("h5py")
    ours = recorded(tmp_path / "pendulum.hdf5", None, "Pendulum-v1", None, 600)
    frames = ours.frames
    with h5py.File(tmp_path / "pendulum.hdf5") as file:
        assert {"observations", "actions", "rewards", "terminals", "timeouts", "next_observations"} <= {*file}
        assert np.array_equal(file["observations"][:], frames["observation"].numpy())
        assert np.array_equal(file["next_observations"][:], frames["next", "observation"].numpy())
        assert np.array_equal(file["timeouts"][:], frames["next", "truncated"][:, 0].numpy())
        assert file["rewards"].dtype == np.float32
        assert file["timeouts"][:].sum() == len(ours) == 3


def test_numpy_and_tensordict_read_theirs(tmp_path):
    ours = recorded(tmp_path / "one.npz", None)
    with np.load(tmp_path / "one.npz") as file:
        assert np.array_equal(file["000000/observation"], ours[0]["observation"].numpy())
    mapped = recorded(tmp_path / "mapped", "memmap")
    assert same(TensorDict.load_memmap(tmp_path / "mapped"), mapped.frames)
