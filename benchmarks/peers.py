"""The same work by other libraries, where they are installed: each contender is a function that makes one batch.

TorchRL brings collectors of its own. Stable-Baselines3, Gymnasium and Tianshou bring lanes in processes, one each, and
the policy acts here in a tight loop that stores the columns of the hand-written one; true last observations are taken
from where each library keeps them.

Not among them, because they cannot live beside the gymnasium and numpy the project is tested with (interpreters.py runs
them elsewhere): RLlib 2.60 wants gymnasium 1.2.2, Sample Factory 2.1 gymnasium below 1.0 and numpy below 2, PufferLib
gymnasium 0.29 (1.0 was measured: 2 and 3 are built with downloads).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule

from benchmarks.board import Contender
from benchmarks.envs_and_policies import Case


def torchrl(case: Case, workers: int, *, sync: bool, probabilistic: bool = False) -> Contender:
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
    from torchrl.envs import GymWrapper, SerialEnv

    def lane() -> Any:
        return GymWrapper(case.make(), categorical_action_encoding=True)

    lanes, key = case.lanes, "observation"
    if case.env.startswith("ALE/"):
        probe = lane()
        key = next(k for k in probe.observation_spec.keys(True, True) if isinstance(k, str))
        probe.close()
    policy = case.policy(probabilistic=probabilistic)
    if not probabilistic:
        policy = TensorDictModule(policy, in_keys=[key], out_keys=["action"])
    frames = case.frames * workers if sync else case.frames
    kind = MultiSyncCollector if sync else MultiAsyncCollector
    made = [lambda: SerialEnv(lanes, lane)] * workers
    more = {"cat_results": "stack"} if sync else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = kind(made, policy, frames_per_batch=frames, total_frames=-1, **more)
        run = iter(collector).__next__
        run()
    return Contender(run, frames, collector.shutdown, 0 if sync else workers, 1 if sync else workers)


class _Store:
    """The columns of the hand-written loop, in this process."""

    def __init__(self, case: Case, lanes: int) -> None:
        env = case.make()
        seen, act = env.observation_space, env.action_space
        env.close()
        lead = (case.steps, lanes)
        self.obs = np.zeros((*lead, *(seen.shape or ())), seen.dtype)
        self.next_obs = np.zeros_like(self.obs)
        self.action = np.zeros((*lead, *(act.shape or ())), act.dtype)
        self.reward, self.ids = np.zeros(lead, np.float32), np.zeros(lead, np.int64)
        self.terminated, self.truncated, self.done = (np.zeros(lead, np.bool_) for _ in range(3))
        self.traj, self.next_id = np.arange(lanes), lanes

    def renumber(self, ended: Any) -> None:
        self.traj[ended] = np.arange(self.next_id, self.next_id + len(ended))
        self.next_id += len(ended)


def _loop(case: Case, lanes: int, first: Any, step: Callable[[Any], Any]) -> Callable[[], Any]:
    """`step` takes actions; it returns what is seen now, what was seen last, rewards, terminated and truncated."""
    policy, store = case.policy(probabilistic=False), _Store(case, lanes)
    current = first

    def run() -> Any:
        nonlocal current
        with torch.inference_mode():
            for t in range(case.steps):
                store.obs[t] = current
                store.action[t] = chosen = policy(torch.from_numpy(current)).numpy()
                store.ids[t] = store.traj
                current, last, store.reward[t], terminated, truncated = step(chosen)
                store.next_obs[t] = last
                store.terminated[t], store.truncated[t] = terminated, truncated
                store.done[t] = done = terminated | truncated
                if done.any():
                    store.renumber(done.nonzero()[0])
        return store

    return run


def stable_baselines3(case: Case, workers: int) -> Contender:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    n = workers * case.lanes
    env = SubprocVecEnv([case.make] * n, start_method="fork")

    def step(chosen: Any) -> Any:
        seen, reward, done, infos = env.step(chosen)
        truncated = np.zeros(n, np.bool_)
        last = seen
        if done.any():
            last = seen.copy()
            for i in done.nonzero()[0]:
                last[i] = infos[i]["terminal_observation"]
                truncated[i] = infos[i]["TimeLimit.truncated"]
        return seen, last, reward, done & ~truncated, truncated

    return Contender(_loop(case, n, env.reset(), step), n * case.steps, env.close)


def gymnasium(case: Case, workers: int) -> Contender:
    n = workers * case.lanes
    env = gym.vector.AsyncVectorEnv([case.make] * n, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def step(chosen: Any) -> Any:
        seen, reward, terminated, truncated, info = env.step(chosen)
        last = seen
        if "final_obs" in info:
            last = seen.copy()
            for i in (terminated | truncated).nonzero()[0]:
                last[i] = info["final_obs"][i]
        return seen, last, reward, terminated, truncated

    return Contender(_loop(case, n, env.reset(seed=0)[0], step), n * case.steps, env.close)


def tianshou(case: Case, workers: int) -> Contender:
    from tianshou.env import ShmemVectorEnv

    n = workers * case.lanes
    env = ShmemVectorEnv([case.make] * n)

    def step(chosen: Any) -> Any:
        seen, reward, terminated, truncated, _ = env.step(chosen)
        last = seen
        done = terminated | truncated
        if done.any():
            (ended,) = done.nonzero()
            seen = seen.copy()
            seen[ended] = env.reset(ended)[0]
        return seen, last, reward, terminated, truncated

    return Contender(_loop(case, n, env.reset()[0], step), n * case.steps, env.close)


VECTOR_ENVS: dict[str, Callable[[Case, int], Contender]] = {
    "SB3": stable_baselines3,
    "Gymnasium": gymnasium,
    "Tianshou": tianshou,
}
