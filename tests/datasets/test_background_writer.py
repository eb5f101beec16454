"""A recording is written by a thread of its own: what it promises when the disk is slow or full, or Ctrl-C comes."""

from __future__ import annotations

import gc
import signal
import threading

import numpy as np
import pytest
import torch

from reap.collectors import Collector
from reap.data import background_writer, load, record
from reap.data.background_writer import BackgroundWriter
from reap.data.formats.npz import NpzWriter
from reap.envs import SerialEnv
from reap.errors import CorruptState, RecordingFailed
from reap.testing import CountingEnv
from tests.worlds.datasets import same, whole_episodes

BOUND = 60  # seconds that no wait takes


class Gated:
    """A format whose `add` waits until it is let through."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self.taken: list[int] = []
        self.metadata = None

    def add(self, episode):
        self.entered.set()
        assert self.gate.wait(BOUND)
        self.taken.append(int(episode["x"][0]))

    def close(self, metadata):
        self.metadata = metadata


def episode(number, steps=4):
    return [{"x": np.full(steps, number)}]


@pytest.fixture
def slow_disk(monkeypatch):
    """Recordings as `.npz` wait until `gate` is open; `entered` says that one does."""
    gated, add = Gated(), NpzWriter.add

    def waits(self, episode):
        gated.entered.set()
        assert gated.gate.wait(BOUND)
        add(self, episode)

    monkeypatch.setattr(NpzWriter, "add", waits)
    yield gated
    gated.gate.set()


def in_thread(call):
    """Start `call` elsewhere: its event is set when it has returned."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (call(), done.set()), daemon=True)
    thread.start()
    return thread, done


def test_who_brings_more_than_may_wait_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(background_writer, "AHEAD", 3 * 32)
    format = Gated()
    writer = BackgroundWriter(format, tmp_path)
    for number in range(3):
        writer.wait_for_room()
        writer.write([episode(number)])
    assert format.entered.wait(BOUND)
    assert writer.lengths == []  # in hand is not written
    thread, done = in_thread(writer.wait_for_room)
    assert not done.wait(0.2)
    format.gate.set()
    assert done.wait(BOUND)
    thread.join(BOUND)
    writer.write([episode(3, 7)])
    writer.finish({"a": 1})
    assert format.taken == [0, 1, 2, 3]
    assert format.metadata == {"a": 1, "lengths": [4, 4, 4, 7]}


def test_who_waits_for_a_disk_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(background_writer, "AHEAD", 32)
    format = Gated()
    format.add = lambda episode: format.gate.wait(BOUND) and 1 / 0
    writer = BackgroundWriter(format, tmp_path)
    writer.write([episode(0), episode(1)])
    told = []

    def waits():
        try:
            writer.wait_for_room()
        except RecordingFailed as error:
            told.append(error)

    thread, done = in_thread(waits)
    format.gate.set()
    assert done.wait(BOUND)
    thread.join(BOUND)
    assert isinstance(told[0].__cause__, ZeroDivisionError)
    with pytest.raises(RecordingFailed):
        writer.finish({})
    assert format.metadata is None


def test_what_a_consumer_does_to_a_batch_is_not_recorded(tmp_path, slow_disk):
    collector = Collector(SerialEnv(3, CountingEnv), None, frames_per_batch=90, total_frames=270)
    kept = []
    recording = record(collector, tmp_path / "one.npz")
    for batch in collector:
        kept.append(batch.clone())
        for leaf in batch.values(True, True):
            leaf.zero_()
    assert recording.episodes == recording.frames == 0
    slow_disk.gate.set()
    recording.close()
    collector.shutdown()
    expected = {int(one["collector", "traj_ids"][0]): one for one in whole_episodes(kept)}
    found = load(tmp_path / "one.npz")
    assert len(found) == len(expected) == recording.episodes > 3
    assert all(same(one, expected[int(one["collector", "traj_ids"][0])]) for one in found)


def test_a_disk_that_fails_is_told_with_the_next_batch_and_when_it_is_closed(tmp_path, monkeypatch):
    add, full = NpzWriter.add, OSError(28, "No space left on device")

    def fails(self, episode):
        if self._count == 2:
            raise full
        add(self, episode)

    monkeypatch.setattr(NpzWriter, "add", fails)
    collector = Collector(CountingEnv, None, frames_per_batch=50, total_frames=5000)
    recording = record(collector, tmp_path / "one.npz")
    with pytest.raises(RecordingFailed, match=r"one.npz could not be written: OSError.*No space left") as told:
        for _ in collector:
            pass
    assert told.value.__cause__ is full
    assert recording.episodes == 2
    with pytest.raises(RecordingFailed) as again:
        recording.close()
    assert again.value is told.value
    collector.shutdown()
    with pytest.raises(CorruptState):
        load(tmp_path / "one.npz")


