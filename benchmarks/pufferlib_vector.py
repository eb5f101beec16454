"""PufferLib's Multiprocessing vector env on the work of `benchmarks.multi`: 2 workers × 16 CartPole lanes, policy here.

A script of its own, for an interpreter that has PufferLib (which asks for an older gymnasium and numpy than reap is
tested with): `python -m benchmarks.multi --pufferlib /path/to/that/python` starts it. For each line it reads, a number
of frames, it makes as many and writes how many seconds it took. Its envs spend a step on each reset, which counts as a
frame here.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pufferlib.emulation
import pufferlib.vector
import torch
from torch import nn

WORKERS, LANES, STEPS = 2, 16, 128


def lane(**options: Any) -> Any:
    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=gym.make, env_args=["CartPole-v1"], **options)


class Loop:
    """Collects `STEPS` steps of all lanes, and stores the columns that other peers' loops store."""

    def __init__(self) -> None:
        count = WORKERS * LANES
        self.env = pufferlib.vector.make(
            lane, num_envs=count, num_workers=WORKERS, backend=pufferlib.vector.Multiprocessing
        )
        self._net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        lead = (STEPS, count)
        self._obs, self._next = np.zeros((*lead, 4), np.float32), np.zeros((*lead, 4), np.float32)
        self._action, self._ids = np.zeros(lead, np.int64), np.zeros(lead, np.int64)
        self._reward = np.zeros(lead, np.float32)
        self._terminated, self._truncated, self._done = (np.zeros(lead, np.bool_) for _ in range(3))
        self._traj, self._next_id = np.arange(count), count
        self._current = self.env.reset()[0].copy()

    def __call__(self) -> int:
        with torch.no_grad():
            for t in range(STEPS):
                self._obs[t] = self._current
                logits = self._net(torch.from_numpy(self._current))
                self._action[t] = chosen = torch.distributions.Categorical(logits=logits).sample().numpy()
                self._ids[t] = self._traj
                seen, self._reward[t], terminated, truncated, _ = self.env.step(chosen)
                self._current = self._next[t] = seen
                self._terminated[t], self._truncated[t] = terminated, truncated
                self._done[t] = done = terminated | truncated
                ended = done.nonzero()[0]
                self._traj[ended] = np.arange(self._next_id, self._next_id + len(ended))
                self._next_id += len(ended)
        return self._obs.shape[0] * self._obs.shape[1]


def main() -> None:
    torch.set_num_threads(1)
    loop = Loop()
    loop()
    print("ready", flush=True)
    for line in sys.stdin:
        began, frames = time.perf_counter(), 0
        while frames < int(line):
            frames += loop()
        print((time.perf_counter() - began) * int(line) / frames, flush=True)
    loop.env.close()


if __name__ == "__main__":
    main()
