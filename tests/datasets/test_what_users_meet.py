"""What new users met when they exported, reloaded and gave datasets to other libraries."""

from __future__ import annotations

import json
import re
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch

from reap.cli.main import main
from reap.collectors import Collector
from reap.data import LazyTensorStorage, ReplayBuffer, export, load, record
from reap.data.spaces import space_from, space_state
from reap.errors import CorruptState, RecordingFailed, UsageError, WrongArgument
from tests.worlds.datasets import FORMATS, same, whole_episodes


def played(env="CartPole-v1", policy=None, frames=200, **options):
    """The batches of a short run."""
    collector = Collector(env, policy, frames_per_batch=100, total_frames=frames, **options)
    collector.set_seed(0)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return batches


@pytest.mark.parametrize("format", FORMATS)
def test_relative_paths_are_taken(tmp_path, monkeypatch, format):
    monkeypatch.chdir(tmp_path)
    collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=200)
    collector.set_seed(0)
    seen = [batch.clone() for batch in record(collector, f"runs/one-{format}", format)]
    collector.shutdown()
    there = export(seen, f"more/two-{format}", format)
    found = load(f"runs/one-{format}", format)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    expected = whole_episodes(seen)
    assert len(found) == len(there) == len(expected) > 3
    for one, other, episode in zip(found, there, expected):
        assert same(one, episode)
        assert same(other, episode)


def test_a_failure_of_minari_itself_loses_no_recording(tmp_path, monkeypatch):
    storage = pytest.importorskip("minari.dataset.minari_storage")
    collector = Collector("CartPole-v1", frames_per_batch=100)
    recording = record(collector, tmp_path / "one", "minari")
    seen = [collector.next().clone(), collector.next().clone()]

    def fails(self):
        raise OSError("no size today")

    monkeypatch.setattr(storage.MinariStorage, "get_size", fails)
    with pytest.raises(RecordingFailed, match="no size today"):
        recording.close()
    collector.shutdown()
    assert all(map(same, load(tmp_path / "one"), whole_episodes(seen)))


def cut_in_half(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("format", "file"),
    [
        ("npz", "."),
        ("hdf5", "."),
        ("parquet", "data/train-00000-of-00001.parquet"),
        ("lerobot", "data/chunk-000/episode_000000.parquet"),
        ("minari", "data/main_data.hdf5"),
        ("memmap", "observation.memmap"),
    ],
)
def test_a_file_that_was_cut_short_is_told_with_its_path(tmp_path, format, file):
    export(played(), tmp_path / "one", format)
    cut_in_half(tmp_path / "one" / file)
    with pytest.raises(CorruptState, match="test_a_file_that_was_cut_short.*/one"):
        list(load(tmp_path / "one", format))
    with pytest.raises(CorruptState, match="test_a_file_that_was_cut_short.*/one"):
        export(load(tmp_path / "one", format), tmp_path / "two")
    with pytest.raises(CorruptState):
        _ = load(tmp_path / "one", format).frames


def test_an_episode_that_is_not_there_is_told(tmp_path):
    dataset = export(played(), tmp_path / "one")
    assert same(dataset[-1], dataset[len(dataset) - 1])
    with pytest.raises(IndexError, match=f"has {len(dataset)} episodes, and no episode 1000"):
        dataset[1000]


def recorded(path, format, env="CartPole-v1", policy=None, frames=200, **options):
    """A recording as `format`, and the same as memmap that is exported to it: both must look alike to others."""
    collector = Collector(env, policy, frames_per_batch=100, total_frames=frames, **options)
    collector.set_seed(0)
    with record(collector, path.with_name("memmap")):
        for _ in record(collector, path, format):
            pass
    collector.shutdown()
    first = load(path.with_name("memmap"))
    again = export(first, path.with_name(f"again_{path.name}"), format)
    found = load(path, format)
    assert same(first.frames, found.frames)
    assert same(first.frames, again.frames)
    return found, again


def test_counters_are_no_observations_of_d4rl(tmp_path):
    h5py = pytest.importorskip("h5py")
    both = recorded(
        tmp_path / "one.hdf5", "hdf5", "Pendulum-v1", max_frames_per_traj=40, track_policy_version=True, frames=300
    )
    batches = played("Pendulum-v1", max_frames_per_traj=40, track_policy_version=True, frames=300)
    for dataset in (*both, export(batches, tmp_path / "batches.hdf5")):
        with h5py.File(dataset.path) as file:
            assert np.array_equal(file["observations"][:], dataset.frames["observation"].numpy())
            assert np.array_equal(file["next_observations"][:], dataset.frames["next", "observation"].numpy())
            assert {"step_count", "next.step_count", "policy_version"} <= {*file["infos"]}


def test_counters_are_no_observations_of_minari(tmp_path):
    minari = pytest.importorskip("minari")
    env = gym.make("Pendulum-v1")
    for dataset in recorded(
        tmp_path / "one", "minari", "Pendulum-v1", max_frames_per_traj=40, track_policy_version=True, frames=300
    ):
        theirs = minari.MinariDataset(dataset.path / "data")
        assert theirs.observation_space == env.observation_space
        assert theirs.action_space == env.action_space
        for found, episode in zip(theirs.iterate_episodes(), dataset):
            assert np.array_equal(found.observations[:-1], episode["observation"].numpy())
            assert np.array_equal(found.infos["step_count"], episode["step_count"].numpy())


