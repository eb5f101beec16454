"""Where workers are right now, and what the log says of them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from functools import partial

import pytest

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import GymEnv, ParallelEnv
from reap.errors import WorkerDied, WrongState
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.faults import KINDS, collect, gated, healthy, within


def gated_lanes(gate):
    """A worker whose lanes are in processes, the second of which waits at the gate."""
    return lambda: ParallelEnv(2, [healthy(), gated(gate)])


def taking(collector):
    """A thread that takes a batch, which does not come before the gate is opened."""
    thread = threading.Thread(target=collector.next, name="taking")
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda gate: collect(KINDS[0], [healthy(), gated(gate)], frames_per_batch=80), "worker 1 (pid"),
        (lambda gate: collect(KINDS[0], [gated_lanes(gate)], frames_per_batch=80), "worker 0 (pid"),
        (lambda gate: Collector(gated_lanes(gate), EchoPolicy(), frames_per_batch=80), "worker of lane 1 (pid"),
        (lambda gate: Collector(gated(gate), EchoPolicy(), frames_per_batch=80), "worker 0 (in this process)"),
        (
            lambda gate: AsyncBatchedCollector([gated(gate)], EchoPolicy(), frames_per_batch=80),
            "worker of lane 0",
        ),
    ],
    ids=["workers", "lanes of a worker", "lanes", "here", "threads"],
)
def test_a_stuck_one_is_found(make, name, tmp_path):
    """Without asking it, from another thread than the one that waits for it; and it goes on afterwards."""
    gate = tmp_path / "gate"
    collector = make(gate)
    thread = taking(collector)
    found = {}
    with within(20):
        while not any("in step" in stack and "worlds/faults.py" in stack for stack in found.values()):
            found = collector.stacks()
    (stuck,) = [who for who, stack in found.items() if "worlds/faults.py" in stack]
    assert stuck.startswith(name)
    gate.touch()
    thread.join()
    collector.shutdown()
    with pytest.raises(WrongState, match="closed"):
        collector.stacks()


def test_lanes_in_processes_that_are_silent_are_logged_too(log):
    """As workers are: once, with the stack, and they are waited for."""
    collector = Collector(gated_lanes(log.gate), EchoPolicy(), frames_per_batch=80)
    log.be_impatient()
    collector.next()
    collector.shutdown()
    (told,) = log.told
    assert "of lane 1" in told
    assert "worlds/faults.py" in told


def events(caplog):
    return [(record.event, record.levelname) for record in caplog.records if record.name == "reap.workers"]


def counting():
    return GymEnv(CountingEnv((3, 5), 0))


def test_the_log_of_a_run(caplog):
    with (
        caplog.at_level(logging.INFO, "reap.workers"),
        MultiSyncCollector([counting] * 2, EchoPolicy(), frames_per_batch=20) as collector,
    ):
        collector.next()
    assert events(caplog) == [("start", "INFO")] * 2 + [("end", "INFO")] * 2
    assert "worker 1 (pid" in caplog.messages[1]
    assert caplog.records[0].worker.startswith("0 (pid")


@pytest.mark.parametrize("action", ["raise", "restart", "drop"])
def test_the_log_of_a_death(action, caplog):
    collector = MultiAsyncCollector([counting] * 2, EchoPolicy(), frames_per_batch=20, on_failure=action)
    with caplog.at_level(logging.INFO, "reap.workers"):
        caplog.clear()
        victim = collector._backend.workers[1].child.pid
        os.kill(victim, signal.SIGKILL)
        if action == "raise":
            with pytest.raises(WorkerDied):
                while True:
                    collector.next()
        while action != "raise" and len(events(caplog)) < (3 if action == "restart" else 2):
            collector.next()
    expected = {
        "raise": [("death", "ERROR"), ("end", "INFO"), ("end", "INFO")],
        "restart": [("death", "ERROR"), ("start", "INFO"), ("restart", "WARNING")],
        "drop": [("death", "ERROR"), ("drop", "WARNING")],
    }
    assert events(caplog) == expected[action]
    assert f"worker 1 (pid {victim})" in caplog.messages[0]
    assert "SIGKILL" in caplog.messages[0]
    collector.shutdown()


def test_the_log_of_lanes_in_processes(caplog):
    collector = Collector(partial(ParallelEnv, 2, counting), EchoPolicy(), frames_per_batch=20)
    with caplog.at_level(logging.INFO, "reap.workers"):
        lanes = collector.env.processes
        os.kill(lanes[1].child.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            while True:
                collector.next()
    assert events(caplog) == [("death", "ERROR")]
