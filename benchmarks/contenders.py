"""Who runs: each contender is a function that collects one batch and returns it.

`hand_written` is the reference: what an expert would write for exactly this env and policy, storing the very same
columns in preallocated NumPy arrays.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical, Normal

from benchmarks.workloads import Case
from reap.collectors import Collector
from reap.envs import GymEnv, SerialEnv

Run = Callable[[], Any]


def hand_written(case: Case, *, probabilistic: bool) -> Run:
    """Preallocated arrays, one pass over the lanes per step, nothing generic."""
    n, steps = case.lanes, case.steps
    envs = [case.make() for _ in range(n)]
    space, act_space = envs[0].observation_space, envs[0].action_space
    policy = case.policy(probabilistic=probabilistic)
    obs = np.zeros((steps, n, *(space.shape or ())), space.dtype)
    next_obs = np.zeros_like(obs)
    action = np.zeros((steps, n, *(act_space.shape or ())), act_space.dtype)
    reward = np.zeros((steps, n), np.float32)
    terminated = np.zeros((steps, n), np.bool_)
    truncated = np.zeros((steps, n), np.bool_)
    done = np.zeros((steps, n), np.bool_)
    ids = np.zeros((steps, n), np.int64)
    current = np.stack([e.reset(seed=i)[0] for i, e in enumerate(envs)])
    traj = np.arange(n)
    extra: dict[str, Any] = {}
    if probabilistic:
        width: Any = act_space.shape if case.continuous else (act_space.n,)  # type: ignore[attr-defined]
        names = ("loc", "scale") if case.continuous else ("logits",)
        extra = {k: np.zeros((steps, n, *width), np.float32) for k in names}
        extra["log_prob"] = np.zeros((steps, n, *width) if case.continuous else (steps, n), np.float32)
        net = policy.module[0].module
    single = n == 1
    state = {"next_id": n}

    def decide(x: torch.Tensor, t: int) -> np.ndarray[Any, Any]:
        if not probabilistic:
            return policy(x).numpy()
        out = net(x)
        dist = Normal(*out) if case.continuous else Categorical(logits=out)
        chosen = dist.sample()
        extra["log_prob"][t] = dist.log_prob(chosen).numpy()
        if case.continuous:
            extra["loc"][t], extra["scale"][t] = out[0].numpy(), out[1].numpy()
        else:
            extra["logits"][t] = out.numpy()
        return chosen.numpy()

    def run() -> Any:
        with torch.no_grad():
            for t in range(steps):
                obs[t] = current
                chosen = decide(torch.from_numpy(current[0] if single else current), t)
                action[t] = chosen
                ids[t] = traj
                if case.continuous:
                    each: Any = action[t]
                else:
                    each = [int(chosen)] if single else chosen.tolist()
                for i in range(n):
                    o, r, term, trunc, _ = envs[i].step(each[i])
                    next_obs[t, i] = o
                    reward[t, i] = r
                    terminated[t, i] = term
                    truncated[t, i] = trunc
                    done[t, i] = ended = term or trunc
                    if ended:
                        o, _ = envs[i].reset()
                        traj[i] = state["next_id"]
                        state["next_id"] += 1
                    current[i] = o
        return obs, next_obs, action, reward, terminated, truncated, done, ids, extra

    return run


def with_reap(case: Case, *, probabilistic: bool) -> Run:
    """reap's Collector."""

    def lane() -> GymEnv:
        return GymEnv(case.make(), categorical_action_encoding=True)

    env: Any = lane() if case.lanes == 1 else SerialEnv(case.lanes, lane)
    collector = Collector(env, case.policy(probabilistic=probabilistic), frames_per_batch=case.frames)
    return iter(collector).__next__


def with_torchrl(case: Case, *, probabilistic: bool) -> Run | None:
    """TorchRL's Collector, if it is installed."""
    try:
        from torchrl.collectors import Collector as Theirs
        from torchrl.envs import GymWrapper
        from torchrl.envs import SerialEnv as TheirSerial
    except ImportError:
        return None

    def lane() -> Any:
        return GymWrapper(case.make(), categorical_action_encoding=True)

    env = lane() if case.lanes == 1 else TheirSerial(case.lanes, lane)
    policy = case.policy(probabilistic=probabilistic)
    if not probabilistic:  # it would try a bare module on random floats up to 3e38, which no soft-max survives
        policy = TensorDictModule(policy, in_keys=[case.key], out_keys=["action"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = Theirs(env, policy, frames_per_batch=case.frames, total_frames=-1)
        iterator = iter(collector)
        next(iterator)
    return iterator.__next__
