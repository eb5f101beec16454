"""On a GPU: reap beside loops an expert would write by hand.

    native   CartPole in torch on the GPU, policy there too: a whole rollout in one CUDA graph, both
    host     32 CartPole lanes on the CPU, policy on the GPU: copy in, one CUDA graph, copy out, both

Hand-written native: one graph of `T` steps into preallocated columns (observation, next observation, action, reward,
done), no ids, no statistics, delivered as it is. reap: what every collector delivers, and a batch of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.board import HAND, REAP, Budget, Contender, Missing, Probe, Race, Ratio, Row, Workload
from reap.collectors import Collector
from reap.envs import SerialEnv, TorchEnv
from reap.envs.adapters.torch_envs import TorchCartPole

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


GROUP = "on a GPU"


def needs_gpu() -> None:
    if not torch.cuda.is_available():
        raise Missing("no GPU")


def build(lanes: int, steps: int, hand: Any, reap: Any, scale: float) -> dict[str, Contender]:
    needs_gpu()
    torch.manual_seed(0)
    policy = Policy().cuda().requires_grad_(False)
    turn = max(1, min(50, int(2e7 / (lanes * steps)))) if hand is native_by_hand else 5

    def whole(run: Callable[[], Any]) -> Callable[[], Any]:
        """Turns of many batches, each of which has ended when the clock is read."""

        def batches() -> None:
            for _ in range(turn):
                run()
            torch.cuda.synchronize()

        return batches

    systems = {HAND: hand(lanes, policy, steps), REAP: reap(lanes, policy, steps)}
    return {name: Contender(whole(run), turn * lanes * steps, torch.cuda.empty_cache) for name, run in systems.items()}


def host_copies(run: Callable[[], Any]) -> int:
    """Copies between host and device while one batch is made."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if "HtoD" in e.key or "DtoH" in e.key)


def copies(budget: Budget, workload: Workload) -> list[Row]:
    needs_gpu()
    run = native_by_reap(4096, Policy().cuda().requires_grad_(False), STEPS)
    for _ in range(3):
        run()
    count = float(host_copies(run))
    return [
        Row(GROUP, workload.name, "copies", {REAP: count}, {"none": Ratio(count, count, count, 0.0, at_most=True)}, 1)
    ]


def workloads() -> list[Workload]:
    """Aims: what was promised."""
    native = (native_by_hand, native_by_reap)
    return [
        Race(
            GROUP,
            "CartPole-v1, 32 lanes on the CPU, policy on the GPU",
            {HAND: 0.95},
            False,
            partial(build, 32, 64, host_by_hand, host_by_reap),
        ),
        *(
            Race(
                GROUP, f"CartPole in torch, {lanes:,} lanes", {HAND: 0.95}, False, partial(build, lanes, STEPS, *native)
            )
            for lanes in (4096, 65_536, 1_048_576)
        ),
        Probe(GROUP, "copies between host and device per batch", {"none": 0.0}, False, copies),
    ]
