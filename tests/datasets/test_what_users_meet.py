"""What new users met when they exported, reloaded and gave datasets to other libraries."""

from __future__ import annotations

import pytest

from reap.collectors import Collector
from reap.data import export, load, record
from reap.errors import CorruptState, RecordingFailed
from tests.datasets.test_round_trips import FORMATS, same, whole_episodes


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
