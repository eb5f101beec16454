"""Random actions are legal ones, where an env says which are."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from reap.collectors import Collector, MultiSyncCollector, RandomPolicy
from reap.envs import GymEnv, PettingZooEnv, SerialEnv


class Legal(gym.Env):
    """Six choices, of which some are legal at each step; an illegal one is an error."""

    action_space = gym.spaces.Discrete(6)

    def __init__(self, dtype=np.int8):
        mask = gym.spaces.MultiBinary(6) if dtype == np.int8 else gym.spaces.Box(0, 1, (6,), dtype)
        self.observation_space = gym.spaces.Dict({"action_mask": mask, "seen": gym.spaces.Box(0, 1, (2,))})

    def seen(self):
        self.mask = self.np_random.random(6) < 0.5
        self.mask[self.np_random.integers(6)] = True
        dtype = self.observation_space["action_mask"].dtype
        return {"action_mask": self.mask.astype(dtype), "seen": np.zeros(2, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 9))
        return self.seen(), {}

    def step(self, action):
        assert self.mask[action], "an illegal action"
        self.left -= 1
        return self.seen(), 0.0, self.left == 0, False, {}


def legal(batch):
    action, mask = batch["action"], batch["action_mask"].bool()
    chosen = action.bool() if action.shape == mask.shape else torch.nn.functional.one_hot(action, 6).bool()
    assert (chosen.sum(-1) == 1).all()
    return bool((chosen & mask).any(-1).all()), chosen, mask


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("lanes", [1, 4])
def test_actions_are_legal_and_equally_likely(categorical, lanes):
    def make():
        return GymEnv(Legal(), categorical_action_encoding=categorical)

    env = make() if lanes == 1 else SerialEnv(lanes, make)
    collector = Collector(env, frames_per_batch=2000)
    collector.set_seed(0)
    right, chosen, mask = legal(collector.next())
    assert "action_mask allows" in collector.explain()
    collector.shutdown()
    assert right
    two = mask.sum(-1) == 2  # of two legal ones each is taken half of the time
    first = (chosen & (mask.int().cumsum(-1) == 1) & mask).any(-1)[two].float().mean()
    assert 0.4 < float(first) < 0.6


def test_random_frames_before_a_policy_acts():
    def policy(action_mask, seen):
        return (action_mask * torch.tensor([1, 2, 3, 4, 5, 6])).argmax(-1)

    env = GymEnv(Legal(), categorical_action_encoding=True)
    collector = Collector(env, policy, frames_per_batch=100, init_random_frames=200)
    batches = [collector.next().clone() for _ in range(3)]
    collector.shutdown()
    highest = [bool((b["action"] == policy(b["action_mask"], None)).all()) for b in batches]
    assert highest == [False, False, True]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64], ids=["bool", "uint8", "int64"])
def test_masks_of_other_types(dtype):
    collector = Collector(lambda: Legal(dtype), RandomPolicy(), frames_per_batch=300)
    assert legal(collector.next())[0]
    collector.shutdown()


def test_in_workers():
    collector = MultiSyncCollector([Legal] * 2, None, frames_per_batch=200)
    for _ in range(2):
        assert legal(collector.next())[0]
    collector.shutdown()


def test_by_hand():
    assert legal(GymEnv(Legal()).rollout(200, break_when_any_done=False))[0]


def test_a_game_in_turns():
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    from pettingzoo.classic import tictactoe_v3

    collector = Collector(lambda: PettingZooEnv(tictactoe_v3.env()), frames_per_batch=200)
    batch = collector.next()
    rewards = batch["next", "reward"]
    collector.shutdown()
    assert batch["next", "done"].any()
    assert rewards.min() >= -1
    mask = batch["action_mask"].bool()
    assert (batch["action"].bool() & mask).any(-1)[batch["collector", "mask"]].all()
