"""The parent's side: scripts of every kind, every way for it to end, and nothing of it changed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.worlds.faults import BOUND, KINDS, SOON, all_gone, collect, cpu_seconds, environment, healthy, pids, within

SCRIPT = """
import sys, time, os
from reap.collectors import MultiSyncCollector, MultiAsyncCollector
from reap.testing import CountingEnv, EchoPolicy
kind = MultiSyncCollector if {sync} else MultiAsyncCollector
offset = 1
c = kind([lambda: CountingEnv((3,), offset)] * 2, EchoPolicy(), frames_per_batch=8, start_method="{start}")
batch = c.next()
assert (batch["observation"][..., 0] == 1).all()
print(*[r.child.pid for r in c._backend.workers], flush=True)
"""
WAYS = {
    "a script": lambda path: [sys.executable, path],
    "-c": lambda path: [sys.executable, "-c", path.read_text()],
    "stdin": lambda path: [sys.executable, "-"],
    "interactive": lambda path: [sys.executable, "-i", "-q"],
}


QUICK_WAYS = {("a script", "forkserver"), ("interactive", "spawn")}
QUICK_ENDS = {("next", signal.SIGTERM), ("fork", signal.SIGKILL)}


def pairs(firsts, seconds, quick):
    """All pairs; most of them only in the long run."""
    every = itertools.product(firsts, seconds)
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in every]


@pytest.mark.parametrize(("way", "start"), pairs(WAYS, ["forkserver", "spawn"], QUICK_WAYS))
def test_no_main_guard(way, start, tmp_path):
    """Scripts run as they are, once, and end by themselves, also when nobody shuts the collector down."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(sync=way != "-c", start=start))
    given = path.read_text() if way in ("stdin", "interactive") else None
    done = subprocess.run(
        WAYS[way](path), input=given, capture_output=True, text=True, env=environment(), timeout=110, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert len(lines) == 2, f"the script ran more than once, or not at all: {done.stdout}"
    assert "Traceback" not in done.stderr, done.stderr
    assert all_gone(map(int, lines[0].split()), SOON)


def test_notebook(programs):
    """A __main__ without a file, code given cell by cell; functions and classes of earlier cells are found."""
    code = """
import sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
for cell in [
    "import numpy as np\\nfrom reap.testing import CountingEnv\\nLENGTH = 4",
    "class Mine(CountingEnv):\\n    def __init__(self):\\n        super().__init__((LENGTH,), helper())",
    "def helper():\\n    return 6",
    "import torch\\nclass Policy(torch.nn.Module):\\n    def forward(self, observation):\\n"
    "        return observation[..., :1] * helper()",
    "from reap.collectors import MultiSyncCollector\\n"
    "c = MultiSyncCollector([Mine] * 2, Policy(), frames_per_batch=8)\\nbatch = c.next()\\nc.shutdown()",
    "assert (batch['action'] == 36).all()\\nassert batch['next', 'done'].sum() == 2\\nprint('fine')",
]:
    exec(compile(cell, "<cell>", "exec"), main.__dict__)
"""
    done = programs.run(code)
    assert done.stdout == "fine\n", done.stderr


STAY = {
    "next": "while True: c.next()",
    "idle": "time.sleep(60)",
    "hold": "kept = [c.next() for _ in range(5)]; time.sleep(60)",
    "hang": "c2 = kind([lambda: __import__('time').sleep(60)], EchoPolicy(), frames_per_batch=8)",
    "fork": "os.fork() or time.sleep(6); time.sleep(60)",
    "deaf": """
from reap.testing import FaultyEnv
c2 = kind([lambda: FaultyEnv(CountingEnv(), at=0, fault='deaf')], EchoPolicy(), frames_per_batch=8)
print(*[r.child.pid for r in c2._backend.workers], flush=True)
c2.next()
""",
}


@pytest.mark.parametrize(("stay", "number"), pairs(STAY, [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], QUICK_ENDS))
def test_the_parent_is_killed(stay, number, tmp_path):
    """Whatever it was doing: its children are gone within two seconds."""
    start = "spawn" if stay == "idle" else "forkserver"
    script = SCRIPT.format(sync=stay != "hold", start=start) + STAY[stay]
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        process_group=0,
    )
    numbers = [int(pid) for pid in parent.stdout.readline().split()]
    if stay == "deaf":
        numbers += [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.3)
    helpers = [int(p) for p in _children_of(parent.pid)]
    assert numbers, parent.communicate()
    forked = [p for p in helpers if stay == "fork" and b"fork_server" not in _command(p)]
    parent.send_signal(number)
    # Ctrl-C unwinds the parent first, which may shut down in order; a signal that kills leaves it to the helper.
    assert all_gone(numbers, SOON if number != signal.SIGINT else BOUND + SOON)
    assert all_gone([p for p in helpers if p not in forked], SOON)
    for pid in forked:
        os.kill(pid, signal.SIGKILL)
    parent.communicate()
    assert parent.returncode != 0


def _children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def _command(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def test_the_parent_is_left_as_it_was(programs):
    code = """
import multiprocessing, os, random, signal, threading, numpy, torch
torch.manual_seed(1), numpy.random.seed(2), random.seed(3)
def look():
    return (torch.get_num_threads(), torch.get_num_interop_threads(), multiprocessing.get_start_method(allow_none=True),
            dict(os.environ), os.getcwd(), threading.active_count(), torch.get_rng_state().tolist(), random.getstate(),
            numpy.random.get_state()[1].tolist(), [signal.getsignal(s) for s in signal.valid_signals()],
            torch.get_default_dtype(), torch.is_grad_enabled(), signal.pthread_sigmask(signal.SIG_BLOCK, []))
import reap.collectors
from reap.testing import CountingEnv, EchoPolicy
before = look()
for kind in (reap.collectors.MultiSyncCollector, reap.collectors.MultiAsyncCollector):
    c = kind([CountingEnv] * 2, EchoPolicy(), frames_per_batch=8)
    assert look() == before
    c.set_seed(5)
    for _ in range(5):
        c.next(), c.update_policy_weights_()
    assert look() == before
    c.shutdown()
    assert look() == before
"""
    done = programs.run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_idle_workers_use_no_cpu(kind):
    with collect(kind, [healthy(), healthy(1)], timeout=5) as c:
        held = [c.next() for _ in range(4)]
        from reap._system.fork_server.client import kept_fork_server

        watched = [*pids(c), kept_fork_server()[0]]
        for _ in range(10):  # they may still be running ahead; one that never rests uses some every time
            before = [cpu_seconds(pid) for pid in watched]
            time.sleep(1.5)
            used = [cpu_seconds(pid) - was for pid, was in zip(watched, before)]
            if max(used) <= 0.02:
                break
        assert max(used) <= 0.02, used
        del held


def test_start_of_many_is_about_that_of_one(capsys):
    """Measured and printed; a busy machine says little, so only something absurd fails."""
    times = {}
    for count in (1, 8, 1, 8):
        began = time.monotonic()
        c = collect(KINDS[0], [healthy()] * count, frames_per_batch=8 * count)
        times.setdefault(count, []).append(time.monotonic() - began)
        with within(BOUND):
            c.shutdown()
    one, eight = min(times[1]), min(times[8])
    with capsys.disabled():
        print(f"\nstart of 1 worker {one:.2f} s, of 8 workers {eight:.2f} s on {os.cpu_count()} cores")
    assert eight < 12 * one + 2
