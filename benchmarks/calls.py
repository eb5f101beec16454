"""Python calls per frame: exact, whatever the machine is doing, so they may only fall.

    python -m benchmarks.calls             counts, and prints them beside the table
    python -m benchmarks.calls --write     writes the table, benchmarks/calls.json

One rollout is counted, the fifth, after everything that is recorded once has been recorded. Calls of Python functions
and of built-in ones both count. The numbers hold for one version of Python and of the libraries, which the table names.
Collectors with workers are not among them: how often they wait is up to the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from benchmarks import machine, scripts, scripts_more
from benchmarks.envs_and_policies import RecurrentPolicy, mlp
from reap.collectors import Collector
from reap.envs import GymEnv, SerialEnv

TABLE = Path(__file__).with_name("calls.json")
STEPS = 40
KEYED = ("torch", "tensordict", "torchrl", "gymnasium", "numpy")


def count(run: Callable[[], Any]) -> int:
    """Return the calls that `run` makes in this thread."""
    made = 0

    def event(frame: Any, kind: str, what: Any) -> None:
        nonlocal made
        if kind == "call" or kind == "c_call":
            made += 1

    gc.collect()
    gc.disable()
    sys.setprofile(event)
    try:
        kept = run()
    finally:
        sys.setprofile(None)
        gc.enable()
    del kept
    return made - 1  # setprofile's own


def greedy(observation: Tensor) -> Tensor:
    return (observation[..., 2] > 0).long()


def lane() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def cartpole(lanes: int) -> Any:
    return lane() if lanes == 1 else SerialEnv(lanes, lane)


def own(lanes: int, policy: Callable[[], Any]) -> tuple[Collector, int]:
    torch.manual_seed(0)
    collector = Collector(cartpole(lanes), policy(), frames_per_batch=lanes * STEPS)
    collector.set_seed(0)
    return collector, lanes * STEPS


def of_script(script: scripts.Script) -> tuple[Collector, int]:
    env = script.env()
    env.set_seed(0)
    return Collector(env, script.model(), frames_per_batch=script.lanes * STEPS), script.lanes * STEPS


def workloads() -> dict[str, Callable[[], tuple[Any, int]]]:
    found: dict[str, Callable[[], tuple[Any, int]]] = {
        f"function, CartPole-v1, {n} lane{'s' * (n > 1)}": partial(own, n, lambda: greedy) for n in (1, 8, 32)
    }
    module = partial(TensorDictModule, in_keys=["observation"], out_keys=["action"])
    found["TensorDictModule, CartPole-v1, 8 lanes"] = partial(
        own, 8, lambda: module(nn.Sequential(mlp(4, 2), Largest()))
    )
    found["recurrent, CartPole-v1, 8 lanes"] = partial(own, 8, lambda: RecurrentPolicy(4, 2))
    for words in (
        ("PPO, HalfCheetah", "1 lane"),
        ("PPO, HalfCheetah", "8 lanes"),
        ("SAC's actor", "1 lane"),
        (", Categorical, CartPole", "8 lanes"),
        ("OneHotCategorical, CartPole", "8 lanes"),
        ("TanhNormal, Pendulum", "8 lanes"),
        ("QValueActor", "8 lanes"),
        ("samples in forward", "1 lane"),
        ("samples in forward", "8 lanes"),
    ):
        ((name, script),) = (
            (name, each[0])
            for (_, name), each in scripts.SCRIPTS.items()
            if words[0] in name and name.endswith(f", {words[1]}") and "pixels" not in name
        )
        found[name] = partial(of_script, script)
    name = "recurrent DQN, CartPole-v1, 8 lanes"
    found[name] = partial(of_script, scripts_more.SCRIPTS[name][0])
    return found


class Largest(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)


def measure(make: Callable[[], tuple[Any, int]]) -> dict[str, int]:
    torch.manual_seed(0)
    np.random.seed(0)
    collector, frames = make()
    torch.manual_seed(0)
    try:
        batches = iter(collector)
        for _ in range(4):
            next(batches)
        return {"calls": count(batches.__next__), "frames": frames}
    finally:
        collector.shutdown()


def versions() -> dict[str, str]:
    """What the numbers hold for."""
    known = machine.versions()
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **{name: known[name].split("+")[0] for name in KEYED if name in known}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {name: measure(make) for name, make in workloads().items()}
    if given.write:
        TABLE.write_text(json.dumps({"versions": versions(), "counts": found}, indent=1, ensure_ascii=False) + "\n")
    elif given.json:
        print(json.dumps(found))
        return
    table = json.loads(TABLE.read_text())["counts"] if TABLE.exists() else {}
    for name, each in found.items():
        before = f"{table[name]['calls'] / table[name]['frames']:10.2f}" if name in table else f"{'–':>10}"
        print(f"{name:60} {each['calls'] / each['frames']:10.2f} {before}")


if __name__ == "__main__":
    main()
