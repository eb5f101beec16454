"""The process that forks workers: one fork that fails is told, and nobody else's workers end for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.worlds.faults import environment

FULL = """
import resource
from reap._system.fork_server.client import kept_fork_server
from reap.collectors import MultiSyncCollector
from reap.envs import ParallelEnv
from reap.errors import WorkerDied
from reap.modules import ProcessInferenceServer
from reap.testing import CountingEnv, EchoPolicy, no_leaks

def collect():
    return MultiSyncCollector([CountingEnv] * 2, EchoPolicy(), frames_per_batch=8, total_frames=-1)

def limit(soft):
    resource.prlimit(kept_fork_server()[0], resource.RLIMIT_NPROC, (soft, hard))

first = collect()
first.next()
_, hard = resource.prlimit(kept_fork_server()[0], resource.RLIMIT_NPROC)
soft = hard
ways = collect, lambda: ParallelEnv(2, CountingEnv), lambda: ProcessInferenceServer(EchoPolicy)
for make in ways:
    with no_leaks():
        limit(0)  # whatever runs already, one more is too many
        try:
            make()
        except (WorkerDied, RuntimeError) as error:
            print(type(error).__name__, error)
            error = None
        limit(soft)
    first.next()
second = collect()
second.next(), first.next()
print("fine")
"""


def unprivileged():
    """How to run a program that the limit of processes binds: it does not bind root."""
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root is not bound by the limit of processes, and there is no setpriv to become somebody else")
    capability = "+dac_read_search"  # or it could not read the interpreter, where that is root's
    return ["setpriv", "--reuid=54321", "--clear-groups", f"--inh-caps={capability}", f"--ambient-caps={capability}"]


def test_a_fork_that_fails_is_told_and_leaves_other_collectors_alone():
    done = subprocess.run(
        [*unprivileged(), sys.executable, "-c", FULL], capture_output=True, text=True, env=environment(), timeout=100
    )
    *errors, last = done.stdout.splitlines() or [""]
    assert last == "fine", done.stdout + done.stderr
    assert len(errors) == 3, done.stdout
    for error in errors:
        assert "could not be started" in error
        assert "limit" in error
        assert "pid 0" not in error
    assert errors[0].startswith("WorkerDied worker 0: ")
