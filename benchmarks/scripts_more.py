"""TorchRL's scripts that need more: Atari's preprocessing, lanes in processes, a recurrent policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from benchmarks import actors, by_hand
from benchmarks.board import HAND, TORCHRL, Missing, Race
from benchmarks.by_hand import Array, Loop, RunningNorm, SerialLanes
from benchmarks.processes_by_hand import Processes, semaphore, shared
from benchmarks.scripts import (
    CHEETAH,
    REAL,
    Script,
    act_categorical,
    act_greedy_q,
    act_tanh_normal,
    of_ppo,
    ppo_cheetah,
)

LANES, GAMES, WORKERS = 8, 4, 2
SKIP, STACK, SIDE, ACTIONS = 4, 4, 84, 6
GREY = np.array([0.2989, 0.587, 0.114], np.float32) / 255  # of torchvision's rgb_to_grayscale


# ---- lanes in processes, by hand ------------------------------------------------------------------------------------


class ProcessLanes:
    """Lanes in forked processes and shared memory: a semaphore says go to each process, one says done."""

    def __init__(self, makes: Sequence[Callable[[], Any]], workers: int, seed: int | None = None) -> None:
        probe = makes[0]()
        n, per = len(makes), len(makes) // workers
        seen, act = probe.observation_space, probe.action_space
        self.discrete = isinstance(act, gym.spaces.Discrete)
        probe.close()
        self.raw, self.fresh = (shared((n, *seen.shape), seen.dtype) for _ in range(2))
        self._action = shared((n, *act.shape), np.int64 if self.discrete else np.float32)
        self._reward, self._flags = shared((n,), np.float32), shared((2, n), np.bool_)
        self._go, self._done = [semaphore() for _ in range(workers)], semaphore()

        def work(w: int) -> None:
            torch.set_num_threads(1)
            mine = slice(w * per, (w + 1) * per)
            lanes = SerialLanes([make() for make in makes[mine]], seed)
            self.raw[mine] = lanes.raw
            self._done.release()
            while self._go[w].acquire():
                self._flags[:, mine] = False
                lanes.step(self._action[mine], self._reward[mine], self._flags[0, mine], self._flags[1, mine])
                self.raw[mine], self.fresh[mine] = lanes.raw, lanes.fresh
                self._done.release()

        self.close = Processes(workers, work).close
        for _ in self._go:
            self._done.acquire()

    def step(self, actions: Array, reward: Array, terminated: Array, truncated: Array) -> list[int]:
        self._action[...] = actions
        for go in self._go:
            go.release()
        for _ in self._go:
            self._done.acquire()
        reward[...] = self._reward
        terminated[...], truncated[...] = self._flags
        return np.flatnonzero(terminated | truncated).tolist()


# ---- Atari ----------------------------------------------------------------------------------------------------------


def prepare_atari() -> None:
    """Import what Pong needs, in this process."""
    try:
        import ale_py
    except ImportError as missing:
        raise Missing(str(missing)) from missing
    gym.register_envs(ale_py)
    try:
        import torchvision
    except ImportError as missing:
        raise Missing(f"TorchRL's Resize needs torchvision ({missing})") from missing
    except (
        RuntimeError
    ):  # built for another kind of torch: resizing needs none of its compiled operators, only its import
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        with contextlib.suppress(ImportError):
            import torchvision  # noqa: F401


_KEPT: list[Any] = []  # operators live as long as the library that defined them


def pong_lane(noops: int) -> Any:
    """What TorchRL's examples do to each game."""
    from torchrl.envs import Compose, EndOfLifeTransform, FrameSkipTransform, GymEnv, NoopResetEnv, TransformedEnv

    prepare_atari()
    base = GymEnv("PongNoFrameskip-v4", from_pixels=True, pixels_only=False, categorical_action_encoding=True)
    return TransformedEnv(
        base, Compose(NoopResetEnv(noops, random=noops > 0), FrameSkipTransform(SKIP), EndOfLifeTransform())
    )


def pong(lanes: int = LANES, noops: int = 30, *, processes: bool = False) -> Any:
    """And what they do to all."""
    from torchrl.envs import (
        CatFrames,
        Compose,
        GrayScale,
        ParallelEnv,
        Resize,
        RewardSum,
        SerialEnv,
        StepCounter,
        ToTensorImage,
        TransformedEnv,
    )

    prepare_atari()
    return TransformedEnv(
        (ParallelEnv if processes else SerialEnv)(lanes, partial(pong_lane, noops)),
        Compose(
            ToTensorImage(in_keys=["pixels"]),
            GrayScale(in_keys=["pixels"]),
            Resize(SIDE, SIDE, in_keys=["pixels"]),
            CatFrames(STACK, dim=-3, in_keys=["pixels"]),
            StepCounter(),
            RewardSum(),
        ),
    )


