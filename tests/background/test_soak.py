"""Three writers, one reader that never stops: as many frames as a long training has, and not one bad row."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

from reap.collectors import MultiAsyncCollector
from reap.data import LazyTensorStorage, MultiStep, ReplayBuffer, SliceSampler
from reap.envs import TorchEnv
from reap.testing import no_leaks
from tests.worlds.faults import pids

LANES, STEPS, CAPACITY = 1000, 20, 150_000
SLICE = 4


class Counters:
    """Many lanes at once: each sees who it is, which episode this is, and how far it has come."""

    num_envs = LANES
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    single_action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, first):
        self.seen = torch.zeros(LANES, 3)
        self.seen[:, 0] = torch.arange(first, first + LANES)
        self.seen[:, 1] = -1

    def reset(self, mask):
        self.seen[mask, 1] += 1
        self.seen[mask, 2] = 0
        return self.seen.clone()

    def step(self, action):
        self.seen[:, 2] += 1
        over = self.seen[:, 2] >= length(self.seen)
        return self.seen.clone(), self.seen.sum(-1), over, torch.zeros_like(over)


def length(seen):
    return 5 + (seen[:, 0] * 7 + seen[:, 1] * 3) % 40


def policy(observation):
    return (observation.sum(-1, keepdim=True) * 0.001).sin()


def check(rows):
    seen, after = rows["observation"], rows["next", "observation"]
    assert torch.equal(after - seen, torch.tensor([0.0, 0.0, 1.0]).expand_as(seen))
    assert torch.equal(rows["next", "reward"][:, 0], after.sum(-1))
    assert torch.equal(rows["next", "done"][:, 0], after[:, 2] >= length(seen))
    assert torch.allclose(rows["action"], policy(seen), atol=1e-6)


def check_windows(rows):
    """Rewards of up to `SLICE` steps, ahead to where the episode or its batch of rows ends."""
    seen, after, ahead = rows["observation"], rows["next", "observation"], rows["steps_to_next_obs"]
    assert torch.equal(after[:, 2] - seen[:, 2], ahead.float())
    assert torch.equal(after[:, :2], seen[:, :2])
    assert torch.equal(rows["next", "done"][:, 0], after[:, 2] >= length(seen))
    total = sum((k < ahead) * 0.5**k * (seen.sum(-1) + k + 1) for k in range(SLICE))
    assert torch.equal(rows["next", "reward"][:, 0], total)
    assert int(ahead.max()) == SLICE


def memory(pid):
    """Resident memory of its own, in MB: shared pages are the buffer's."""
    with open(f"/proc/{pid}/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found["RssAnon"].split()[0]) / 1024


def soak(frames):
    """Samples taken; growth of memory and descriptors between a quarter of the way and the end."""
    rows = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=512)
    fds, about = rows.handle()
    slices = ReplayBuffer.open([os.dup(fd) for fd in fds], about, sampler=SliceSampler(slice_len=SLICE), batch_size=512)
    windows = ReplayBuffer.open([os.dup(fd) for fd in fds], about, transform=MultiStep(0.5, SLICE), batch_size=512)
    with MultiAsyncCollector(
        [lambda first=first: TorchEnv(Counters(first)) for first in (0, LANES, 2 * LANES)],
        policy,
        frames_per_batch=LANES * STEPS,
        total_frames=frames,
        replay_buffer=rows,
    ) as collector:
        numbers = [os.getpid(), *pids(collector)]
        collector.start()
        samples, before, last = 0, None, -1
        while collector.is_running():
            check(rows.sample())
            check_windows(windows.sample())
            pieces = slices.sample()
            check(pieces)
            seen = pieces["observation"].reshape(-1, SLICE, 3)
            assert torch.equal(seen.diff(dim=1), torch.tensor([0.0, 0.0, 1.0]).expand(len(seen), SLICE - 1, 3))
            assert rows.write_count >= last
            samples, last = samples + 1, rows.write_count
            if before is None and last > frames / 4:
                before = [(memory(pid), len(os.listdir(f"/proc/{pid}/fd"))) for pid in numbers]
        after = [(memory(pid), len(os.listdir(f"/proc/{pid}/fd"))) for pid in numbers]
        assert rows.write_count == collector.stats()["frames"] >= frames
        assert len(rows) == CAPACITY
        check(rows[:])
        slices.shutdown()
        windows.shutdown()
    return samples, before, after


@pytest.mark.timeout(100)
def test_a_while():
    soak(300_000)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_thirty_million_frames(capsys):
    soak(300_000)
    began = time.monotonic()
    with no_leaks():
        samples, before, after = soak(30_000_000)
    took = time.monotonic() - began
    for (mb, fds), (mb_after, fds_after) in zip(before, after):
        assert mb_after - mb < 32, f"memory grew from {mb:.0f} to {mb_after:.0f} MB"
        assert fds_after <= fds
    with capsys.disabled():
        print(f"\n30,000,000 frames and {3 * samples:,} samples in {took:.0f} s")
