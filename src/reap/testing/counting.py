"""The predictable world: an env, a policy, and the batches they must produce.

observation  [lane, episode, step]          action   3·lane + 5·episode + 7·step   (EchoPolicy)
reward       step + action/8                ends     after lengths[episode mod len(lengths)] steps;
                                                     terminated in even episodes, truncated in odd ones
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

_ECHO = (3.0, 5.0, 7.0)


class CountingEnv(gym.Env[Any, Any]):
    """Counts its episodes and steps and reports both; accepts any number as action, and returns it in the reward.

    >>> env = CountingEnv(lengths=(3, 1), lane=0)
    >>> env.reset()[0]
    array([0., 0., 0.], dtype=float32)
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, lengths: Sequence[int] = (3, 1, 5), lane: int = 0) -> None:
        self.lengths, self.lane = tuple(lengths), lane
        self.episode, self.t = -1, 0
        self.seed: int | None = None
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode; a seed restarts the count."""
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.episode = seed, -1
        self.episode += 1
        self.t = 0
        return self._observation(), {"episode": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make one step: increase the count, and end the episode when its length is reached."""
        self.t += 1
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        odd = self.episode % 2 == 1
        reward = self.t + float(np.asarray(action).reshape(-1)[0]) / 8
        return self._observation(), reward, over and not odd, over and odd, {"episode": self.episode}

    def _observation(self) -> np.ndarray[Any, Any]:
        return np.array([self.lane, self.episode, self.t], np.float32)

    def close(self) -> None:
        """Record that the env was closed."""
        self.closed = True


class EchoPolicy(nn.Module):
    """Its action tells what it saw, and, once its one weight is changed, which weight acted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mix", torch.tensor(_ECHO))

    def forward(self, observation: Tensor) -> Tensor:
        """Return 3·lane + 5·episode + 7·step, times the weight."""
        mix: Tensor = self.mix  # type: ignore[assignment]
        return (observation * mix).sum(-1, keepdim=True) * self.weight


class CountingWorld:
    """The batches a collector must deliver for lanes of CountingEnv under EchoPolicy, computed frame by frame.

    Slow and simple on purpose: it shares no code with the engine. To predict the share of worker `worker` of `workers`,
    give its first lane as `first_lane`; the trajectory ids of such a worker are every `workers`-th number.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        *,
        limit: int | None = None,
        weight: float = 1.0,
        first_lane: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self.lengths = [tuple(one) for one in lengths]
        self.first_lane, self.worker, self.workers = first_lane, worker, workers
        self.limit, self.weight = limit, weight
        lanes = len(self.lengths)
        self.episode, self.t = [0] * lanes, [0] * lanes
        self.ids = list(range(lanes))
        self.next_id = lanes

    def begin_again(self) -> None:
        """Reset all lanes, as `reset()` and `reset_at_each_iter` do."""
        for lane in range(len(self.lengths)):
            self._next_episode(lane)

    def _next_episode(self, lane: int) -> None:
        self.episode[lane] += 1
        self.t[lane] = 0
        self.ids[lane] = self.next_id
        self.next_id += 1

    def batch(self, steps: int) -> dict[Any, np.ndarray[Any, Any]]:
        """Return the next `steps` frames of every lane: arrays `[lanes, steps, …]` by key."""
        lanes = len(self.lengths)

        def column(width: int | None, dtype: Any) -> np.ndarray[Any, Any]:
            return np.zeros((lanes, steps) if width is None else (lanes, steps, width), dtype)

        out: dict[Any, np.ndarray[Any, Any]] = {
            ("observation",): column(3, np.float32),
            ("action",): column(1, np.float32),
            ("next", "observation"): column(3, np.float32),
            ("next", "reward"): column(1, np.float32),
            ("collector", "traj_ids"): column(None, np.int64),
        }
        for flag in ("done", "terminated", "truncated"):
            out[(flag,)] = column(1, np.bool_)
            out[("next", flag)] = column(1, np.bool_)
        if self.limit is not None:
            out[("step_count",)], out[("next", "step_count")] = column(1, np.int64), column(1, np.int64)
        for step in range(steps):
            for lane in range(lanes):
                self._frame(out, lane, step)
        return out

    def _frame(self, out: dict[Any, np.ndarray[Any, Any]], lane: int, step: int) -> None:
        at = lane, step
        episode, t = self.episode[lane], self.t[lane]
        name = self.first_lane + lane
        seen = np.array([name, episode, t], np.float32)
        action = np.float32(np.dot(seen, np.array(_ECHO, np.float32)) * np.float32(self.weight))
        over = t + 1 >= self.lengths[lane][episode % len(self.lengths[lane])]
        terminated, truncated = over and episode % 2 == 0, over and episode % 2 == 1
        truncated = truncated or (self.limit is not None and t + 1 >= self.limit)
        out[("observation",)][at] = seen
        out[("action",)][at] = action
        out[("next", "observation")][at] = name, episode, t + 1
        out[("next", "reward")][at] = t + 1 + action / 8
        out[("next", "terminated")][at] = terminated
        out[("next", "truncated")][at] = truncated
        out[("next", "done")][at] = terminated or truncated
        out[("collector", "traj_ids")][at] = self.ids[lane] * self.workers + self.worker
        if self.limit is not None:
            out[("step_count",)][at], out[("next", "step_count")][at] = t, t + 1
        self.t[lane] += 1
        if terminated or truncated:
            self._next_episode(lane)


def assert_same(batch: TensorDictBase, expected: dict[Any, np.ndarray[Any, Any]]) -> None:
    """Assert that `batch` holds exactly these columns, bit for bit. One lane may lack the lane dimension."""
    got = {k if isinstance(k, tuple) else (k,): v for k, v in batch.items(True, True)}
    assert set(got) == set(expected), f"keys differ: {sorted(map(str, set(got) ^ set(expected)))}"
    for key, want in expected.items():
        have = got[key].numpy()
        if batch.ndim == 1:
            want = want[0]
        assert have.shape == want.shape, f"{key}: shape {have.shape}, expected {want.shape}"
        assert have.dtype == want.dtype, f"{key}: dtype {have.dtype}, expected {want.dtype}"
        if not np.array_equal(have, want):
            where = tuple(np.argwhere(have != want)[0])
            raise AssertionError(f"{key} at {where}: {have[where]}, expected {want[where]}")
