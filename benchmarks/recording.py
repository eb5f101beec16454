"""What recording costs: `python -m benchmarks.recording`. Batches with and without a recording, in turns.

An env shows images at 50 MB a second, whatever it takes: the collector's own time is told beside what the recording
adds to it, as CPU time of this thread.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from reap.collectors import Collector
from reap.data import record

RATE = 50e6  # bytes of batches in a second
SHAPE = (84, 84, 4)
FRAMES = 300  # three episodes


class Images(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self._images = np.random.default_rng(0).integers(0, 256, (16, *SHAPE), np.uint8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._images[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._images[self._step % 16], 1.0, self._step % 100 == 0, False, {}


def added(format: str, where: Path, rounds: int = 40) -> float:
    """Seconds of CPU time that recording adds to a second of 50 MB."""
    collector = Collector(Images, None, frames_per_batch=FRAMES)
    first = collector.next()
    assert first is not None
    size = first.bytes()
    path = where / {"hdf5": "one.hdf5", "npz": "one.npz"}.get(format, format)
    costs: dict[bool, list[float]] = {True: [], False: []}
    with record(collector, path, format) as recording:
        for turn in range(rounds):
            recorded = turn % 2 == 0
            if not recorded:
                collector._listeners.remove(recording._hear)
            began = time.process_time()
            collector.next()
            costs[recorded].append(time.process_time() - began)
            if not recorded:
                collector._listeners.add(recording._hear)
                recording.drop_unfinished()
    collector.shutdown()
    # Formats write several batches' episodes at a time: the mean, of what is added, not the median.
    return (statistics.mean(costs[True]) - statistics.mean(costs[False])) * RATE / size


def main() -> None:
    where = Path(tempfile.mkdtemp(prefix="reap-recording-"))
    try:
        for format in ("memmap", "npz", "hdf5", "minari", "parquet", "lerobot"):
            print(f"{format:10} {added(format, where):6.1%} of a second per 50 MB")
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
