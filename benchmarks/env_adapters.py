"""Env adapters: reap beside an expert's hand-written loop around the very same env.

    EnvPool, Gymnasium's native vector envs, nested observations, a recurrent policy, many agents: reap / by hand
    split_trajectories: reap / TorchRL          compact_obs: with / without, and the bytes of a batch

Every hand-written loop stores the columns reap stores (ids and flags included) in preallocated arrays and is right
about episode ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.board import HAND, REAP, TORCHRL, Budget, Contender, Missing, Probe, Race, Ratio, Row, Workload
from benchmarks.envs_and_policies import (
    Crowd,
    DiscretePolicy,
    Flat,
    GaussianPolicy,
    LocScale,
    Nested,
    NestedPolicy,
    PixelPolicy,
    Pixels,
    RecurrentPolicy,
    mlp,
)
from reap.collectors import Collector
from reap.collectors.utils import split_trajectories
from reap.envs import EnvPoolEnv, GymEnv, PettingZooEnv, SerialEnv
from reap.trajectories import FINAL

Array = np.ndarray[Any, Any]
Run = Callable[[], Any]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A policy with the same weights every time."""
    torch.manual_seed(0)
    return make()


def discrete(inputs: int, choices: int) -> nn.Module:
    return seeded(lambda: DiscretePolicy(mlp(inputs, choices)))


class Store:
    """What every hand-written loop fills: preallocated columns `[T, N, …]`, and the numbering of trajectories."""

    def __init__(self, steps: int, lanes: int, action: tuple[Any, ...] = ((), np.int64)) -> None:
        self.action = np.zeros((steps, lanes, *action[0]), action[1])
        self.reward = np.zeros((steps, lanes), np.float32)
        self.terminated, self.truncated, self.done = (np.zeros((steps, lanes), np.bool_) for _ in range(3))
        self.ids = np.zeros((steps, lanes), np.int64)
        self.traj, self.next_id = np.arange(lanes), lanes

    def renumber(self, ended: Sequence[int] | Array) -> None:
        self.traj[ended] = np.arange(self.next_id, self.next_id + len(ended))
        self.next_id += len(ended)


# ---- EnvPool --------------------------------------------------------------------------------------------------------


def cheetah() -> nn.Module:
    return seeded(lambda: GaussianPolicy(LocScale(nn.Sequential(Flat(), mlp(17, 6)), 6)))


def envpool(task: str, lanes: int, steps: int) -> dict[str, Run]:
    try:
        import envpool
    except ImportError as missing:
        raise Missing(str(missing)) from missing

    continuous = task.startswith("HalfCheetah")
    policy = cheetah() if continuous else discrete(4, 2)
    env = envpool.make(task, env_type="gymnasium", num_envs=lanes)
    dtype = env.action_space.dtype
    current, _ = env.reset()
    obs = np.zeros((steps, *current.shape), current.dtype)
    following = np.zeros_like(obs)
    store = Store(steps, lanes, ((6,), np.float32) if continuous else ((), np.int64))

    def hand() -> Any:
        nonlocal current
        with torch.inference_mode():
            for t in range(steps):
                obs[t] = current
                store.action[t] = chosen = policy(torch.from_numpy(current)).numpy()
                store.ids[t] = store.traj
                current, store.reward[t], terminated, truncated, _ = env.step(chosen.astype(dtype))
                following[t] = current
                store.terminated[t], store.truncated[t] = terminated, truncated
                store.done[t] = done = terminated | truncated
                if done.any():
                    ended = np.flatnonzero(done).astype(np.int32)
                    current[ended], _ = env.reset(ended)
                    store.renumber(ended)
        return obs, following, store

    ours = EnvPoolEnv(task, num_envs=lanes, categorical_action_encoding=True)
    collector = Collector(ours, policy, frames_per_batch=lanes * steps)
    return {HAND: hand, REAP: iter(collector).__next__}


# ---- Gymnasium's native vector envs ---------------------------------------------------------------------------------


