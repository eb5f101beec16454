"""The reference in one process: what an expert would write for exactly this env, this policy and these columns.

    Loop(SerialLanes(envs), act, steps)     fills preallocated arrays `[T, N, …]` and returns them

`act` maps the observations of all lanes to the columns of a policy: its action, and whatever else is kept. Below it are
the policies of the benchmarks as few torch calls. All of it runs in `torch.inference_mode`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]
Act = Callable[[Tensor], dict[str, Tensor]]


class RunningNorm:
    """A mean and a variance that decay, as VecNorm keeps them, and rows within ten deviations."""

    def __init__(self, width: int, decay: float = 0.99999, eps: float = 1e-2) -> None:
        self.sum, self.squares = np.zeros(width), np.zeros(width)
        self.count, self.decay, self.eps = 0.0, decay, eps

    def __call__(self, x: Array) -> Array:
        self.sum *= self.decay
        self.sum += x.sum(0)
        self.squares *= self.decay
        self.squares += (x**2).sum(0)
        self.count = self.count * self.decay + len(x)
        mean = self.sum / self.count
        scale = np.sqrt(np.maximum(self.squares / self.count - mean**2, self.eps))
        return np.clip((x - mean) / np.maximum(scale, self.eps), -10, 10)


class SerialLanes:
    """Envs stepped one after the other.

    `raw` is what the last step showed. Where an episode ended, `fresh` is what the next one begins with.
    """

    def __init__(self, envs: Sequence[Any], seed: int | None = None) -> None:
        self.envs, self.discrete = envs, isinstance(envs[0].action_space, gym.spaces.Discrete)
        if seed is not None:  # as TorchRL seeds them: the reset of the seed, and one more
            for env in envs:
                env.reset(seed=seed)
        self.raw = np.stack([env.reset()[0] for env in envs])
        self.fresh = np.empty_like(self.raw)
        self._steps = [env.step for env in envs]

    def step(self, actions: Array, reward: Array, terminated: Array, truncated: Array) -> list[int]:
        """Step all; the rows are this step's. Return the lanes whose episodes ended."""
        ended = []
        raw, steps = self.raw, self._steps
        for i, action in enumerate(actions.tolist() if self.discrete else actions):
            raw[i], reward[i], over, cut, _ = steps[i](action)
            if over or cut:
                terminated[i], truncated[i] = over, cut
                self.fresh[i] = self.envs[i].reset()[0]
                ended.append(i)
        return ended

    def close(self) -> None:
        for env in self.envs:
            env.close()


class Loop:
    """Fills preallocated columns `[T, N, …]`, the same ones for every batch.

    `norm` maps what envs show to what the policy sees, in float32. `counters` are the return and the number of steps of
    each episode so far. `single`: one lane, whose policy sees no dimension of lanes. `forget` is called with a lane
    whose episode ended, for policies that remember.
    """

    def __init__(
        self,
        lanes: Any,
        act: Act,
        steps: int,
        *,
        norm: Callable[[Array], Array] | None = None,
        counters: bool = False,
        single: bool = False,
        forget: Callable[[int], None] | None = None,
    ) -> None:
        self.lanes, self.act, self.steps, self.norm, self.single, self.forget = lanes, act, steps, norm, single, forget
        first = lanes.raw if norm is None else norm(lanes.raw).astype(np.float32)
        self.current = first.copy()
        self.seen = torch.from_numpy(self.current[0] if single else self.current)
        n = len(first)
        lead = (steps, n)
        self.traj, self.next_id = np.arange(n), n
        self.total, self.count = np.zeros(n, np.float32), np.zeros(n, np.int64)
        self.columns = {key: np.zeros((*lead, *first.shape[1:]), first.dtype) for key in ("observation", "successor")}
        self.columns |= {key: np.zeros(lead, np.bool_) for key in ("terminated", "truncated", "done")}
        self.columns |= {"reward": np.zeros(lead, np.float32), "traj_ids": np.zeros(lead, np.int64)}
        self.counters: Columns = {}
        if counters:
            self.counters = {"episode_reward": np.zeros(lead, np.float32), "step_count": np.zeros(lead, np.int64)}
        self.written: Columns = {}

    def __call__(self) -> Columns:
        lanes, act, norm, current, seen = self.lanes, self.act, self.norm, self.current, self.seen
        obs, successor, reward, ids = (self.columns[k] for k in ("observation", "successor", "reward", "traj_ids"))
        terminated, truncated, done = (self.columns[k] for k in ("terminated", "truncated", "done"))
        for flag in (terminated, truncated, done):
            flag[...] = False
        with torch.inference_mode():
            for t in range(self.steps):
                obs[t], ids[t] = current, self.traj
                row = act(seen)
                for key, value in row.items():
                    self.column_of(key, value)[t] = value.numpy()
                ended = lanes.step(self.written["action"][t], reward[t], terminated[t], truncated[t])
                current[...] = lanes.raw if norm is None else norm(lanes.raw)
                successor[t] = current
                if self.counters:
                    self.total += reward[t]
                    self.count += 1
                    self.counters["episode_reward"][t], self.counters["step_count"][t] = self.total, self.count
                for i in ended:
                    self.begin(i)
                    done[t, i] = True
        return self.columns | self.counters | self.written

    def column_of(self, key: str, value: Tensor) -> Array:
        if key not in self.written:
            shape = (1, *value.shape) if self.single else value.shape
            self.written[key] = np.zeros((self.steps, *shape), value.numpy().dtype)
        return self.written[key]

    def begin(self, i: int) -> None:
        """Begin the next episode of a lane."""
        first = self.lanes.fresh[i : i + 1]
        self.current[i] = (first if self.norm is None else self.norm(first))[0]
        self.traj[i], self.next_id = self.next_id, self.next_id + 1
        self.total[i] = self.count[i] = 0
        if self.forget is not None:
            self.forget(i)

    def close(self) -> None:
        self.lanes.close()


