"""A disk or a shared memory that is full is an error with a name, never SIGBUS, and costs nothing that was there."""

from __future__ import annotations

import functools

import pytest

from tests.worlds.buffers import on_a_small_disk


def test_rows_that_do_not_fit_on_the_disk_are_refused_before_the_first_is_written(tmp_path):
    program = """
import tempfile
large = LazyMemmapStorage(2_000, scratch_dir=disk + "/large")
buffer = ReplayBuffer(storage=large, batch_size=4)
refused(lambda: buffer.extend(rows(10)), "max_size=2000", "1.6 MB", "scratch_dir", disk, "1.0 MB")
assert not buffer.initialized and len(buffer) == 0 and buffer.write_count == 0
assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > 1_000_000  # it was given back

fits = ReplayBuffer(storage=LazyMemmapStorage(1_000, scratch_dir=disk + "/fits"), batch_size=4)
fits.extend(rows(2_500))
refused(lambda: buffer.extend(rows(10)), "max_size=2000", "scratch_dir")
assert sorted(fits[:]["step"].tolist()) == list(range(1_500, 2_500))

tempfile.tempdir = disk
unnamed = ReplayBuffer(storage=LazyMemmapStorage(2_000), batch_size=4)
refused(lambda: unnamed.extend(rows(10)), "max_size=2000", "scratch_dir", disk)

for i in range(20):  # what is left is taken to the last byte: what was reserved can be written nevertheless
    fits.extend(rows(100, 10_000 + 100 * i))
with open(disk + "/rest", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
fits.extend(rows(1_000, 50_000))
assert sorted(fits[:]["step"].tolist()) == list(range(50_000, 51_000))
print("ends")
"""
    on_a_small_disk(program, tmp_path / "disk")


def test_a_worker_that_writes_first_says_so(tmp_path):
    program = """
from reap.collectors import MultiAsyncCollector
from reap.testing import CountingEnv

buffer = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=disk + "/rows"), batch_size=4)
collector = MultiAsyncCollector([CountingEnv], None, frames_per_batch=20, total_frames=-1, replay_buffer=buffer)
collector.start()
try:
    refused(buffer.sample, "worker 0", "max_size=100000", "scratch_dir", disk)
finally:
    collector.shutdown()
print("ends")
"""
    on_a_small_disk(program, tmp_path / "disk")


def test_memory_that_processes_share_does_not_lie_in_dev_shm(tmp_path):
    program = """
from reap.collectors import MultiSyncCollector
from reap.testing import CountingEnv

try:
    with open("/dev/shm/all", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    pass
buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=4)
buffer.extend(rows(20_000))
assert buffer[-1]["wide"][0] == 19_999
with MultiSyncCollector([CountingEnv], None, frames_per_batch=50_000, total_frames=100_000) as collector:
    assert sum(batch.numel() for batch in collector) == 100_000
print("ends")
"""
    on_a_small_disk(program, tmp_path / "disk", at="/dev/shm")


def test_without_memory_files_a_full_temporary_directory_is_told(tmp_path):
    """Where the system has no memory without a name, it is a file in the temporary directory."""
    program = """
import tempfile
tempfile.tempdir = disk
del os.memfd_create
buffer = ReplayBuffer(storage=LazyTensorStorage(2_000), batch_size=4)
refused(lambda: buffer.extend(rows(10)), "max_size=2000", "1.6 MB")
from reap.core.shared_slots import SharedFile
refused(lambda: SharedFile().map(3_000_000), "3.0 MB")
print("ends")
"""
    on_a_small_disk(program, tmp_path / "disk")


@pytest.mark.parametrize("size", [10**15, 10**19, 10**40])
def test_more_rows_than_any_machine_holds(size, tmp_path):
    from reap.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
    from reap.errors import ReapError

    for storage in (LazyTensorStorage, functools.partial(LazyMemmapStorage, scratch_dir=tmp_path, existsok=True)):
        with pytest.raises(ReapError, match=f"max_size={size}"):
            ReplayBuffer(storage=storage(size))
