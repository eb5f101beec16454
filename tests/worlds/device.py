"""The predictable world as a torch env that asks its device nothing: what a CUDA graph can record."""

from __future__ import annotations

import torch
from torch import nn

from reap.testing import CountingEnv


class CountingDevice:
    """CountingEnv's lanes in tensors. `rebinds`: new tensors take the place of old ones, as torch code likes to do."""

    single_observation_space = CountingEnv.observation_space
    single_action_space = CountingEnv.action_space

    def __init__(self, lengths, device="cpu", *, rebinds=False):
        self.num_envs, self.device, self.rebinds = len(lengths), torch.device(device), rebinds
        longest = max(map(len, lengths))
        table = [[one[e % len(one)] for e in range(longest * 60)] for one in lengths]
        self.lengths = torch.tensor(table, device=device)
        self.lane = torch.arange(self.num_envs, device=device)
        self.episode = torch.full((self.num_envs,), -1, device=device)
        self.t = torch.zeros(self.num_envs, dtype=torch.int64, device=device)

    def look(self):
        return torch.stack([self.lane, self.episode, self.t], 1).float()

    def reset(self, mask):
        episode, t = self.episode + mask, self.t.masked_fill(mask, 0)
        if self.rebinds:
            self.episode, self.t = episode, t
        else:
            self.episode.copy_(episode)
            self.t.copy_(t)
        return self.look()

    def step(self, action):
        self.t = self.t + 1 if self.rebinds else self.t.add_(1)
        over, odd = self.t >= self.lengths[self.lane, self.episode], self.episode % 2 == 1
        return self.look(), self.t + action[:, 0] / 8, over & ~odd, over & odd


class Forgetful(CountingDevice):
    """Keeps its clock in a Python number, which a CUDA graph cannot see."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.clock = 0

    def step(self, action):
        seen, reward, terminated, truncated = super().step(action)
        self.clock += 1
        return seen, reward + self.clock, terminated, truncated


class Recurrent(nn.Module):
    """Its memory counts steps and adds up what it saw; the action tells both."""

    carry = {"hidden": torch.tensor([2.0, 0.0])}

    def forward(self, observation, hidden):
        hidden = hidden + torch.stack([torch.ones_like(hidden[..., 0]), observation.sum(-1)], -1)
        return hidden.sum(-1, keepdim=True), hidden


class OfTensorDicts(nn.Module):
    """Code of its own on a whole TensorDict, with an output nobody declared."""

    def forward(self, tensordict):
        seen = tensordict["observation"]
        tensordict["action"] = seen.sum(-1, keepdim=True) * 0.5
        tensordict["value"] = seen.square().sum(-1)
        return tensordict