def test_a_block_that_ends_with_the_failure_tells_it_once(tmp_path, monkeypatch):
    monkeypatch.setattr(NpzWriter, "add", lambda self, episode: 1 / 0)
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    with pytest.raises(RecordingFailed) as told:  # noqa: SIM117
        with record(collector, tmp_path / "one.npz"):
            while True:
                collector.next()
    assert told.value.__context__ is None
    collector.shutdown()
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    with pytest.raises(RecordingFailed), record(collector, tmp_path / "two.npz"):
        collector.next()  # and no other batch comes to tell it
    collector.shutdown()


def test_metadata_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    recording = record(collector, tmp_path / "one.npz")
    collector.next()
    monkeypatch.setattr(NpzWriter, "close", lambda self, metadata: 1 / 0)
    with pytest.raises(RecordingFailed, match="ZeroDivisionError"):
        recording.close()
    collector.shutdown()


def test_an_error_in_the_loop_leaves_a_whole_dataset(tmp_path, slow_disk):
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    batches = []
    with pytest.raises(KeyError), record(collector, tmp_path / "one.npz"):
        for batch in collector:
            batches.append(batch.clone())
            if len(batches) == 3:
                slow_disk.gate.set()  # as late as can be: closing waits for all of it
                raise KeyError("loss")
    collector.shutdown()
    assert same(load(tmp_path / "one.npz").frames, torch.cat(whole_episodes(batches)))


def test_ctrl_c_while_it_is_closed_loses_nothing(tmp_path, slow_disk):
    collector = Collector(CountingEnv, None, frames_per_batch=50)
    recording = record(collector, tmp_path / "one.npz")
    batches = [collector.next().clone() for _ in range(3)]
    assert slow_disk.entered.wait(BOUND)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        recording.close()
    timer.join()
    assert recording.closed
    slow_disk.gate.set()
    recording.close()
    collector.shutdown()
    assert same(load(tmp_path / "one.npz").frames, torch.cat(whole_episodes(batches)))


def test_one_that_is_dropped_ends_its_thread(tmp_path, slow_disk):
    collector = Collector(CountingEnv, None, frames_per_batch=200)
    recording = record(collector, tmp_path / "one.npz")
    collector.next()
    assert slow_disk.entered.wait(BOUND)
    thread, lengths = recording._writer._thread, recording._writer.lengths
    collector.shutdown()
    slow_disk.gate.set()
    collector._listeners.remove(recording._hear)
    del recording, collector
    gc.collect()
    assert not thread.is_alive()
    assert len(lengths) >= 1
    with pytest.raises(CorruptState):
        load(tmp_path / "one.npz")


PROGRAM = """
import sys
import threading

from reap.collectors import Collector
from reap.data import record
from reap.testing import CountingEnv

collector = Collector(CountingEnv, None, frames_per_batch=100)
recording = record(collector, sys.argv[1] + "/" + sys.argv[2], sys.argv[2])
for _ in range(4):
    collector.next()
collector.shutdown()
if sys.argv[3] == "interrupted":  # its wait was broken off, and the program goes on to its end
    changed = recording._writer._work.changed
    here, wait_for = threading.current_thread(), changed.wait_for
    changed.wait_for = lambda what: 1 / 0 if threading.current_thread() is here else wait_for(what)
    try:
        recording.close()
    except ZeroDivisionError:
        changed.wait_for = wait_for
    else:
        raise SystemExit("not interrupted")
print("fine")
"""


@pytest.mark.parametrize("format", ["minari", "parquet", "memmap"])
@pytest.mark.parametrize("end", ["open", "interrupted"])
def test_python_ends_when_nobody_closes_it(tmp_path, programs, format, end):
    done = programs.run(PROGRAM, str(tmp_path), format, end, timeout=BOUND)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr
    assert not done.stderr
    if end == "interrupted":
        assert sum(load(tmp_path / format).lengths) > 390
        return
    with pytest.raises(CorruptState):
        load(tmp_path / format, format)
