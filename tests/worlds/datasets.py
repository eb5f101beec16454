"""What the dataset tests share: an env with every kind of column, and the comparison of whole datasets."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

FORMATS = ["minari", "parquet", "lerobot", "hdf5", "npz", "memmap"]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(one: TensorDict, other: TensorDict) -> bool:
    leaves, others = dict(one.items(True, True)), dict(other.items(True, True))
    return leaves.keys() == others.keys() and all(
        value.dtype == others[key].dtype and value.shape == others[key].shape and bits(value) == bits(others[key])
        for key, value in leaves.items()
    )


def whole_episodes(batches) -> list[TensorDict]:
    """The episodes that end in these batches, found the slow way: frame by frame."""
    open_ones, ended = {}, []
    for batch in batches:
        for lane in batch.reshape(-1, batch.batch_size[-1]):
            for frame in lane:
                number = int(frame["collector", "traj_ids"])
                open_ones.setdefault(number, []).append(frame.clone())
                if frame["next", "done"].any():
                    ended.append(torch.stack(open_ones.pop(number)))
    return ended


class Everything(gym.Env):
    """Observations of many types in a Dict, episodes of 1 to 9 steps."""

    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (12, 10, 3), np.uint8),
            "position": gym.spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "level": gym.spaces.Box(0, 9, (), np.int32),
        }
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        return self.seen(), {}

    def seen(self):
        draw = self.np_random
        image = draw.integers(0, 256, (12, 10, 3)).astype(np.uint8)
        position = np.array([np.nan, -0.0, draw.normal()])
        return {"image": image, "position": position, "level": np.int32(draw.integers(10))}

    def step(self, action):
        self.left -= 1
        return self.seen(), float(action[0]) * 0.1, self.left == 0, self.left == 1, {}


def policy(position):
    return {
        "action": torch.ones(*position.shape[:-1], 2) / 3,
        "value": position[..., 2:].bfloat16(),
        "hidden": {"state": position[..., 1:].half()},
    }
