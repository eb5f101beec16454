"""What new users met when they exported, reloaded and gave datasets to other libraries."""

from __future__ import annotations

import pytest

from reap.collectors import Collector
from reap.data import export, load, record
from reap.errors import RecordingFailed
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
