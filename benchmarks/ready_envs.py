"""Many envs, one policy that answers whoever is ready: `AsyncBatchedCollector`.

    slow env        every step sleeps, exponentially, 2 ms on average; 32 envs could make 16,000 frames/s ("ideal")
                    once with TorchRL's actor, once with a module that samples from torch's own Categorical
    one straggler   one of the 32 is a hundred times slower: beside the sum of all envs' own rates
    CartPole        32 envs in 2 processes

"with cores of their own" is reap with `driver_affinity` and `worker_affinity`, the policy on the first core and the
envs on the others (Linux). TorchRL is there twice: as it comes, and set up for this (threads, batches of at most 32).
Its envs go on by themselves when nobody asks, so it runs alone, after the others. The loop by hand has a thread per env
and two kinds of queue, decides about whoever is ready, samples by `torch.multinomial` (or calls the module as it is),
and stores the columns reap stores in preallocated arrays.
"""

from __future__ import annotations

import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import actors
from benchmarks.board import HAND, REAP, TORCHRL, Budget, Contender, Probe, Row, Workload, race, ratio
from benchmarks.envs_and_policies import DiscretePolicy, mlp
from reap.collectors import AsyncBatchedCollector
from reap.envs import GymEnv

ENVS, MEAN = 32, 2e-3


class Slow(gym.Env[Any, Any]):
    """Sleeps, and does nothing else; episodes of 200 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int, mean: float = MEAN) -> None:
        self._sleeps = np.random.default_rng(number).exponential(mean, 4096).tolist()
        self._t = self._n = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self._n, self._t = (self._n + 1) % 4096, self._t + 1
        time.sleep(self._sleeps[self._n])
        return np.full(4, self._t / 200, np.float32), 1.0, False, self._t >= 200, {}


@dataclass(frozen=True)
class Case:
    """Envs by number, and what their number of frames per second could be."""

    name: str
    make: Callable[[int], gym.Env[Any, Any]]
    frames: int
    backend: Any
    per_worker: int = 1
    threads: bool = False
    module: bool = False  # the policy is a module that samples by itself
    ideal: float | None = None
    aims: Mapping[str, float] = field(default_factory=dict)


SLEEPING: dict[str, Any] = {"frames": 3200, "backend": "multiprocessing", "per_worker": ENVS, "threads": True}
IDEAL = "ideal"
CASES = [
    Case("slow env, ProbabilisticActor", Slow, **SLEEPING, ideal=ENVS / MEAN, aims={IDEAL: 0.80, TORCHRL: 10.0}),
    Case("slow env, nn.Module", Slow, **SLEEPING, module=True, ideal=ENVS / MEAN),
    Case(
        "slow env, one of 32 is 100× slower",
        lambda number: Slow(number, MEAN if number else 100 * MEAN),
        **SLEEPING,
        ideal=(ENVS - 1 + 0.01) / MEAN,
        aims={IDEAL: 0.80},
    ),
    Case("CartPole, 32 envs in 2 processes", lambda number: gym.make("CartPole-v1"), 6400, "multiprocessing", 16),
]


def policy(case: Case) -> nn.Module:
    torch.manual_seed(0)
    if case.module:
        return DiscretePolicy(mlp(4, 2))
    return actors.categorical(mlp(4, 2))


class ByHand:
    """A thread per env, a queue to each and one from all."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        net, frames = mlp(4, 2), case.frames
        self._act = DiscretePolicy(net) if case.module else lambda x: net(x).softmax(-1).multinomial(1)[:, 0]
        self._obs, self._next = np.zeros((frames, 4), np.float32), np.zeros((frames, 4), np.float32)
        self._action, self._ids, self._env = (np.zeros(frames, np.int64) for _ in range(3))
        self._reward = np.zeros(frames, np.float32)
        self._terminated, self._truncated, self._done = (np.zeros(frames, np.bool_) for _ in range(3))
        self._traj, self._next_id = list(range(ENVS)), ENVS
        self._sent: list[Any] = [None] * ENVS
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(ENVS)]
        envs = [case.make(number) for number in range(ENVS)]
        self._threads = [threading.Thread(target=self._live, args=(n, env)) for n, env in enumerate(envs)]
        for thread in self._threads:
            thread.start()
        self._decide({n: env.reset(seed=n)[0] for n, env in enumerate(envs)})

    def _live(self, number: int, env: gym.Env[Any, Any]) -> None:
        orders, answers = self._orders[number], self._answers
        while (action := orders.get()) is not None:
            obs, reward, terminated, truncated, _ = env.step(action)
            first = env.reset()[0] if terminated or truncated else obs
            answers.put((number, obs, reward, terminated, truncated, first))

    def _decide(self, seen: dict[int, Any]) -> None:
        with torch.inference_mode():
            actions = self._act(torch.from_numpy(np.stack(list(seen.values())))).tolist()
        for (number, obs), action in zip(seen.items(), actions):
            self._sent[number] = obs, action
            self._orders[number].put(action)

    def __call__(self) -> Any:
        n, frames = 0, len(self._obs)
        while n < frames:
            seen = {}
            answer = self._answers.get()
            while True:
                number, obs, reward, terminated, truncated, first = answer
                self._obs[n], self._action[n] = self._sent[number]
                self._next[n], self._reward[n] = obs, reward
                self._terminated[n], self._truncated[n] = terminated, truncated
                self._done[n] = ended = terminated or truncated
                self._ids[n], self._env[n] = self._traj[number], number
                if ended:
                    self._traj[number], self._next_id = self._next_id, self._next_id + 1
                seen[number] = first
                n += 1
                if n == frames or self._answers.empty():
                    break
                answer = self._answers.get()
            self._decide(seen)
        return self._obs, self._next, self._action, self._reward, self._done, self._ids

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join()


