"""Envs of every kind whose steps can be predicted: the counting world as each library would have it."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from reap.testing import CountingEnv, CountingWorld


class CountingVector(VectorEnv):
    """CountingEnvs as a vector env written by hand: NEXT_STEP or SAME_STEP, and no way to reset single lanes."""

    def __init__(self, lengths, mode):
        self.envs = [CountingEnv(one, lane) for lane, one in enumerate(lengths)]
        self.num_envs = len(self.envs)
        self.single_observation_space = CountingEnv.observation_space
        self.single_action_space = CountingEnv.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": mode}
        self.mode = mode
        self.over = np.zeros(self.num_envs, bool)

    def reset(self, *, seed=None, options=None):
        self.over[:] = False
        return np.stack([e.reset()[0] for e in self.envs]), {}

    def step(self, actions):
        results = []
        final = np.full((self.num_envs, 3), np.nan, np.float32)
        for i, (env, action) in enumerate(zip(self.envs, actions)):
            if self.mode is AutoresetMode.NEXT_STEP and self.over[i]:
                results.append((env.reset()[0], 0.0, False, False))
                continue
            obs, reward, terminated, truncated, _ = env.step(action)
            if self.mode is AutoresetMode.SAME_STEP and (terminated or truncated):
                final[i] = obs
                obs = env.reset()[0]
            results.append((obs, reward, terminated, truncated))
        obs, reward, terminated, truncated = map(np.array, zip(*results))
        self.over = terminated | truncated
        info = {"final_obs": final, "_final_obs": self.over} if self.mode is AutoresetMode.SAME_STEP else {}
        return obs, reward, terminated, truncated, info


class SkippingWorld(CountingWorld):
    """What NEXT_STEP envs give that cannot reset single lanes: each end costs the lane one row of the batch."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.resetting = [False] * len(lengths)

    def batch(self, steps):
        lanes = len(self.lengths)
        out = super().batch(0)
        out = {k: np.zeros((lanes, steps, *v.shape[2:]), v.dtype) for k, v in out.items()}
        mask = np.zeros((lanes, steps), bool)
        out[("collector", "traj_ids")][...] = -1
        cursor = [0] * lanes
        for _ in range(steps):
            for lane in range(lanes):
                if self.resetting[lane]:
                    self.resetting[lane] = False
                    continue
                self._frame(out, lane, cursor[lane])
                mask[lane, cursor[lane]] = True
                self.resetting[lane] = bool(out[("next", "done")][lane, cursor[lane], 0])
                cursor[lane] += 1
        out[("collector", "mask")] = mask
        return out


