"""`make bench`, fourth part: many envs, one policy that answers whoever is ready.

    slow env: every step sleeps, exponentially, 2 ms on average; 32 envs could make 16,000 frames/s
        reap / ideal, hand-written / ideal, and reap / TorchRL's AsyncBatchedCollector: once as it comes ("torchrl"),
        once set up for this (threads, batches of at most 32; "tuned"); "placed" is reap with `driver_affinity` and
        `worker_affinity`, the policy on the first core and the envs on the others (Linux)
        once with a policy of TensorDictModules, once with a module that samples from torch's own Categorical
    one straggler: one of the 32 is a hundred times slower; reap / the sum of all envs' own rates, and
        reap / what the other 31 make without it
    CartPole: 32 envs in 2 processes; reap / TorchRL's AsyncBatchedCollector

reap and the hand-written loop take turns inside one run; what is printed are medians. TorchRL's envs go on by
themselves when nobody asks, so it runs alone, after them, and its ratio is that of the medians. The hand-written loop
has a thread per env and two kinds of queue, decides about whoever is ready, samples by `torch.multinomial` (or calls
the module as it is), and stores the columns reap stores in preallocated arrays.

python -m benchmarks.batched [--rounds 7] [--no-torchrl] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from benchmarks.peers import Contender
from benchmarks.single import RESULTS
from benchmarks.workloads import DiscretePolicy, mlp
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
    backend: str
    per_worker: int = 1
    threads: bool = False
    module: bool = False  # the policy is a module that samples by itself
    ideal: float | None = None


CASES = [
    Case("slow env, 32 envs", Slow, 3200, "multiprocessing", ENVS, True, ideal=ENVS / MEAN),
    Case("slow env, 32 envs, Categorical", Slow, 3200, "multiprocessing", ENVS, True, module=True, ideal=ENVS / MEAN),
    Case(
        "slow env, one of 32 is 100× slower",
        lambda number: Slow(number, MEAN if number else 100 * MEAN),
        3200,
        "multiprocessing",
        ENVS,
        True,
        ideal=(ENVS - 1 + 0.01) / MEAN,
    ),
    Case("CartPole, 32 envs in 2 processes", lambda number: gym.make("CartPole-v1"), 6400, "multiprocessing", 16),
]


def policy(case: Case) -> nn.Module:
    torch.manual_seed(0)
    if case.module:
        return DiscretePolicy(mlp(4, 2))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
    )


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
        with torch.no_grad():
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
    return Contender(loop, loop.close, case.frames)


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
    return Contender(iter(collector).__next__, collector.shutdown, case.frames)


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
    return Contender(iter(collector).__next__, collector.shutdown, case.frames // 8)


def tuned(case: Case) -> Contender:
    """TorchRL's, told what this is: envs that wait, and at most so many of them in a batch."""
    return torchrl(case, max_batch_size=ENVS, env_backend="threading")


def turns(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Frames per second, everybody once a round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.run()
    for _ in range(rounds):
        for name, contender in contenders.items():
            began = time.perf_counter()
            contender.run()
            rates[name].append(contender.frames / (time.perf_counter() - began))
    return rates


def measure(case: Case, makers: dict[str, Callable[[Case], Contender]], rounds: int) -> dict[str, list[float]]:
    """Frames per second of those of `makers`, made for this and closed after it."""
    contenders: dict[str, Contender] = {}
    try:
        for name, make in makers.items():
            contenders[name] = make(case)
        return turns(contenders, rounds)
    finally:
        for contender in contenders.values():
            contender.close()


def summary(case: Case, rates: dict[str, list[float]]) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case.name, "fps": {name: statistics.median(r) for name, r in rates.items()}}
    for name in rates:
        if name in ("placed", "hand"):  # they took turns
            result[f"reap_to_{name}"] = statistics.median(a / b for a, b in zip(rates["reap"], rates[name]))
        elif name != "reap":
            result[f"reap_to_{name}"] = result["fps"]["reap"] / result["fps"][name]
    if case.ideal is not None:
        result["to_ideal"] = {name: rate / case.ideal for name, rate in result["fps"].items()}
    return result


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="benchmarks.batched", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-torchrl", action="store_true")
    parser.add_argument("--quick", action="store_true", help="shortest run: does it work?")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    results = []
    for case in CASES:
        if options.only not in case.name:
            continue
        rounds = 2 if options.quick else options.rounds
        ours: dict[str, Callable[[Case], Contender]] = {"reap": reap}
        if case.threads:
            ours |= {"placed": placed} if hasattr(os, "sched_setaffinity") else {}
            ours |= {"hand": by_hand}
        rates = measure(case, ours, rounds)
        if not options.no_torchrl and "slower" not in case.name:
            for name, make in (("torchrl", torchrl), ("tuned", tuned)):
                rates |= measure(case, {name: make}, rounds)
        result = summary(case, rates)
        results.append(result)
        if "slower" in case.name and len(results) > 1:  # what the others make without it
            result["reap_to_the_others"] = result["fps"]["reap"] / (results[0]["fps"]["reap"] * (ENVS - 1) / ENVS)
        shares = "".join(f", {name} {share:.2f} of the ideal" for name, share in result.get("to_ideal", {}).items())
        ratios = "".join(f", {n.replace('_', ' ')} {r:.2f}" for n, r in result.items() if n.startswith("reap_to"))
        speeds = ", ".join(f"{name} {rate:,.0f}" for name, rate in result["fps"].items())
        print(f"{case.name}: {speeds} frames/s{shares}{ratios}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "batched.json").write_text(json.dumps({"quick": options.quick, "results": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
