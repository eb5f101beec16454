"""Odd company: forks, threads, programs started by envs, talkative workers, several collectors, garbage."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time

import pytest
import torch

from reap.errors import UsageError, WorkerDied
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same, no_leaks
from tests.worlds.faults import BOUND, KINDS, SOON, all_gone, collect, freeze, healthy, pids, within

LENGTHS = (3, 1, 5)


def worlds(count=2):
    return [CountingWorld([LENGTHS], first_lane=w, worker=w, workers=count) for w in range(count)]


def check(kind, batch, expected):
    if kind is KINDS[0]:
        for got, world in zip(batch, expected):
            assert_same(got, world.batch(4))
    else:
        assert_same(batch, expected[batch.origin.worker].batch(8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_of_the_parent_takes_nothing_along(kind):
    """What the fork drops is still in use here; what it closes stays open; its end ends nothing."""
    c, expected = collect(kind, [healthy(0), healthy(1)]), worlds()
    for _ in range(2):
        kept = [c.next(), c.next()]
        was = [batch.clone() for batch in kept]
        pid = os.fork()
        if pid == 0:
            kept.clear()
            gc.collect()
            c.shutdown()
            del c
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        after = [c.next() for _ in range(4)]
        for batch, same in zip(kept, was):
            assert (batch == same).all()
        for batch in (*kept, *after):
            check(kind, batch, expected)
    c.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_parent_with_threads(kind):
    """One thread collects, another publishes and asks; a third is merely there."""
    over, failed = threading.Event(), []
    with no_leaks():
        idle = threading.Thread(target=over.wait)
        idle.start()
        c, expected = collect(kind, [healthy(0), healthy(1)]), worlds()

        def busy():
            try:
                while not over.is_set():
                    c.update_policy_weights_()
                    c.update_policy_weights_(EchoPolicy().state_dict(), worker_ids=1)
                    assert len(c.state_dict()) >= 4
            except BaseException as error:
                failed.append(error)

        other = threading.Thread(target=busy)
        other.start()
        for _ in range(300):
            check(kind, c.next(), expected)
        over.set()
        other.join()
        idle.join()
        c.shutdown()
        assert not failed, failed
        other = busy = c = None


@pytest.mark.parametrize("how", ["Popen", "system", "fork"])
@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_an_env_with_a_program_of_its_own(how, end, tmp_path):
    """What a worker leaves behind goes with it, and does not keep anything open."""
    note = tmp_path / "pid"

    class WithProgram(CountingEnv):
        def __init__(self):
            super().__init__(LENGTHS, 0)
            if how == "Popen":
                self.program = subprocess.Popen(["sleep", "77"])
                pid = self.program.pid
            elif how == "system":
                os.system(f"sleep 77 & echo $! > {note.with_suffix('.sh')}")
                pid = int(note.with_suffix(".sh").read_text())
            else:
                pid = os.fork()
                if pid == 0:
                    time.sleep(77)
                    os._exit(0)
            note.write_text(str(pid))

    with no_leaks():
        c = collect(KINDS[0], [WithProgram, healthy(1)])
        c.next()
        program = int(note.read_text())
        if end == "kill":
            os.kill(pids(c)[0], signal.SIGKILL)
            with within(SOON), pytest.raises(WorkerDied, match="SIGKILL"):
                c.next()
        else:
            with within(SOON):
                c.shutdown()
        assert all_gone([program], SOON)
        del c


def test_a_worker_that_prints_a_lot(programs):
    code = """
import os, sys
from reap.collectors import MultiAsyncCollector
from reap.testing import CountingEnv, EchoPolicy
class Loud(CountingEnv):
    def step(self, action):
        print("o" * 5000); sys.stderr.write("e" * 5000); os.write(1, b"x" * 5000)
        return super().step(action)
with MultiAsyncCollector([lambda: Loud((3,), 0)] * 2, EchoPolicy(), frames_per_batch=10) as c:
    for _ in range(5): c.next()