class PongByHand:
    """One game: random steps first, four at a time, lives beside the frame."""

    def __init__(self, noops: int, *, small: bool = False) -> None:
        prepare_atari()
        self._env = gym.make("PongNoFrameskip-v4")
        self._noops, self._small = noops, small
        self._lives: Any = self._env.unwrapped.ale.lives  # type: ignore[attr-defined]
        self.action_space = self._env.action_space
        self.observation_space = (
            gym.spaces.Box(0, 1, (SIDE, SIDE), np.float32) if small else self._env.observation_space
        )

    def _seen(self, frame: Array) -> Array:
        return shrunk(frame[None])[0] if self._small else frame

    def reset(self, seed: int | None = None) -> Any:
        frame, info = self._env.reset(seed=seed)
        for _ in range(np.random.randint(self._noops) if self._noops else 0):
            frame, _, over, cut, info = self._env.step(self.action_space.sample())
            if over or cut:
                frame, info = self._env.reset()
        return self._seen(frame), info

    def step(self, action: int) -> Any:
        total = 0.0
        for _ in range(SKIP):
            frame, reward, over, cut, _ = self._env.step(action)
            total += float(reward)
            if over or cut:
                break
        return self._seen(frame), total, over, cut, {"lives": self._lives()}

    def close(self) -> None:
        self._env.close()


