"""no_leaks notices."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from reap.collectors import Collector
from reap.testing import no_leaks


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


def test_two_hundred_collectors_leave_nothing():
    with no_leaks():
        for _ in range(200):
            Collector("CartPole-v1", frames_per_batch=10).next()