class Chosen(gym.Env):
    """Shows what it was given."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, space):
        self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.normal(size=3), {}

    def step(self, action):
        self.steps += 1
        shown = np.zeros(3)
        shown[: np.size(action)] = action
        return shown + self.np_random.normal() * 0, 0.0, self.steps == 5, False, {}


def scores(width, dtype=torch.float32):
    def policy(observation):
        return torch.randn(*observation.shape[:-1], width).to(dtype)

    return policy


SPACES = {
    "scores": (gym.spaces.Discrete(3), scores(3)),
    "bfloat16": (gym.spaces.Discrete(3), scores(3, torch.bfloat16)),
    "start": (gym.spaces.Discrete(3, start=5), None),
    "whole": (gym.spaces.Discrete(3), lambda observation: (torch.randn(*observation.shape[:-1], 3) * 9).long()),
    "several": (gym.spaces.MultiDiscrete([2, 3]), scores(5)),
    "one-hot": (gym.spaces.MultiDiscrete([2, 3]), None),
}


@pytest.mark.parametrize("name", SPACES)
def test_actions_are_what_the_env_was_given(tmp_path, name):
    h5py, minari = pytest.importorskip("h5py"), pytest.importorskip("minari")
    space, policy = SPACES[name]
    width = int(np.prod(space.shape))
    for dataset in recorded(tmp_path / "one.hdf5", "hdf5", lambda: Chosen(space), policy):
        given = dataset.frames["next", "observation"][:, :width].numpy().reshape(-1, *space.shape)
        with h5py.File(dataset.path) as file:
            assert file["actions"].dtype.kind == "i"
            assert np.array_equal(file["actions"][:], given)
        if name == "bfloat16":  # as torch finds the largest, negative ones too
            assert np.array_equal(dataset.frames["action"].argmax(-1).numpy(), given)
        assert len({*given.reshape(-1).tolist()}) == 3  # every choice was made
    (tmp_path / "other").mkdir()
    for dataset in recorded(tmp_path / "other" / "one", "minari", lambda: Chosen(space), policy):
        theirs = minari.MinariDataset(dataset.path / "data")
        assert theirs.action_space == space
        for found, episode in zip(theirs.iterate_episodes(), dataset):
            given = episode["next", "observation"][:, :width].numpy().reshape(-1, *space.shape)
            assert np.array_equal(found.actions, given)
            assert theirs.action_space.contains(found.actions[0])


def test_spaces_are_kept_in_json():
    boxes = [
        gym.spaces.Box(-1, 1, (2, 3), np.float32),
        gym.spaces.Box(np.array([-np.inf, 0.1]), np.array([0.7, np.inf]), dtype=np.float64),
        gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        gym.spaces.Box(-3, 4, (), np.int64),
    ]
    others = [gym.spaces.Discrete(4, start=-2), gym.spaces.MultiBinary((2, 2)), gym.spaces.MultiDiscrete([[2, 3]])]
    for space in (*boxes, *others):
        text = json.dumps(space_state(space), allow_nan=False)
        assert space_from(json.loads(text)) == space
    assert space_state(gym.spaces.Text(3)) is space_from(None) is None


def test_the_format_is_seen_from_the_suffix_or_asked_for(tmp_path):
    batches = played()
    assert export(batches, tmp_path / "one.parquet").format == load(tmp_path / "one.parquet").format == "parquet"
    assert export(batches, tmp_path / "run.v1").format == "memmap"
    for name in ("one.csv", "one.pt"):
        with pytest.raises(UsageError, match=r"files are \.npz, \.hdf5 or \.h5"):
            export(batches, tmp_path / name)
    (tmp_path / "two.bin").touch()
    with pytest.raises(UsageError, match="two.bin"):
        load(tmp_path / "two.bin")
    with pytest.raises(WrongArgument, match="got NoneType"):
        export(None, tmp_path / "none")


@pytest.mark.parametrize("name", ["max_frames_per_traj", "init_random_frames"])
def test_numbers_below_minus_one_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} must be .*-1.*-5"):
        Collector("CartPole-v1", frames_per_batch=10, **{name: -5})
    Collector("CartPole-v1", frames_per_batch=10, **{name: -1}).shutdown()


def test_the_command_line_tells_it_in_a_line(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(4, 2)\n")
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "other.pt")
    policy = ["--policy", f"{tmp_path}/mine.py:make", "--weights", f"{tmp_path}/other.pt"]
    for arguments, told in [
        (["show", f"{tmp_path}/other.pt"], "other datasets are directories"),
        (["collect", "CartPole-v1", "--frames", "-5", "--out", f"{tmp_path}/x"], "--frames must be at least 1, got -5"),
        (["collect", "CartPole-v1", *policy, "--out", f"{tmp_path}/x"], "does not fit the policy: .*size mismatch"),
    ]:
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert re.search(told, error)
        assert error.count("\n") == 1


def test_a_buffer_that_is_smaller_than_a_batch_is_told():
    buffer = ReplayBuffer(storage=LazyTensorStorage(30))
    with pytest.warns(UserWarning, match="room for 30 frames, and frames_per_batch=100") as told:
        Collector("CartPole-v1", frames_per_batch=100, replay_buffer=buffer).shutdown()
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = ReplayBuffer(storage=LazyTensorStorage(100))
        Collector("CartPole-v1", frames_per_batch=100, replay_buffer=buffer).shutdown()