def by_hand(case: Case) -> Contender:
    loop = ByHand(case)
    return Contender(loop, case.frames, loop.close)


def reap(case: Case, **options: Any) -> Contender:
    collector = AsyncBatchedCollector(
        [lambda n=n: GymEnv(case.make(n), categorical_action_encoding=True) for n in range(ENVS)],
        policy(case),
        frames_per_batch=case.frames,
        env_backend=case.backend,
        envs_per_worker=case.per_worker,
        worker_threads=case.threads,
        **options,
    )
    return Contender(iter(collector).__next__, case.frames, collector.shutdown)


def placed(case: Case) -> Contender:
    """reap, told which core is for the policy and which for the envs."""
    first, *others = sorted(os.sched_getaffinity(0))
    return reap(case, driver_affinity=[first], worker_affinity=[others or [first]])


def torchrl(case: Case, **options: Any) -> Contender:
    from torchrl.collectors import AsyncBatchedCollector as Theirs
    from torchrl.envs import GymWrapper

    collector = Theirs(
        create_env_fn=[lambda n=n: GymWrapper(case.make(n), categorical_action_encoding=True) for n in range(ENVS)],
        policy=TensorDictModule(policy(case), in_keys=["observation"], out_keys=["action"])
        if case.module
        else policy(case),
        frames_per_batch=case.frames // 8,
        total_frames=-1,
        **options,
    )
    return Contender(iter(collector).__next__, case.frames // 8, collector.shutdown)


def tuned(case: Case) -> Contender:
    """TorchRL's, told what this is: envs that wait, and at most so many of them in a batch."""
    return torchrl(case, max_batch_size=ENVS, env_backend="threading")


# ---- the table ------------------------------------------------------------------------------------------------------

GROUP = "whoever is ready"


def alone(contender: Contender, rounds: int) -> list[float]:
    try:
        return race({"": contender}, 0.0, least=rounds, most=rounds)[""]
    finally:
        contender.close()


def measure(case: Case, budget: Budget, workload: Workload) -> list[Row]:
    """In turns: reap and the loop by hand. Then TorchRL, alone, and only where peers are asked for or an aim is."""
    case = replace(case, frames=max(ENVS * 8, int(case.frames * budget.scale)))
    rounds = 2 if budget.scale < 1 else 5
    ours: dict[str, Contender] = {REAP: reap(case)}
    if case.threads:
        ours |= {"with cores of their own": placed(case)} if hasattr(os, "sched_setaffinity") else {}
        ours |= {HAND: by_hand(case)}
    try:
        seconds = race(ours, 0.0, least=rounds, most=rounds)
    finally:
        for one in ours.values():
            one.close()
    if "slower" not in case.name and (budget.peers or (TORCHRL in case.aims and budget.scale == 1)):
        seconds[TORCHRL] = alone(torchrl(case), 3)
        if budget.peers:
            seconds["TorchRL, set up for it"] = alone(tuned(case), 3)
    speeds = {name: 1 / statistics.median(each) for name, each in seconds.items()}
    told = {
        name: ratio(zip(each, seconds[REAP]), case.aims.get(name)) for name, each in seconds.items() if name != REAP
    }
    if case.ideal is not None:
        speeds[IDEAL] = case.ideal
        shares = [(1 / each, case.ideal) for each in seconds[REAP]]
        told[IDEAL] = ratio(shares, case.aims.get(IDEAL))
    return [Row(GROUP, case.name, "frames/s", speeds, told, rounds)]


def workloads() -> list[Workload]:
    return [Probe(GROUP, case.name, case.aims, bool(case.aims), partial(measure, case)) for case in CASES]
