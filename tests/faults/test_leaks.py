"""no_leaks notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.shared_memory import SharedMemory

import pytest

from reap.collectors import Collector
from reap.testing import no_leaks

# Leaves a process that is nobody's child any more, has a file of shared memory and removes it when it is told to end.
STRANGER = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
if not os.fork():
    os.setsid()
    made = SharedMemory(create=True, size=10)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print(os.getpid(), flush=True)
    os.close(1)
    signal.sigwait([signal.SIGTERM])
    made.unlink()
"""


def test_a_clean_block_passes():
    with no_leaks(), Collector("CartPole-v1", frames_per_batch=10) as c:
        c.next()


def test_a_thread():
    stop = threading.Event()
    with pytest.raises(AssertionError, match="left behind: threads: stray"), no_leaks():
        thread = threading.Thread(target=stop.wait, name="stray")
        thread.start()
    stop.set()
    thread.join()


def test_a_descriptor(tmp_path):
    with pytest.raises(AssertionError, match="descriptors.*some-file"), no_leaks():
        handle = open(tmp_path / "some-file", "w")  # noqa: SIM115
    handle.close()


def test_a_process():
    with pytest.raises(AssertionError, match="processes"), no_leaks():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.communicate(b"\n")


def test_a_file_in_shared_memory_but_not_a_strangers(tmp_path):
    """One that nobody has mapped is ours; one that a process that is no child of ours has mapped is his."""
    with pytest.raises(AssertionError, match="shared memory: psm_"), no_leaks():
        made = SharedMemory(create=True, size=10)
        made.close()
    made.unlink()
    with no_leaks():
        stranger = subprocess.Popen([sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with stranger:
            grandchild = stranger.stdout.readline()
        assert int(grandchild) > 0
    os.kill(int(grandchild), signal.SIGTERM)


def test_two_hundred_collectors_leave_nothing():
    with no_leaks():
        for _ in range(200):
            Collector("CartPole-v1", frames_per_batch=10).next()
