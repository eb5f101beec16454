"""Programs that an env starts end with the process it lives in, however that ends; shared memory is unlinked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import pytest

from reap._system.fork_server.client import kept_fork_server
from reap.collectors import MultiSyncCollector
from reap.envs import ParallelEnv
from reap.errors import WorkerDied
from tests.faults.simulators import COMMANDS, Simulated, closed, started
from tests.worlds.faults import BOUND, SOON, alive, all_gone, collect, environment, healthy, pids

SLOW = pytest.mark.slow

TRAINING = """
import sys
from reap.collectors import MultiSyncCollector
from reap.envs import ParallelEnv
from reap.modules import ProcessInferenceServer
from reap.testing import EchoPolicy
from tests.faults.simulators import Simulated, start_programs
folder = sys.argv[1]
def factory():
    start_programs(folder)
    return EchoPolicy()
server = ProcessInferenceServer(factory)
lanes = ParallelEnv(1, lambda: Simulated(folder))
collector = MultiSyncCollector([lambda: Simulated(folder)], EchoPolicy(), frames_per_batch=8, total_frames=-1)
if sys.argv[2] == "nested":
    inner = MultiSyncCollector([lambda: ParallelEnv(1, lambda: Simulated(folder))], EchoPolicy(), frames_per_batch=8)
print("ready", flush=True)
while True: collector.next()
"""


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGTERM, "flat"),
        pytest.param(signal.SIGHUP, "flat", marks=SLOW),
        pytest.param(signal.SIGQUIT, "nested", marks=SLOW),
        pytest.param(signal.SIGKILL, "nested", marks=SLOW),
    ],
)
def test_a_signal_to_the_group_closes_envs_and_ends_their_programs(number, kind, tmp_path):
    """As `timeout`, a terminal that is closed or a job scheduler sends it."""
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path), kind],
        stdout=subprocess.PIPE,
        env=environment(),
        process_group=0,
    )
    with training:
        try:
            assert training.stdout.readline() == b"ready\n"
            programs, envs = started(tmp_path), 2 if kind == "flat" else 3
            assert len(programs) == (envs + 1) * len(COMMANDS)
            os.killpg(training.pid, number)
            assert training.wait(BOUND) == -number
        finally:
            training.kill()
    assert all_gone(programs, BOUND)
    assert len(closed(tmp_path)) == envs


def test_they_end_with_a_worker_that_is_killed_and_with_no_other(tmp_path):
    """A daemon of a worker that lives is left alone, though the same process has been handed it."""
    c = collect(MultiSyncCollector, [lambda: Simulated(tmp_path), healthy(1)])
    programs = started(tmp_path)
    other = collect(MultiSyncCollector, [lambda: Simulated(tmp_path)])
    others = [pid for pid in started(tmp_path) if pid not in programs]
    assert len(programs) == len(others) == len(COMMANDS)
    os.kill(pids(c)[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        while True:
            c.next()
    assert all_gone(programs, SOON)
    other.next()
    assert all(map(alive, others))
    other.shutdown()
    assert all_gone(others, SOON)
    assert len(closed(tmp_path)) == 1


def test_they_end_with_lanes_that_are_killed(tmp_path):
    env = ParallelEnv(2, lambda: Simulated(tmp_path))
    programs = started(tmp_path)
    assert len(programs) == 2 * len(COMMANDS)
    workers = [process.child.pid for process in env.lanes_env.processes]
    os.kill(workers[0], signal.SIGKILL)
    env.close()
    assert all_gone([*workers, *programs], SOON)
    assert closed(tmp_path) == {workers[1]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_program_is_started_with_the_usual_signals(number):
    """Ctrl-C is how many simulators are asked to end: one that inherits that it is ignored would never."""

    class Polite(Simulated):
        def __init__(self):
            super(Simulated, self).__init__((3,), 0)
            self.program = subprocess.Popen(["sleep", "600"])

        def close(self):
            self.program.send_signal(number)
            assert self.program.wait(20) == -number

    c = collect(MultiSyncCollector, [Polite])
    (worker,) = c._backend.workers
    c.shutdown()
    assert worker.child.exitcode in (0, -signal.SIGTERM), "closed in order: nobody had to kill it"


@pytest.mark.parametrize(
    ("end", "names"), [pytest.param("tidy", 5, marks=SLOW), pytest.param("clean", 5, marks=SLOW), ("kill", 6)]
)
def test_shared_memory_an_env_made_is_unlinked_in_the_end(end, names):
    """After a clean end and a kill alike, without a word; that of the parent is left to the parent."""
    code = """
import os, signal, sys
from multiprocessing.shared_memory import SharedMemory
from reap.collectors import MultiSyncCollector
from reap.testing import CountingEnv, EchoPolicy
ours, end = SharedMemory(create=True, size=8), sys.argv[1]
class Env(CountingEnv):
    def __init__(self, tidy):
        super().__init__()
        self.tidy, self.memory, self.parents = tidy, SharedMemory(create=True, size=8), SharedMemory(name=ours.name)
        os.write(1, f"{self.memory.name}\\n".encode())  # one write: print() makes two, and two workers' may mix
    def close(self):
        if self.tidy:
            self.memory.unlink()
for _ in range(2):
    c = MultiSyncCollector([lambda: Env(True), lambda: Env(end == "tidy")], EchoPolicy(), frames_per_batch=8)
    c.next()
    c.shutdown()
print(ours.name, flush=True)
if end == "kill":
    c = MultiSyncCollector([lambda: Env(False)], EchoPolicy(), frames_per_batch=8)
    os.kill(os.getpid(), signal.SIGKILL)
ours.unlink()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, end], capture_output=True, text=True, env=environment(), timeout=100
    )
    assert len(done.stdout.split()) == names, done.stderr
    assert "Traceback" not in done.stderr
    assert end != "tidy" or not done.stderr
    for name in done.stdout.split():
        with pytest.raises(FileNotFoundError):
            SharedMemory(name=name).close()


def test_they_end_with_the_fork_server(tmp_path):
    c = collect(MultiSyncCollector, [lambda: Simulated(tmp_path), lambda: ParallelEnv(1, lambda: Simulated(tmp_path))])
    programs = started(tmp_path)
    assert len(programs) == 2 * len(COMMANDS)
    os.kill(kept_fork_server()[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="fork server"):
        while True:
            c.next()
    assert all_gone(programs, BOUND)
