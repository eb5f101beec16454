"""Workers that say nothing: an error in time where there is a `timeout`, a line in the log where there is none."""

from __future__ import annotations

import functools
import time

import pytest

from reap.collectors import AsyncBatchedCollector
from reap.collectors.distributed import (
    DistributedAsyncCollector,
    DistributedSyncCollector,
    RPCAsyncCollector,
    RPCSyncCollector,
)
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import WorkerSilent
from tests.worlds.faults import KINDS, PROMISED, ROOM, collect, faulty, gated, healthy, within

TIMEOUT = 1.0
THREADS = functools.partial(AsyncBatchedCollector, env_backend="threading")
PROCESSES = functools.partial(AsyncBatchedCollector, env_backend="multiprocessing")
THREADS_OF_A_PROCESS = functools.partial(PROCESSES, envs_per_worker=2, worker_threads=True)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (KINDS[0], "deaf"),
        (DistributedSyncCollector, "deaf"),
        pytest.param(THREADS, "hang", marks=pytest.mark.leaves_a_thread),
        (THREADS_OF_A_PROCESS, "hang"),
        pytest.param(DistributedSyncCollector, "stop", marks=pytest.mark.slow),
        pytest.param(RPCSyncCollector, "deaf", marks=pytest.mark.slow),
        pytest.param(PROCESSES, "stop", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:the thread of lanes")
def test_the_error_comes_in_time(kind, fault):
    """Also where the one that hangs cannot be asked to go: a thread, or native code that hears no signal."""
    c = collect(kind, [healthy(), faulty(fault, 20)], timeout=TIMEOUT)
    last = time.monotonic()
    with pytest.raises(WorkerSilent, match=r"sent nothing for \d+\.\d s \(timeout=1\.0\)"):
        while True:
            c.next()
            last = time.monotonic()
    took = time.monotonic() - last
    assert took < TIMEOUT + PROMISED + ROOM, f"{took:.1f} s"
    assert c.closed


@pytest.mark.parametrize(
    "kind",
    [*KINDS, DistributedSyncCollector, THREADS, PROCESSES, pytest.param(RPCSyncCollector, marks=pytest.mark.slow)],
)
def test_without_a_timeout_the_log_says_where_it_is(kind, log):
    """And it is waited for: nothing is killed, nothing is lost."""
    gate = log.gate
    if kind in (THREADS, PROCESSES):
        log.be_impatient()
    c = collect(kind, [healthy(), gated(gate)])
    log.be_impatient()  # where workers are watched while they are built, not before: that takes its time
    while not log.told:
        c.next()
    while not (c.next()["observation"][..., 2] > 12).any():
        pass  # it goes on where it was
    assert not c.closed
    c.shutdown()
    (told,) = log.told
    assert "sent nothing for 1 s" in told
    assert "of lane 1" in told or "worker 1 (pid" in told
    assert "worlds/faults.py" in told


@pytest.mark.parametrize(
    "kind", [KINDS[1], DistributedAsyncCollector, pytest.param(RPCAsyncCollector, marks=pytest.mark.slow)]
)
def test_in_the_background_too(kind, log):
    gate, memory = log.gate, ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    with collect(kind, [healthy(), gated(gate)], replay_buffer=memory) as c:
        log.be_impatient()
        c.start()
        with within(20):
            while not log.told:
                memory.sample()
            while not (memory[:]["observation"][:, 2] > 12).any():
                pass
        assert c.is_running()
    (told,) = log.told
    assert "worker 1 (pid" in told
    assert "in step" in told
