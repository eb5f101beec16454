"""A predictable PettingZoo AEC env."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

AECEnv = pytest.importorskip("pettingzoo").AECEnv


class Table(AECEnv):
    """An AEC env by the book. `order` says who is on turn, again and again, passing over those who have left;
    `deaths[turn]` who ends then, even agents terminated and odd ones truncated; after `length` turns all do.

    Observation [agent, day, turn]. Each move pays agent i turn + i/8, and the mover action/64 besides.
    """

    metadata = {"name": "table", "is_parallelizable": False}

    def __init__(self, count=3, order=(0, 1, 2), deaths=None, length=7):
        self.possible_agents = [f"a{i}" for i in range(count)]
        self.order, self.deaths, self.length = [*order, *range(count)], deaths or {}, length
        self.agents, self.day = [], -1

    def observation_space(self, agent):
        return gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def observe(self, agent):
        return np.array([int(agent[1:]), self.day, self.turn], np.float32)

    def reset(self, seed=None, options=None):
        self.day, self.turn, self.place = self.day + 1, 0, -1
        self.agents = self.possible_agents[:]
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {name: {} for name in self.agents}
        self._skip_agent_selection = None
        self._next()

    def _next(self):
        alive = [a for a in self.agents if not (self.terminations[a] or self.truncations[a])]
        while alive:
            self.place = (self.place + 1) % len(self.order)
            self.agent_selection = f"a{self.order[self.place]}"
            if self.agent_selection in alive:
                return

    def step(self, action):
        name = self.agent_selection
        if self.terminations[name] or self.truncations[name]:
            return self._was_dead_step(action)
        assert action.shape == (1,)
        self._cumulative_rewards[name] = 0
        self.turn += 1
        for other in self.agents:
            self.rewards[other] = self.turn + int(other[1:]) / 8 + (float(action[0]) / 64 if other == name else 0)
        self._accumulate_rewards()
        leaving = range(len(self.possible_agents)) if self.turn >= self.length else self.deaths.get(self.turn, ())
        for i in leaving:
            if f"a{i}" in self.agents:
                (self.truncations if i % 2 else self.terminations)[f"a{i}"] = True
        self._next()
        self._deads_step_first()
        return None

    def close(self): ...