def native(lanes: int, steps: int) -> dict[str, Run]:
    """Such an env spends a step on every reset: the loop marks it as no frame."""
    env = gym.make_vec("CartPole-v1", num_envs=lanes, vectorization_mode="vector_entry_point")
    policy = discrete(4, 2)
    current, _ = env.reset(seed=0)
    obs = np.zeros((steps, lanes, 4), np.float32)
    following = np.zeros_like(obs)
    store = Store(steps, lanes)
    mask = np.zeros((steps, lanes), np.bool_)
    over = np.zeros(lanes, np.bool_)

    def hand() -> Any:
        nonlocal current, over
        with torch.inference_mode():
            for t in range(steps):
                obs[t] = current
                store.action[t] = chosen = policy(torch.from_numpy(current)).numpy()
                store.ids[t] = store.traj
                np.logical_not(over, out=mask[t])
                current, store.reward[t], terminated, truncated, _ = env.step(chosen)
                following[t] = current
                store.terminated[t], store.truncated[t] = terminated, truncated
                store.done[t] = over = terminated | truncated
                if over.any():
                    store.renumber(np.flatnonzero(over))
        return obs, following, mask, store

    ours = gym.make_vec("CartPole-v1", num_envs=lanes, vectorization_mode="vector_entry_point")
    collector = Collector(GymEnv(ours, categorical_action_encoding=True), policy, frames_per_batch=lanes * steps)
    return {HAND: hand, REAP: iter(collector).__next__}


# ---- lanes of single envs -------------------------------------------------------------------------------------------


def nested(lanes: int, steps: int) -> dict[str, Run]:
    net = seeded(NestedPolicy)
    envs = [Nested() for _ in range(lanes)]
    spaces: Any = Nested.observation_space
    obs = {(a, b): np.zeros((steps, lanes, *spaces[a][b].shape), np.float32) for a, b in Nested.leaves}
    following = {key: np.zeros_like(column) for key, column in obs.items()}
    current = {key: np.zeros(column.shape[1:], np.float32) for key, column in obs.items()}
    for i, env in enumerate(envs):
        first, _ = env.reset(seed=i)
        for a, b in Nested.leaves:
            current[a, b][i] = first[a][b]
    store = Store(steps, lanes)

    def hand() -> Any:
        with torch.inference_mode():
            for t in range(steps):
                for key, now in current.items():
                    obs[key][t] = now
                store.action[t] = chosen = net(*map(torch.from_numpy, current.values())).numpy()
                store.ids[t] = store.traj
                for i, action in enumerate(chosen.tolist()):
                    o, r, terminated, truncated, _ = envs[i].step(action)
                    for (a, b), column in following.items():
                        column[t, i] = current[a, b][i] = o[a][b]
                    store.reward[t, i] = r
                    store.terminated[t, i], store.truncated[t, i] = terminated, truncated
                    store.done[t, i] = ended = terminated or truncated
                    if ended:
                        o, _ = envs[i].reset()
                        store.renumber([i])
                        for (a, b), now in current.items():
                            now[i] = o[a][b]
        return obs, following, store

    ours = SerialEnv(lanes, lambda: GymEnv(Nested(), categorical_action_encoding=True))
    keys: list[Any] = list(Nested.leaves)
    policy = TensorDictModule(net, in_keys=keys, out_keys=["action"])
    return {HAND: hand, REAP: iter(Collector(ours, policy, frames_per_batch=lanes * steps)).__next__}


