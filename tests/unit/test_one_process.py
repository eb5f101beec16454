"""The guard of this folder: whatever starts a process here fails, in every way to start one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from reap.collectors import MultiSyncCollector
from reap.envs import ParallelEnv
from reap.testing import CountingEnv

STARTS = {
    "program": lambda: subprocess.run([sys.executable, "-c", ""]),
    "fork": lambda: os.fork(),
    "process": lambda: multiprocessing.Process(target=print).start(),
    "spawned process": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "workers": lambda: MultiSyncCollector([CountingEnv], frames_per_batch=8),
    "lanes": lambda: ParallelEnv(2, CountingEnv),
}


@pytest.mark.parametrize("start", STARTS)
def test_starting_a_process_fails(start):
    with pytest.raises(AssertionError, match="starts a process"):
        STARTS[start]()