def shrunk(frames: Array) -> Array:
    """Frames `[N, 210, 160, 3]` of bytes as `[N, 84, 84]` between 0 and 1."""
    grey = torch.from_numpy(frames.astype(np.float32) @ GREY)[:, None]
    small = nn.functional.interpolate(grey, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    return small[:, 0].numpy()


class StackedLoop(Loop):
    """A loop whose policy sees the last four frames of each lane."""

    def __init__(self, lanes: Any, act: by_hand.Act, steps: int) -> None:
        one = shrunk if lanes.raw.shape[-1] == 3 else None
        super().__init__(FrameStack(lanes, one), act, steps, norm=lambda x: x, counters=True)


class FrameStack:
    """Lanes whose rows are stacks of frames: the newest is last; the first of an episode stands for all before it."""

    def __init__(self, lanes: Any, one: Callable[[Array], Array] | None) -> None:
        self._lanes, self._one = lanes, one or (lambda frames: frames)
        self.close = lanes.close
        self.raw = np.repeat(self._one(lanes.raw)[:, None], STACK, 1)
        self.fresh = np.empty_like(self.raw)
        self._ended: list[int] = []

    def step(self, actions: Array, reward: Array, terminated: Array, truncated: Array) -> list[int]:
        for i in self._ended:
            self.raw[i] = self.fresh[i]
        self._ended = self._lanes.step(actions, reward, terminated, truncated)
        self.raw[:, :-1] = self.raw[:, 1:]
        self.raw[:, -1] = self._one(self._lanes.raw)
        for i in self._ended:
            self.fresh[i] = self._one(self._lanes.fresh[i : i + 1])
        return self._ended


def nature(outputs: int) -> nn.Module:
    from torchrl.modules import MLP, ConvNet

    cells: dict[str, Any] = {"num_cells": [32, 64, 64], "kernel_sizes": [8, 4, 3], "strides": [4, 2, 1]}
    head = MLP(in_features=3136, out_features=outputs, num_cells=[512], activation_class=nn.ReLU)
    return nn.Sequential(ConvNet(in_features=STACK, activation_class=nn.ReLU, **cells), head)


def pong_loop(act: Any, model: nn.Module, steps: int, seed: int | None, *, processes: bool, noops: int = 30) -> Loop:
    noops = noops if seed is None else 0
    if not processes:
        return StackedLoop(SerialLanes([PongByHand(noops) for _ in range(LANES)], seed), act(model), steps)
    makes = [partial(PongByHand, noops, small=True)] * GAMES
    return StackedLoop(ProcessLanes(makes, WORKERS, seed), act(model), steps)


# ---- recurrent ------------------------------------------------------------------------------------------------------

HIDDEN = 64


def recurrent_policy() -> nn.Module:
    """As TorchRL's tutorial on recurrent DQN has it, on CartPole's four numbers."""
    from torchrl.data import Composite, OneHot
    from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule

    features = TensorDictModule(actors.network(4, HIDDEN), ["observation"], ["embed"])
    lstm = LSTMModule(input_size=HIDDEN, hidden_size=HIDDEN, in_key="embed", out_key="embed")
    head = MLP(in_features=HIDDEN, out_features=2, num_cells=[64])
    values = QValueModule(spec=Composite(action=OneHot(2)), action_space=None)
    explore = EGreedyModule(spec=Composite(action=OneHot(2)), eps_init=0.2, eps_end=0.1)
    return TensorDictSequential(features, lstm, TensorDictModule(head, ["embed"], ["action_value"]), values, explore)


def recurrent_env() -> Any:
    from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv

    env = TransformedEnv(
        SerialEnv(LANES, lambda: GymEnv("CartPole-v1")), Compose(InitTracker(), StepCounter(), RewardSum())
    )
    policy: Any = recurrent_policy()
    env.append_transform(policy[1].make_tensordict_primer())
    return env


class Remembering:
    """The recurrent policy: the state that acted and the one that came out are kept with each frame."""

    def __init__(self, policy: Any) -> None:
        self._net, self._lstm, self._head = policy[0].module, policy[1].lstm, policy[2].module
        self._eps = policy[4].eps
        self._h, self._c = (torch.zeros(LANES, HIDDEN) for _ in range(2))
        self._begins = torch.ones(LANES, dtype=torch.bool)

    def forget(self, lane: int) -> None:
        self._h[lane] = self._c[lane] = 0
        self._begins[lane] = True

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        before = {"recurrent_state_h": self._h, "recurrent_state_c": self._c, "is_init": self._begins}
        out, (h, c) = self._lstm(self._net(x)[:, None], (self._h[None], self._c[None]))
        self._h, self._c, self._begins = h[0].clone(), c[0].clone(), torch.zeros_like(self._begins)
        row = by_hand.greedy_q(self._head, self._eps)(out[:, 0])
        return {**row, **before, "embed": out[:, 0], "next_h": h[0], "next_c": c[0]}


def recurrent_loop(model: nn.Module, steps: int, seed: int | None) -> Loop:
    act = Remembering(model)
    lanes = SerialLanes([gym.make("CartPole-v1") for _ in range(LANES)], seed)
    return Loop(lanes, act, steps, counters=True, forget=act.forget)


# ---- the table ------------------------------------------------------------------------------------------------------


def parallel_cheetah() -> Any:
    from torchrl.envs import GymEnv, ParallelEnv, SerialEnv

    return of_ppo(ParallelEnv(2, lambda: SerialEnv(LANES, lambda: GymEnv("HalfCheetah-v5"))), doubles=True)


def parallel_cheetah_loop(model: nn.Module, steps: int, seed: int | None) -> Loop:
    lanes = ProcessLanes([CHEETAH] * (WORKERS * LANES), WORKERS, seed)
    return Loop(lanes, act_tanh_normal(1.0)(model), steps, norm=RunningNorm(17), counters=True)


def pong_script(*, processes: bool, noops: int = 30) -> Script:
    """DQN's in one process, PPO's with the games in processes."""
    policy: Callable[[], nn.Module]
    if processes:
        act, policy = act_categorical, lambda: actors.categorical(nature(ACTIONS), key="pixels")
    else:
        act, policy = act_greedy_q, lambda: actors.greedy_q(nature(ACTIONS), ACTIONS, key="pixels", one_hot=False)
    loop = partial(pong_loop, act, processes=processes, noops=noops)
    lanes = GAMES if processes else LANES
    return Script(partial(pong, lanes, noops, processes=processes), policy, loop, lanes, 16 * lanes)


SCRIPTS: dict[str, tuple[Script, dict[str, float]]] = {
    "DQN's preprocessing, Pong, 8 lanes": (pong_script(processes=False), {HAND: 0.85, TORCHRL: 3.0}),
    "PPO, Pong, ParallelEnv of 4": (pong_script(processes=True), {}),
    "PPO, HalfCheetah-v5, ParallelEnv of 2 × 8": (
        Script(parallel_cheetah, ppo_cheetah, parallel_cheetah_loop, WORKERS * LANES, 1600),
        {HAND: 0.85, TORCHRL: 4.0},
    ),
    "recurrent DQN, CartPole-v1, 8 lanes": (Script(recurrent_env, recurrent_policy, recurrent_loop, LANES, 800), {}),
}


def workloads() -> list[Race]:
    return [
        Race(REAL, name, aims, "Pong, ParallelEnv" not in name, script.contenders, workers="Parallel" in name)
        for name, (script, aims) in SCRIPTS.items()
    ]
