"""What recording costs at 50 MB a second: `python -m benchmarks.recording [FORMAT …]`.

An env shows images of 84×84×4 bytes and computes, in Python, until its collector makes 50 MB of batches in a second.
Blocks of batches are collected in turns with a recording and without: the median of what each adds to the block before
it, as time on the clock (with the wait, at the end of a block, until all of it is written), as CPU time of the thread
that collects, and as CPU time of the whole process. Others on the machine show in the first.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from reap.collectors import Collector
from reap.data import record

RATE = 50e6  # bytes of batches in a second
SHAPE = (84, 84, 4)
FRAMES = 300  # of a batch: three episodes
BATCHES = 3  # of a block
CLOCKS = (time.perf_counter, time.thread_time, time.process_time)
FORMATS = ("memmap", "npz", "hdf5", "minari", "parquet", "lerobot")


class Images(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(4)
    work = 0  # turns of a loop in each step

    def __init__(self) -> None:
        self._images = np.random.default_rng(0).integers(0, 256, (16, *SHAPE), np.uint8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._images[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        for _ in range(self.work):
            pass
        self._step += 1
        return self._images[self._step % 16], 1.0, self._step % 100 == 0, False, {}


def pace(collector: Collector) -> None:
    """Give the env as much work as makes 50 MB a second of CPU time."""

    def seconds(work: int) -> float:
        Images.work, found = work, []
        for _ in range(3):
            began = time.thread_time()
            collector.next()
            found.append(time.thread_time() - began)
        return statistics.median(found)

    first = collector.next()
    assert first is not None
    wanted, least, some = first.bytes() / RATE, seconds(0), 10_000
    Images.work = int(some * (wanted - least) / (seconds(some) - least))


def block(collector: Collector, recording: Any = None) -> list[float]:
    """What a few batches take, by each clock."""
    began = [clock() for clock in CLOCKS]
    for _ in range(BATCHES):
        collector.next()
    if recording is not None:
        work = recording._writer._work
        with work.changed:
            work.changed.wait_for(lambda: not work.bytes)
    return [clock() - start for clock, start in zip(CLOCKS, began)]


def added(format: Any, where: Path, rounds: int = 8) -> list[float]:
    """What a recording adds, by each clock, as a part of the CPU time of the same batches without it."""
    collector = Collector(Images, None, frames_per_batch=FRAMES)
    pace(collector)
    path = where / {"hdf5": "one.hdf5", "npz": "one.npz"}.get(format, format)
    pairs = []
    with record(collector, path, format) as recording:
        collector.next()  # opens its files
        for _ in range(rounds):
            collector._listeners.remove(recording._hear)
            without = block(collector)
            collector._listeners.add(recording._hear)
            recording.drop_unfinished()
            pairs.append((without, block(collector, recording)))
    collector.shutdown()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [
        statistics.median((after[n] - before[n]) / before[n] for before, after in pairs) for n in range(len(CLOCKS))
    ]


def main() -> None:
    torch.set_num_threads(1)
    where = Path(tempfile.mkdtemp(prefix="reap-recording-"))
    try:
        print(f"{'format':10} {'time':>7} {'CPU of the collecting thread':>29} {'CPU of all threads':>19}")
        for format in sys.argv[1:] or FORMATS:
            clock, thread, process = added(format, where)
            print(f"{format:10} {clock:7.1%} {thread:29.1%} {process:19.1%}", flush=True)
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