print("fine")
"""
    done = programs.run(code, timeout=110)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("fine")
    assert len(done.stdout) > 2e5


def test_collectors_side_by_side():
    with no_leaks():
        pairs = [(kind, collect(kind, [healthy(0), healthy(1)]), worlds()) for kind in KINDS * 2]
        for _ in range(20):
            for kind, c, expected in pairs:
                check(kind, c.next(), expected)
        kind, c, _ = pairs.pop()
        victim = pids(c)[0]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            while True:
                c.next()
        for kind, c, expected in pairs:
            check(kind, c.next(), expected)
            c.shutdown()
        del pairs, c


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["break", "exception", "with", "cycle", "exception in hook"])
def test_every_end_is_the_same(kind, end):
    """Garbage, with, an exception in the consumer: the workers go, what was delivered stays."""
    with no_leaks():
        kept, workers = [], []

        def use():
            def hook(batch):
                if end == "exception in hook" and len(kept) == 3:
                    raise ArithmeticError

            c = collect(kind, [healthy(0), healthy(1)], post_collect_hook=hook)
            workers.extend(pids(c))
            if end == "cycle":
                c.myself = c
            if end == "with":
                with c:
                    kept.extend(batch for _, batch in zip(range(4), c))
                return
            for batch in c:
                kept.append(batch)
                if len(kept) == 4:
                    if end == "exception":
                        raise ArithmeticError
                    break

        with within(BOUND):
            try:
                use()
            except ArithmeticError:
                assert "exception" in end
            gc.collect()
        assert all_gone(workers, 0)
        expected = worlds()
        for batch in kept:
            check(kind, batch, expected)
        kept.clear()
        del batch


def test_descriptors_do_not_grow():
    counts = []
    for n in range(12):
        with collect(KINDS[n % 2], [healthy(), healthy(1)]) as c:
            c.next()
        del c
        gc.collect()  # what earlier tests left to the collector is closed whenever it runs
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[2] + 2, counts  # one left behind by each would be nine more


def test_large_messages_both_ways():
    """A state larger than any socket holds, to workers that are themselves about to say something large."""
    policy = torch.nn.Sequential(torch.nn.Linear(3, 300_000), torch.nn.Linear(300_000, 1))

    for kind in KINDS:
        with collect(kind, [healthy(0), healthy(1)], policy, frames_per_batch=64, compact_obs=True) as c:
            for _ in range(2):
                c.next()
                state = c.state_dict()
                c.load_state_dict(state)
            assert set(state) >= {"worker0", "worker1"}


def test_a_frozen_reader_does_not_freeze_us():
    """A worker that no longer reads: what is sent to it is bounded by `timeout` like everything else."""
    from reap.errors import WorkerSilent

    policy = torch.nn.Sequential(torch.nn.Linear(3, 300_000), torch.nn.Linear(300_000, 1))
    c = collect(KINDS[0], [healthy(0), healthy(1)], policy, timeout=4.0)
    state = c.state_dict()
    freeze(pids(c)[1])
    with within(4 + SOON), pytest.raises(WorkerSilent, match="worker 1"):
        c.load_state_dict(state)
    assert c.closed


def test_the_helper_is_killed():
    from reap._system.fork_server.client import kept_fork_server

    c = collect(KINDS[0], [healthy(), healthy(1)])
    workers = pids(c)
    os.kill(kept_fork_server()[0], signal.SIGKILL)
    with within(SOON), pytest.raises(WorkerDied):
        while True:
            c.next()
    assert all_gone(workers, SOON)
    with collect(KINDS[0], [healthy(), healthy(1)]) as again:
        again.next()


def test_a_wrong_call_costs_nothing():
    """What a worker refuses is the caller's mistake: it is told so, and collecting goes on."""
    with collect(KINDS[1], [healthy(0), healthy(1)]) as c:
        c.next()
        with pytest.raises(UsageError):
            c.load_state_dict({**c.state_dict(), "worker1": {"policy_state_dict": {"weight": torch.zeros(7)}}})
        assert not c.closed
        c.next()