class Town:
    """A parallel env by the book. `plan[i]` says when agent i is there: a list of (first step, last step), inclusive.

    Observation [agent, day, step], reward = step + agent/8. An agent's stay ends terminated (even agents) or truncated
    (odd ones). The day is over when nobody is left and nobody will come.
    """

    metadata = {"is_parallelizable": True}

    def __init__(self, plan):
        self.plan = plan
        self.possible_agents = [f"a{i}" for i in range(len(plan))]
        self.agents = []
        self.day, self.t = -1, 0

    def observation_space(self, agent):
        return gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def there(self, i, t):
        return any(a <= t <= b for a, b in self.plan[i])

    def look(self, i):
        return np.array([i, self.day, self.t], np.float32)

    def reset(self, seed=None, options=None):
        self.day, self.t = self.day + 1, 0
        self.agents = [f"a{i}" for i in range(len(self.plan)) if self.there(i, 0)]
        return {f"a{i}": self.look(i) for i in range(len(self.plan)) if self.there(i, 0)}, {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        assert all(a.shape == (1,) for a in actions.values())
        acting = [int(a[1:]) for a in self.agents]
        self.t += 1
        leaving = [i for i in acting if not self.there(i, self.t)]
        now = [i for i in range(len(self.plan)) if self.there(i, self.t)]
        seen = {f"a{i}": self.look(i) for i in {*acting, *now}}
        rewards = {f"a{i}": self.t + i / 8 for i in acting}
        self.agents = [f"a{i}" for i in now]
        over = {f"a{i}": i in leaving and i % 2 == 0 for i in acting}
        cut = {f"a{i}": i in leaving and i % 2 == 1 for i in acting}
        return seen, rewards, over, cut, {}

    def close(self): ...


# Agent 0 is always there (5 steps), 1 leaves early, 2 leaves and comes back, 3 comes late.
PLAN = [[(0, 4)], [(0, 1)], [(0, 0), (3, 4)], [(2, 4)]]


class CountingTorch:
    single_observation_space = CountingEnv.observation_space
    single_action_space = CountingEnv.action_space

    def __init__(self, lengths):
        self.num_envs = len(lengths)
        self.lengths = lengths
        self.episode = torch.full((self.num_envs,), -1)
        self.t = torch.zeros(self.num_envs, dtype=torch.int64)

    def look(self):
        return torch.stack([torch.arange(self.num_envs), self.episode, self.t], 1).float()

    def reset(self, mask):
        self.episode[mask] += 1
        self.t[mask] = 0
        return self.look()

    def step(self, action):
        self.t += 1
        limit = torch.tensor([one[int(e) % len(one)] for one, e in zip(self.lengths, self.episode)])
        over, odd = self.t >= limit, self.episode % 2 == 1
        return self.look(), self.t + action[:, 0] / 8, over & ~odd, over & odd


class CountingPool:
    """CountingEnvs behind EnvPool's interface: ended envs reset on their next step; subsets can be reset or stepped."""

    def __init__(self, lengths, batch_size=0):
        self.envs = [CountingEnv(one, lane) for lane, one in enumerate(lengths)]
        self.spec = SimpleNamespace(config=SimpleNamespace(num_envs=len(lengths), batch_size=batch_size))
        self.observation_space, self.action_space = CountingEnv.observation_space, CountingEnv.action_space
        self.all_env_ids = np.arange(len(lengths))
        self.over = np.zeros(len(lengths), bool)

    def send(self, action, env_id=None): ...

    def recv(self): ...

    def async_reset(self): ...

    def reset(self, env_id=None):
        ids = self.all_env_ids if env_id is None else np.asarray(env_id)
        self.over[ids] = False
        return np.stack([self.envs[i].reset()[0] for i in ids]), {"env_id": ids}

    def step(self, action, env_id=None):
        ids = self.all_env_ids if env_id is None else np.asarray(env_id)
        assert not self.over[ids].any(), "a step would be spent on a reset"
        out = [self.envs[i].step(a)[:4] for i, a in zip(ids, action)]
        obs, reward, terminated, truncated = (np.array(x) for x in zip(*out))
        self.over[ids] = terminated | truncated
        turn = np.roll(np.arange(len(ids)), 1)  # arrival order is not lane order
        return obs[turn], reward[turn], terminated[turn], truncated[turn], {"env_id": ids[turn]}

    def close(self): ...


class ReadyPool(CountingPool):
    """Answers `batch_size` of its envs at a time, in an order drawn from `seed`; the step after an end is a reset."""

    def __init__(self, lengths, batch_size, seed=0):
        super().__init__(lengths, batch_size)
        self.random, self.away = np.random.default_rng(seed), {}

    def async_reset(self):
        assert not self.away, "some lanes are still on their way"
        self.over[:] = False
        self.away = {i: (env.reset()[0], 0.0, False, False) for i, env in enumerate(self.envs)}

    def send(self, action, env_id=None):
        assert len(action) == len(env_id)
        for a, i in zip(action, env_id.tolist()):
            assert i not in self.away, "sent twice"
            again = self.over[i]
            self.away[i] = (self.envs[i].reset()[0], 0.0, False, False) if again else self.envs[i].step(a)[:4]
            self.over[i] = self.away[i][2] or self.away[i][3]

    def recv(self):
        assert len(self.away) >= self.spec.config.batch_size, "would wait for ever"
        ids = self.random.choice(sorted(self.away), self.spec.config.batch_size, replace=False)
        obs, reward, terminated, truncated = (np.array(x) for x in zip(*[self.away.pop(i) for i in ids]))
        return obs, reward, terminated, truncated, {"env_id": ids}


class Auto:
    """CountingEnvs behind PufferLib's interface, as its own envs are: a lane that ends is reset at once."""

    single_observation_space = CountingEnv.observation_space
    single_action_space = CountingEnv.action_space

    def __init__(self, lengths):
        self.envs = [CountingEnv(one, lane) for lane, one in enumerate(lengths)]
        n = self.num_agents = len(lengths)
        self.observations = np.zeros((n, 3), np.float32)
        self.rewards = np.zeros(n, np.float32)
        self.terminals, self.truncations = np.zeros(n, bool), np.zeros(n, bool)
        self.masks = np.ones(n, bool)
        self.seeds, self.closed = [], 0

    def reset(self, seed=None):
        self.seeds.append(seed)
        for i, env in enumerate(self.envs):
            self.observations[i] = env.reset()[0]
        return self.observations, []

    def step(self, actions):
        for i, (env, action) in enumerate(zip(self.envs, actions)):
            seen, self.rewards[i], self.terminals[i], self.truncations[i], _ = env.step(action)
            self.observations[i] = self.after_end(env) if self.terminals[i] or self.truncations[i] else seen
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def after_end(self, env):
        return env.reset()[0]

    def close(self):
        self.closed += 1


class Honest(Auto):
    """One that leaves resets to the loop."""

    autoreset = False

    def after_end(self, env):
        return env._observation()

    def reset_lanes(self, mask):
        for i in np.flatnonzero(mask):
            self.observations[i] = self.envs[i].reset()[0]


class Bindable(Honest):
    def bind(self, observations, rewards, terminals, truncations):
        self.observations, self.rewards = observations, rewards
        self.terminals, self.truncations = terminals, truncations
