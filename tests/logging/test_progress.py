"""How far a collector is, in terminals of every kind."""

from __future__ import annotations

import io
import json

import pytest
import torch

from reap.collectors import Collector, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import UsageError, WrongArgument
from reap.loggers import JSONLLogger
from reap.testing import CountingEnv


@pytest.mark.parametrize("display", ["tqdm", "rich", "plain", "none", None])
def test_the_batches_are_the_collectors(display):
    file = io.StringIO()
    one = Collector(CountingEnv, None, frames_per_batch=50, total_frames=500)
    other = Collector(CountingEnv, None, frames_per_batch=50, total_frames=500)
    for collector in (one, other):
        collector.set_seed(0)
    shown = [batch.clone() for batch in one.progress(200, display=display, file=file)]
    plain = [batch.clone() for batch, _ in zip(other, range(4))]
    assert len(shown) == 4
    assert all(torch.equal(a["observation"], b["observation"]) for a, b in zip(shown, plain))
    assert len(list(one.progress(display=display, file=file))) == 6  # it goes on, to total_frames
    assert not list(one.progress(display=display, file=file))
    one.shutdown(), other.shutdown()
    text = file.getvalue()
    if display == "none":
        assert text == ""
    else:
        assert "/s · return" in text
        assert "500" in text


def test_a_plain_line_says_all_of_it():
    file = io.StringIO()
    collector = MultiSyncCollector([CountingEnv] * 2, None, frames_per_batch=50, track_policy_version=True)
    for batch in collector.progress(150, display="plain", file=file):
        pass
    collector.shutdown()
    (line,) = file.getvalue().splitlines()
    assert line.startswith("150 frames (100%) · ")
    assert "lag 0" in line


def test_numbers_reach_a_logger(tmp_path):
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    with JSONLLogger(tmp_path) as logger:
        for _ in collector.progress(150, display="none", logger=logger):
            pass
    collector.shutdown()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [50, 100, 150]
    assert rows[-1]["collector/mean_return"] == collector.stats()["mean_return"]


def test_a_collector_that_fills_a_buffer(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = Collector(CountingEnv, None, frames_per_batch=50, replay_buffer=buffer)
    assert list(collector.progress(150, display="none")) == [None] * 3
    collector.shutdown()
    assert len(buffer) == 150


def test_wrong_arguments_are_told_at_once():
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    with pytest.raises(UsageError, match="total"):
        collector.progress(0)
    with pytest.raises(UsageError, match="display"):
        collector.progress(display="bar")
    with pytest.raises(WrongArgument, match="logger needs a method log.*got 'runs'"):
        collector.progress(150, logger="runs")
    collector.shutdown()


def test_a_total_counts_from_the_beginning():
    with Collector(CountingEnv, None, frames_per_batch=50) as collector:
        assert len(list(collector.progress(100, display="none"))) == 2
        assert len(list(collector.progress(200, display="none"))) == 2
        with pytest.warns(UserWarning, match="200 frames are made, and the total of 100 counts from the") as told:
            assert list(collector.progress(100, display="none")) == []
        assert told[0].filename == __file__
