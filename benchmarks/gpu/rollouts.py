"""On a GPU: reap beside loops an expert would write by hand, in one run.

    native   CartPole in torch on the GPU, policy there too: a whole rollout in one CUDA graph, both
    host     32 CartPole lanes on the CPU, policy on the GPU: copy in, one CUDA graph, copy out, both

Hand-written native: one graph of `T` steps into preallocated columns (observation, next observation, action, reward,
done), no ids, no statistics, delivered as it is. reap: what every collector delivers, and a batch of the user's own.

python -m benchmarks.gpu.rollouts [--rounds 15]        measures, and writes rollouts.json beside this file
python -m benchmarks.gpu.rollouts --draw               draws rollouts.png from it; needs no GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from reap.collectors import Collector
from reap.envs import SerialEnv, TorchEnv
from reap.envs.torch_envs import TorchCartPole

HERE = Path(__file__).parent
STEPS = 32


class Policy(nn.Module):
    """Two hidden layers; samples by the Gumbel trick, which asks the device nothing."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )

    def forward(self, observation: Tensor) -> Tensor:
        logits = self.net(observation)
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


def native_by_hand(lanes: int, policy: nn.Module, steps: int) -> Callable[[], Any]:
    env = TorchCartPole(lanes, device="cuda", dtype=torch.float32, compile=True)
    everyone = torch.ones(lanes, dtype=torch.bool, device="cuda")
    current = env.reset(everyone).clone()
    seen, following = (torch.zeros(steps, lanes, 4, device="cuda") for _ in range(2))
    action = torch.zeros(steps, lanes, dtype=torch.int64, device="cuda")
    reward = torch.zeros(steps, lanes, device="cuda")
    done = torch.zeros(steps, lanes, dtype=torch.bool, device="cuda")

    def rollout() -> None:
        for t in range(steps):
            seen[t] = current
            action[t] = chosen = policy(current)
            following[t], reward[t], over, cut = env.step(chosen)
            torch.logical_or(over, cut, out=done[t])
            fresh = env.reset(done[t])
            torch.where(done[t, :, None], fresh, following[t], out=current)

    with torch.no_grad():
        rollout()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(env.generator)
        with torch.cuda.graph(graph):
            rollout()
    return graph.replay


def native_by_reap(lanes: int, policy: nn.Module, steps: int) -> Callable[[], Any]:
    env = TorchEnv(TorchCartPole(lanes, device="cuda", dtype=torch.float32, compile=True))
    return Collector(env, policy, frames_per_batch=lanes * steps, cudagraph_policy=True).next


def host_by_hand(lanes: int, policy: nn.Module, steps: int) -> Callable[[], Any]:
    envs = [gym.make("CartPole-v1") for _ in range(lanes)]
    current = np.stack([env.reset()[0] for env in envs])
    seen, following = (np.zeros((steps, lanes, 4), np.float32) for _ in range(2))
    action, reward = np.zeros((steps, lanes), np.int64), np.zeros((steps, lanes), np.float32)
    flags = np.zeros((3, steps, lanes), np.bool_)
    ids, traj, following_id = np.zeros((steps, lanes), np.int64), np.arange(lanes), lanes
    given, taken = torch.zeros(lanes, 4, pin_memory=True), torch.zeros(lanes, dtype=torch.int64, pin_memory=True)
    static = torch.zeros(lanes, 4, device="cuda")
    with torch.no_grad():
        policy(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = policy(static)

    def rollout() -> Any:
        nonlocal following_id
        flags[...] = False
        for t in range(steps):
            seen[t] = current
            given.numpy()[...] = current
            static.copy_(given, non_blocking=True)
            graph.replay()
            taken.copy_(out, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            action[t] = taken.numpy()
            ids[t] = traj
            for lane, (env, chosen) in enumerate(zip(envs, taken.tolist())):
                one, reward[t, lane], over, cut, _ = env.step(chosen)
                following[t, lane] = current[lane] = one
                if over or cut:
                    flags[:, t, lane] = True, over, cut
                    current[lane] = env.reset()[0]
                    traj[lane], following_id = following_id, following_id + 1
        return seen, following, action, reward, flags, ids

    return rollout


def host_by_reap(lanes: int, policy: nn.Module, steps: int) -> Callable[[], Any]:
    env = SerialEnv(lanes, [lambda: gym.make("CartPole-v1")] * lanes)
    return Collector(env, policy, frames_per_batch=lanes * steps, policy_device="cuda", cudagraph_policy=True).next


CASES: list[tuple[str, int, int, Any, Any]] = [
    ("host, 32 lanes", 32, 64, host_by_hand, host_by_reap),
    ("native, 4,096 lanes", 4096, STEPS, native_by_hand, native_by_reap),
    ("native, 65,536 lanes", 65536, STEPS, native_by_hand, native_by_reap),
    ("native, 1,048,576 lanes", 1048576, STEPS, native_by_hand, native_by_reap),
]


def timed(run: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def host_copies(run: Callable[[], Any]) -> int:
    """Copies between host and device while one batch is made."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if "HtoD" in e.key or "DtoH" in e.key)


def measure(name: str, lanes: int, steps: int, hand: Any, reap: Any, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    policy = Policy().cuda().requires_grad_(False)
    runs = {"hand": hand(lanes, policy, steps), "reap": reap(lanes, policy, steps)}
    times = max(1, int(2e7 / (lanes * steps))) if name.startswith("native") else 5
    for run in runs.values():
        timed(run, 4)
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds):
        for who, run in runs.items():
            seconds[who].append(timed(run, min(times, 50)))
    fps = {who: lanes * steps / statistics.median(s) for who, s in seconds.items()}
    ratio = statistics.median(h / r for h, r in zip(seconds["hand"], seconds["reap"]))
    copies = host_copies(runs["reap"]) if name.startswith("native") else None
    return {
        "case": name,
        "lanes": lanes,
        "steps": steps,
        "ratio": ratio,
        "frames_per_second": fps,
        "host_copies": copies,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=HERE / "rollouts.json")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    if args.draw:
        from benchmarks.chart import draw_gpu

        draw_gpu(json.loads(args.out.read_text()), args.out.with_suffix(".png"))
        return
    results = []
    for case in CASES:
        if args.only in case[0]:
            results.append(measure(*case, args.rounds))
            fps = results[-1]["frames_per_second"]
            print(
                f"{case[0]:26} hand {fps['hand']:16,.0f}   reap {fps['reap']:16,.0f} frames/s   "
                f"ratio {results[-1]['ratio']:.2f}   host copies a batch: {results[-1]['host_copies']}",
                flush=True,
            )
            torch.cuda.empty_cache()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    args.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
