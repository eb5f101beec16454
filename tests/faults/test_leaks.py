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
    print(os.getpid(), made.name, flush=True)
    os.close(1)
    signal.sigwait([signal.SIGTERM])
    made.unlink()
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("reap.testing.leaks.PATIENCE", 0.1)


def test_a_clean_block_passes():
    with no_leaks(), Collector("CartPole-v1", frames_per_batch=10) as c:
        c.next()


def test_a_thread(impatient):
    stop = threading.Event()
    with pytest.raises(AssertionError, match="left behind: threads: stray"), no_leaks():
        thread = threading.Thread(target=stop.wait, name="stray")
        thread.start()
    stop.set()
    thread.join()


def test_a_descriptor(tmp_path, impatient):
    with pytest.raises(AssertionError, match="descriptors.*some-file"), no_leaks():
        handle = open(tmp_path / "some-file", "w")  # noqa: SIM115
    handle.close()


def test_a_process(impatient):
    with pytest.raises(AssertionError, match="processes"), no_leaks():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.communicate(b"\n")


def test_a_file_in_shared_memory(impatient):
    with pytest.raises(AssertionError, match="shared memory: .*psm_"), no_leaks():
        made = SharedMemory(create=True, size=10)
        made.close()
    made.unlink()


def test_not_one_that_a_stranger_has_mapped(impatient):
    said = ""
    try:
        with no_leaks():
            stranger = subprocess.Popen([sys.executable, "-c", STRANGER], stdout=subprocess.PIPE, text=True)
            with stranger:
                pid, name = stranger.stdout.readline().split()
    except AssertionError as error:  # strangers of others may have left theirs
        said = str(error)
    assert name not in said
    os.kill(int(pid), signal.SIGTERM)


def test_what_libraries_keep_may_be_left_out(tmp_path, impatient):
    with no_leaks(libraries=False):
        handle = open(tmp_path / "some-file", "w")  # noqa: SIM115
    handle.close()
    with pytest.raises(AssertionError, match="threads: reap-stray.*descriptors: .*memfd:reap-stray"):  # noqa: SIM117
        with no_leaks(libraries=False):
            stop, fd = threading.Event(), os.memfd_create("reap-stray")
            thread = threading.Thread(target=stop.wait, name="reap-stray")
            thread.start()
    os.close(fd)
    stop.set()
    thread.join()


def test_two_hundred_collectors_leave_nothing():
    with no_leaks():
        for _ in range(200):
            Collector("CartPole-v1", frames_per_batch=10).next()