def recurrent(lanes: int, steps: int) -> dict[str, Run]:
    """The state that acted and the one that came out are stored with every frame, and whether an episode begins."""
    policy = seeded(lambda: RecurrentPolicy(4, 2))
    envs = [gym.make("CartPole-v1") for _ in range(lanes)]
    current = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    hidden, cell = np.zeros((lanes, 64), np.float32), np.zeros((lanes, 64), np.float32)
    obs, following = (np.zeros((steps, lanes, 4), np.float32) for _ in range(2))
    hiddens, cells, hiddens_out, cells_out = (np.zeros((steps, lanes, 64), np.float32) for _ in range(4))
    begins, begins_out = (np.zeros((steps, lanes), np.bool_) for _ in range(2))
    store = Store(steps, lanes)
    fresh = np.ones(lanes, np.bool_)

    def hand() -> Any:
        with torch.inference_mode():
            for t in range(steps):
                obs[t], hiddens[t], cells[t], begins[t] = current, hidden, cell, fresh
                fresh[:] = False
                out = policy(*map(torch.from_numpy, (current, hidden, cell)))
                store.action[t] = chosen = out[0].numpy()
                hiddens_out[t] = hidden[...] = out[1].numpy()
                cells_out[t] = cell[...] = out[2].numpy()
                store.ids[t] = store.traj
                for i, action in enumerate(chosen.tolist()):
                    o, r, terminated, truncated, _ = envs[i].step(action)
                    following[t, i] = o
                    store.reward[t, i] = r
                    store.terminated[t, i], store.truncated[t, i] = terminated, truncated
                    store.done[t, i] = ended = terminated or truncated
                    if ended:
                        o, _ = envs[i].reset()
                        hidden[i] = cell[i] = 0
                        fresh[i] = True
                        store.renumber([i])
                    current[i] = o
        return obs, following, hiddens, cells, hiddens_out, cells_out, begins, begins_out, store

    ours = SerialEnv(lanes, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    return {HAND: hand, REAP: iter(Collector(ours, policy, frames_per_batch=lanes * steps)).__next__}


# ---- agents ---------------------------------------------------------------------------------------------------------


def agents(count: int, steps: int) -> dict[str, Run]:
    """One world; agents are a dimension. Who has left sees and earns nothing."""
    net = discrete(8, 4)
    env = Crowd(count)
    index = {name: i for i, name in enumerate(env.possible_agents)}
    obs, following = (np.zeros((steps, count, 8), np.float32) for _ in range(2))
    mask, mask_out = (np.zeros((steps, count), np.bool_) for _ in range(2))
    gone, gone_out = (np.zeros((steps, count), np.bool_) for _ in range(2))
    over = np.zeros(steps, np.bool_)
    store = Store(steps, count)
    ids = np.zeros(steps, np.int64)
    current, alive = np.zeros((count, 8), np.float32), np.zeros(count, np.bool_)
    number = 0

    def begin() -> None:
        seen, _ = env.reset()
        current[...] = 0
        alive[...] = False
        for name, one in seen.items():
            current[index[name]] = one
            alive[index[name]] = True

    begin()

    def hand() -> Any:
        nonlocal number
        for column in (following, store.reward, store.terminated, store.truncated):
            column[...] = 0
        with torch.inference_mode():
            for t in range(steps):
                obs[t], mask[t], ids[t] = current, alive, number
                np.logical_not(alive, out=gone[t])
                store.action[t] = chosen = net(torch.from_numpy(current)).numpy()
                each = chosen.tolist()
                seen, earned, terminated, truncated, _ = env.step({name: each[index[name]] for name in env.agents})
                current[...] = 0
                alive[...] = False
                for name, one in seen.items():
                    i = index[name]
                    following[t, i] = one
                    store.reward[t, i] = earned[name]
                    if terminated[name] or truncated[name]:
                        store.terminated[t, i], store.truncated[t, i] = terminated[name], truncated[name]
                    else:
                        current[i] = one
                        alive[i] = True
                mask_out[t] = alive
                np.logical_not(alive, out=gone_out[t])
                over[t] = not env.agents
                if over[t]:
                    number += 1
                    begin()
        return obs, following, mask, mask_out, gone, gone_out, ids, over, store

    policy = TensorDictModule(net, in_keys=[("agents", "observation")], out_keys=[("agents", "action")])
    ours = PettingZooEnv(Crowd(count), categorical_action_encoding=True)
    return {HAND: hand, REAP: iter(Collector(ours, policy, frames_per_batch=steps)).__next__}


# ---- what is done with batches --------------------------------------------------------------------------------------


def splitting(lanes: int, steps: int) -> dict[str, Run]:
    """A batch whose episodes last about 20 steps, cut into trajectories."""
    done = torch.rand(lanes, steps, 1, generator=torch.Generator().manual_seed(0)) < 1 / 20
    begins = torch.ones(lanes, steps, dtype=torch.bool)
    begins[:, 1:] = done[:, :-1, 0]
    nothing = torch.zeros_like(done)
    batch = TensorDict(
        {
            "observation": torch.randn(lanes, steps, 4),
            "action": torch.zeros(lanes, steps, dtype=torch.int64),
            **dict.fromkeys(("done", "terminated", "truncated"), nothing),
            "next": {
                "observation": torch.randn(lanes, steps, 4),
                "reward": torch.ones(lanes, steps, 1),
                "done": done,
                "terminated": done,
                "truncated": nothing,
            },
            "collector": {"traj_ids": begins.reshape(-1).cumsum(0).reshape(lanes, steps) - 1},
        },
        batch_size=[lanes, steps],
    )
    from torchrl.collectors.utils import split_trajectories as theirs

    assert bool((theirs(batch) == split_trajectories(batch)).all())
    return {REAP: lambda: split_trajectories(batch), TORCHRL: lambda: theirs(batch)}


def compact(lanes: int, steps: int) -> dict[str, Run]:
    """The same frames with and without a second copy of every observation."""

    def collector(small: bool) -> Run:
        env = SerialEnv(lanes, lambda: GymEnv(Pixels(), categorical_action_encoding=True))
        policy = seeded(lambda: PixelPolicy(nn.Sequential(Flat(), mlp(64 * 64 * 3, 4))))
        return iter(Collector(env, policy, frames_per_batch=lanes * steps, compact_obs=small)).__next__

    return {"without": collector(False), REAP: collector(True)}


def size_of(batch: Any) -> int:
    """Bytes a batch keeps alive: its columns, and the last observations a compact one keeps beside them."""
    columns = sum(value.untyped_storage().nbytes() for value in batch.exclude(FINAL).values(True, True))
    finals = batch.get_non_tensor(FINAL, None)
    return int(columns + (0 if finals is None else sum(value.nbytes for value in finals.values.values())))


# ---- the table ------------------------------------------------------------------------------------------------------

GROUP = "env adapters"


def line(
    name: str,
    lanes: int,
    steps: int,
    aims: dict[str, float],
    build: Callable[[int, int], dict[str, Run]],
    *,
    worlds: bool = False,
) -> Race:
    """A race; of many agents in a world it counts the world's frames."""

    def contenders(scale: float) -> dict[str, Contender]:
        n = max(4, int(steps * scale))
        frames = n if worlds else lanes * n
        return {who: Contender(run, frames) for who, run in build(lanes, n).items()}

    return Race(GROUP, name, aims, build=contenders)


def memory(budget: Budget, workload: Workload) -> list[Row]:
    """Bytes of a batch of pixels in units of T + 1 observations, without and with `compact_obs`."""
    lanes, steps = 8, 16
    one = int(np.prod(Pixels.observation_space.shape)) * lanes
    sizes = {who: size_of(run()) / ((steps + 1) * one) for who, run in compact(lanes, steps).items()}
    share = Ratio(sizes[REAP], sizes[REAP], sizes[REAP], 1.15, at_most=True)
    return [Row(GROUP, workload.name, "× (T + 1) observations", sizes, {"one copy of each": share}, 1)]


def workloads() -> list[Workload]:
    return [
        line("EnvPool CartPole-v1, 256 lanes", 256, 128, {HAND: 0.95}, lambda n, t: envpool("CartPole-v1", n, t)),
        line("EnvPool HalfCheetah-v4, 64 lanes", 64, 64, {HAND: 0.95}, lambda n, t: envpool("HalfCheetah-v4", n, t)),
        line("native vector CartPole, 1024 lanes", 1024, 128, {HAND: 0.95}, native),
        line("nested dict of 8 leaves, 8 lanes", 8, 128, {HAND: 0.85}, nested),
        line("LSTM policy, CartPole-v1, 32 lanes", 32, 64, {HAND: 0.90}, recurrent),
        line("PettingZoo, 32 agents as a group", 32, 200, {HAND: 0.85}, agents, worlds=True),
        line("split_trajectories [64, 1000], episodes of about 20", 64, 1000, {TORCHRL: 20.0}, splitting),
        line("compact_obs, pixels 64×64×3, 8 lanes", 8, 64, {"without": 1.0}, compact),
        Probe(GROUP, "memory of compact_obs, pixels 64×64×3, 8 lanes", {"one copy of each": 1.15}, measure=memory),
    ]