# ---- policies -------------------------------------------------------------------------------------------------------


def plain(policy: nn.Module) -> Act:
    """A module from observations to actions, called as it is."""
    return lambda x: {"action": policy(x)}


def custom(policy: nn.Module) -> Act:
    """A module that returns an action, its log-probability and a value."""

    def act(x: Tensor) -> dict[str, Tensor]:
        action, log_prob, value = policy(x)
        return {"action": action, "log_prob": log_prob, "value": value}

    return act


def categorical(net: nn.Module) -> Act:
    """Sampled, with logits and log-probability."""

    def act(x: Tensor) -> dict[str, Tensor]:
        logits = net(x)
        normal = logits - logits.logsumexp(-1, keepdim=True)
        action = torch.multinomial(normal.exp(), 1)
        log_prob = normal.gather(-1, action).squeeze(-1)
        return {"action": action.squeeze(-1), "logits": logits, "action_log_prob": log_prob}

    return act


def normal(net: nn.Module) -> Act:
    """A Gaussian of independent dimensions."""

    def act(x: Tensor) -> dict[str, Tensor]:
        loc, scale = net(x)
        noise = torch.randn_like(loc)
        log_prob = (-0.5 * noise**2 - scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        return {"action": loc + noise * scale, "loc": loc, "scale": scale, "action_log_prob": log_prob}

    return act


def tanh_normal(net: nn.Module, scale_of: Callable[[], Tensor], high: float) -> Act:
    """PPO's actor: a squashed Gaussian whose scale does not depend on the observation."""
    affine = math.log(high)

    def act(x: Tensor) -> dict[str, Tensor]:
        loc = net(x)
        scale = scale_of().expand_as(loc)
        noise = torch.randn_like(loc)
        raw = loc + noise * scale
        squashed = raw.tanh().clamp(-1 + 1e-6, 1 - 1e-6)
        log_prob = -0.5 * noise**2 - scale.log() - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw)) - affine
        return {"action": squashed * high, "loc": loc, "scale": scale, "action_log_prob": log_prob.sum(-1)}

    return act


def sac(net: nn.Module, extract: nn.Module) -> Act:
    """SAC's actor: both parameters from the network, no log-probability while collecting."""

    def act(x: Tensor) -> dict[str, Tensor]:
        loc, scale = extract(net(x))
        action = (loc + torch.randn_like(loc) * scale).tanh().clamp(-1 + 1e-6, 1 - 1e-6)
        return {"action": action, "loc": loc, "scale": scale}

    return act


def noisy(net: nn.Module, sigma: Tensor) -> Act:
    """TD3's: a deterministic actor, and noise within bounds."""

    def act(x: Tensor) -> dict[str, Tensor]:
        param = net(x)
        action = param.tanh()
        return {"param": param, "action": (action + torch.randn_like(action) * sigma).clamp(-1, 1)}

    return act


def greedy_q(net: nn.Module, eps: Tensor) -> Act:
    """DQN's: the action of the largest value, now and then another."""

    def act(x: Tensor) -> dict[str, Tensor]:
        values = net(x)
        best, action = values.max(-1, keepdim=True)
        action = action.squeeze(-1)
        random = torch.randint_like(action, values.shape[-1])
        action = torch.where(torch.rand(action.shape) < eps, random, action)
        return {"action": action, "action_value": values, "chosen_action_value": best}

    return act
