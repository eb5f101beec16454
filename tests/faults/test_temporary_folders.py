"""Temporary folders: what a process that was killed has left goes when the next one is made, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from reap._system.temporary import TemporaryFolder
from reap.testing import no_leaks
from tests.worlds.faults import environment

CODE = """
import time
from reap._system.temporary import TemporaryFolder
folder = TemporaryFolder("test")
(folder.path / "something").write_text("!")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "TMPDIR": str(tmp_path)},
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_one_that_was_left_by_a_kill_goes_when_the_next_is_made(holder, tmp_path):
    process, path = holder
    with TemporaryFolder("test") as first:
        assert os.path.exists(f"{path}/something"), "its process lives"
        process.kill()
        process.wait()
        assert os.path.exists(path)
        TemporaryFolder("another kind").close()
        assert os.path.exists(path)
        with TemporaryFolder("test") as second:
            assert sorted(os.listdir(tmp_path)) == sorted([first.path.name, second.path.name])


def test_one_that_is_closed_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "reap-test-of-somebody"  # without a lock: not made by us
    foreign.mkdir()
    with no_leaks():
        folder = TemporaryFolder("test")
        folder.close()
        folder.close()
        assert os.listdir(tmp_path) == [foreign.name]
