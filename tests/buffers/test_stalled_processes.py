"""A writer or reader that is stopped, or hangs, in the middle: nobody waits for it for longer than the timeout."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import cloudpickle
import pytest
import torch

from reap._system.processes import Child, end
from reap.buffers.storage import file_lock as gates
from reap.collectors import MultiAsyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import WorkerSilent
from reap.testing import CountingEnv, EchoPolicy
from tests.buffers.child_messages import hear, tell
from tests.worlds.buffers import frames, half_a_row, line, start, stop
from tests.worlds.faults import freeze, wait_until_stopped, within
from tests.worlds.waiting import until


def test_a_writer_that_is_stopped_is_named_and_its_rows_are_free_when_it_ends():
    buffer = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=8)
    buffer.watch(0.3)
    buffer.extend(line(4))
    children = start(buffer, [half_a_row])
    try:
        tell(children[0], "go")
        assert hear(children[0]) == "writing"
        freeze(children[0].pid)
        with within(2.3), pytest.raises(WorkerSilent) as caught:
            for t in range(40):
                buffer.extend(line(2, 10 + 2 * t))
        said = f"process {children[0].pid}, which is stopped, has been writing 6 rows to the replay buffer for 0.3 s"
        assert said in str(caught.value)
        buffer.sample()  # readers go on with what is there
        state = buffer.state_dict()
        with within(2.3), pytest.raises(WorkerSilent, match="has been writing 6 rows"):
            buffer.load_state_dict(state)  # it would write over what is put back
        rows = len(buffer)
        os.kill(children[0].pid, signal.SIGKILL)
        assert children[0].gone(10)
        assert rows <= 24
        for t in range(40):
            buffer.extend(line(2, 100 + 2 * t))
        assert buffer[:]["step"].min() == 140
        buffer.load_state_dict(state)
    finally:
        stop(children)


def test_one_that_is_slow_is_waited_for():
    """Patience is for the one who holds the place: when it is another's, it begins anew."""
    ring = ReplayBuffer(storage=LazyTensorStorage(8))._memory.ring
    ring.lock.patience = 0.4
    taken = [ring.reserve(1)[1] for _ in range(4)]

    def commit():
        for entry in taken:
            time.sleep(0.2)
            ring.commit(entry)

    slow = threading.Thread(target=commit)
    slow.start()
    ring.commit(ring.reserve(8)[1])  # after 0.8 s
    slow.join()
    assert ring.window() == (4, 12)


def test_a_thread_of_this_process_is_called_that():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.watch(0.1)
    buffer.extend(line(2))
    buffer._memory.ring.reserve(3)
    with (
        within(2),
        pytest.raises(WorkerSilent, match=r"another thread of this process has been writing 3 rows.*timeout=0\.1"),
    ):
        buffer.extend(line(6))


def test_one_that_is_stopped_with_the_lock():
    """Rows by number are read while writers wait: stopped there, it holds everybody up."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=8)
    buffer.watch(0.3)
    buffer.extend(line(4))
    fds, description = buffer.handle()

    def target(connection, fds):
        there = ReplayBuffer.open(fds, description)
        with there._memory.ring.lock.locked():
            connection.send("locked")
            os.kill(os.getpid(), signal.SIGSTOP)
        connection.recv()

    child = Child(cloudpickle.dumps(target), fds=fds)
    try:
        assert hear(child) == "locked"
        wait_until_stopped(child.pid)
        with (
            within(2.3),
            pytest.raises(
                WorkerSilent,
                match=f"process {child.pid}, which is stopped, holds the replay buffer's lock for [0-9.]+ s",
            ),
        ):
            buffer.extend(line(4, 4))
        with within(2.3), pytest.raises(WorkerSilent, match="holds the replay buffer's lock"):
            buffer[:]
        os.kill(child.pid, signal.SIGCONT)
        buffer.extend(line(4, 4))
        assert buffer.write_count == 8
    finally:
        os.kill(child.pid, signal.SIGCONT)
        tell(child, None)
        end([child], patience=5, deadline=10)


@pytest.mark.parametrize(("limit", "shown"), [(None, "(timeout=None)"), (60.0, "(timeout=60)")])
def test_the_log_says_whom_we_wait_for_and_how_long_at_most(monkeypatch, caplog, limit, shown):
    monkeypatch.setattr(gates, "_LOG_AFTER", 0.05)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.watch(limit)
    ring = buffer._memory.ring
    entry = ring.reserve(3)[1]
    done = threading.Thread(target=lambda: ring.commit(ring.reserve(8)[1]))
    with caplog.at_level(logging.WARNING, "reap"):
        done.start()
        until(lambda: caplog.records)
    ring.commit(entry)
    done.join()
    (record,) = caplog.records
    assert "another thread of this process has been writing 3 rows to the replay buffer" in record.getMessage()
    assert record.getMessage().endswith(shown)


def test_a_worker_that_is_stopped_while_it_writes_is_told_by_its_number():
    def healthy():
        return CountingEnv()

    def stopped():
        from reap.buffers.storage.rows import Rows

        honest, left = Rows.write, [5]

        def write(self, first, values):
            honest(self, first, values)
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGSTOP)

        Rows.write = write
        return CountingEnv()

    buffer = ReplayBuffer(storage=LazyTensorStorage(400), batch_size=8)
    collector = MultiAsyncCollector(
        [healthy, stopped], EchoPolicy(), frames_per_batch=20, total_frames=-1, replay_buffer=buffer, timeout=1.0
    )
    pid = collector._backend.workers[1].child.pid
    collector.start()
    try:
        wait_until_stopped(pid)
        with within(3.0), pytest.raises(WorkerSilent, match=rf"worker 1 \(pid {pid}\)"):
            while collector.is_running():
                buffer.sample()
    finally:
        collector.shutdown()


def test_frames_stay_whole_after_a_refusal():
    buffer = ReplayBuffer(storage=LazyTensorStorage(12))
    buffer.watch(0.05)
    entry = buffer._memory.ring.reserve(2)[1]
    buffer.extend(frames(torch.zeros(3, dtype=torch.int64), torch.arange(3)))
    with pytest.raises(WorkerSilent):
        buffer.extend(line(6))
    buffer._memory.ring.abandon(entry)
    buffer.extend(line(6, 3))
    assert buffer[:]["step"].tolist() == list(range(9))
    assert buffer._memory.runs.table()[1].tolist() == [9]
