"""Several processes and threads on one buffer; some are killed in the middle of a row."""

from __future__ import annotations

import os
import signal
import threading

import cloudpickle
import pytest
import torch

from reap.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from reap.testing import no_leaks
from tests.buffers.child_messages import hear, tell
from tests.worlds.buffers import check_row, episodes, frames, half_a_row, line, start, stop


def test_the_first_writer_decides_the_columns():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=32)
    children = start(buffer, [episodes(2, 10)])
    try:
        assert not buffer.initialized
        tell(children[0], "go")
        assert hear(children[0]) == "done"
        assert (len(buffer), buffer.write_count) == (20, 20)
        check_row(buffer.sample())
    finally:
        stop(children)


def test_writers_in_three_processes_readers_in_two_threads():
    count, size, capacity = 1200, 7, 997
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=64)
    slices = TensorDictReplayBuffer.open(
        [os.dup(fd) for fd in buffer.handle()[0]], buffer.handle()[1], sampler=SliceSampler(slice_len=4)
    )
    buffer.extend(line(1))
    children = start(buffer, [episodes(count, size)] * 3)
    errors, samples, over = [], [0, 0], threading.Event()

    def read(which, sampled):
        try:
            while not over.is_set() or samples[which] < 4:  # writers may be done before a reader begins
                sample = sampled.sample()
                check_row(sample)
                if which:
                    sample = sample.reshape(-1, 4)
                    assert (sample["step"].diff(dim=1) == 1).all()
                    assert (sample["collector", "traj_ids"].diff(dim=1) == 0).all()
                samples[which] += 1
        except BaseException as error:
            errors.append(error)

    slices.extend(line(8))
    threads = [threading.Thread(target=read, args=pair) for pair in enumerate((buffer, slices))]
    try:
        for thread in threads:
            thread.start()
        for child in children:
            tell(child, "go")
        for child in children:
            assert hear(child) == "done"
    finally:
        over.set()
        for thread in threads:
            thread.join()
        stop(children)
    assert not errors, errors[0]
    assert buffer.write_count == 3 * count * size + 9
    assert len(buffer) == capacity
    _starts, lengths = buffer._memory.runs.table()
    assert set(lengths[1:-1].tolist()) == {size}


@pytest.mark.parametrize("room", [40, 8])
def test_a_killed_writer_costs_its_own_rows(room):
    """With room: the others go on around it. Without: they need its rows, and take them."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(room), sampler=SliceSampler(slice_len=2), batch_size=20)
    buffer.extend(frames(torch.zeros(4, dtype=torch.int64), torch.arange(4)))
    children = start(buffer, [half_a_row])
    try:
        tell(children[0], "go")
        assert hear(children[0]) == "writing"
        before = 4 if room == 40 else 2  # the reserved rows are gone at once, written or not
        assert (len(buffer), buffer.write_count) == (before, 4)
        if room == 40:
            buffer.extend(frames(torch.full((5,), 2), torch.arange(5)))
        check_row(buffer.sample())
        os.kill(children[0].pid, signal.SIGKILL)
        assert children[0].gone(10)
        if room == 40:
            assert [len(buffer) for _ in range(2)][1] == 9
            assert buffer._memory.runs.table()[1].tolist() == [4, 5]
        for i in range(20):
            buffer.extend(frames(torch.full((7,), 10 + i), torch.arange(7)))
            sample = buffer.sample()
            check_row(sample)
            assert 77 not in sample["collector", "traj_ids"]
            pairs = sample["step"].reshape(-1, 2)
            assert (pairs[:, 1] - pairs[:, 0] == 1).all()
        assert len(buffer) == room
    finally:
        stop(children)


def test_killed_again_and_again():
    """Kills at any moment: wherever it hits, the ring goes on."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(300), batch_size=64)
    buffer.extend(line(1))
    for round_ in range(4):
        children = start(buffer, [episodes(10**6, 5)] * 2)
        try:
            for child in children:
                tell(child, "go")
            goal = buffer.write_count + 500 + 77 * round_
            while buffer.write_count < goal:
                check_row(buffer.sample())
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                assert child.gone(10)
        finally:
            stop(children)
        buffer.extend(frames(torch.full((250,), 5), torch.arange(250)))
        check_row(buffer.sample())
    buffer.extend(line(300))
    assert len(buffer) == 300


def test_nothing_is_left_behind():
    def life():
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, prefetch=1)
        buffer.extend(line(50))
        children = start(buffer, [episodes(1, 3)])
        tell(children[0], "go")
        hear(children[0])
        buffer.sample()
        stop(children)
        buffer.shutdown()

    life()
    with no_leaks():
        life()


def test_threads_write_too():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), sampler=SliceSampler(slice_len=3), batch_size=30)
    work = [threading.Thread(target=episodes(100, 6), args=(buffer, i, None)) for i in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert buffer.write_count == 2400
    check_row(buffer.sample())
    assert set(buffer._memory.runs.table()[1][1:].tolist()) == {6}


def test_a_buffer_is_not_pickled():
    with pytest.raises(ValueError, match="handle"):
        cloudpickle.dumps(ReplayBuffer(storage=LazyTensorStorage(3)))
