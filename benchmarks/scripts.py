"""TorchRL's scripts: its envs, transforms and actors as its users write them, beside TorchRL and a loop by hand.

A `Script` is collected by TorchRL's collector, by reap's from the same lines, and by a loop for just this case. That
the loop makes the same data from the same seeds is a test (`tests/examples/test_benchmarks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import actors, by_hand
from benchmarks.board import HAND, REAP, TORCHRL, Contender, Race
from benchmarks.by_hand import Loop, RunningNorm
from benchmarks.envs_and_policies import DiscretePolicy, Flat, GaussianPolicy, LocScale, PixelPolicy, Pixels, mlp


@dataclass(frozen=True)
class Script:
    """An env and a policy as collectors take them; a loop of so many steps, from a seed, with the policy's networks."""

    env: Callable[[], Any]
    policy: Callable[[], nn.Module]
    by_hand: Callable[[nn.Module, int, int | None], Loop]
    lanes: int
    frames: int
    ours: Callable[[], Any] | None = None  # reap's own env, where that is the subject
    in_key: str = ""  # of a bare module: TorchRL wants to be told; reap reads its parameter's name
    out_keys: tuple[str, ...] = ("action",)

    def model(self) -> nn.Module:
        """The policy, with the same weights every time."""
        torch.manual_seed(0)
        return self.policy()

    def wrapped(self, model: nn.Module) -> nn.Module:
        return TensorDictModule(model, [self.in_key], list(self.out_keys)) if self.in_key else model

    def collectors(self, model: nn.Module, frames: int) -> dict[str, Any]:
        import torchrl.collectors

        import reap.collectors

        options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1}
        return {
            TORCHRL: torchrl.collectors.Collector(self.env(), self.wrapped(model), **options),
            REAP: reap.collectors.Collector((self.ours or self.env)(), model, **options),
        }

    def contenders(self, scale: float = 1.0) -> dict[str, Contender]:
        steps = max(4, int(self.frames // self.lanes * scale))
        frames, model = steps * self.lanes, self.model()
        made = {
            name: Contender(iter(collector).__next__, frames, collector.shutdown)
            for name, collector in self.collectors(model, frames).items()
        }
        loop = self.by_hand(model, steps, None)
        return made | {HAND: Contender(loop, frames, loop.close)}


# ---- envs -----------------------------------------------------------------------------------------------------------


def lanes_of(make: Callable[[], Any], lanes: int) -> Any:
    from torchrl.envs import SerialEnv

    return make() if lanes == 1 else SerialEnv(lanes, make)


def bare(name: str, lanes: int, **options: Any) -> Any:
    """TorchRL's GymEnv; HalfCheetah's doubles as floats, or no float policy could act."""
    from torchrl.envs import DoubleToFloat, GymEnv, TransformedEnv

    base = lanes_of(lambda: GymEnv(name, **options), lanes)
    return TransformedEnv(base, DoubleToFloat(in_keys=["observation"])) if "Cheetah" in name else base


def of_ppo(base: Any, *, doubles: bool) -> Any:
    """Transformed as TorchRL's PPO example has it."""
    from torchrl.envs import ClipTransform, Compose, DoubleToFloat, RewardSum, StepCounter, TransformedEnv, VecNorm

    return TransformedEnv(
        base,
        Compose(
            VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2),
            ClipTransform(in_keys=["observation"], low=-10, high=10),
            RewardSum(),
            StepCounter(),
            *([DoubleToFloat(in_keys=["observation"])] if doubles else []),
        ),
    )


def ppo_env(name: str, lanes: int) -> Any:
    from torchrl.envs import GymEnv

    return of_ppo(lanes_of(lambda: GymEnv(name), lanes), doubles="Cheetah" in name)


def sac_env(lanes: int) -> Any:
    """As TorchRL's SAC example has it."""
    from torchrl.envs import Compose, DoubleToFloat, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv

    base = lanes_of(lambda: GymEnv("HalfCheetah-v5"), lanes)
    return TransformedEnv(base, Compose(InitTracker(), StepCounter(1000), DoubleToFloat(), RewardSum()))


# ---- the policies' networks, as the loops by hand want them ---------------------------------------------------------


def act_tanh_normal(high: float) -> Callable[[Any], by_hand.Act]:
    def made(policy: Any) -> by_hand.Act:
        net, scaling = policy[0].module
        return by_hand.tanh_normal(net, lambda: scaling.state_independent_scale.exp().clamp_min(1e-8), high)

    return made


def act_categorical(policy: Any) -> by_hand.Act:
    return by_hand.categorical(policy[0].module)


def act_sac(policy: Any) -> by_hand.Act:
    return by_hand.sac(*policy[0].module)


def act_noisy(policy: Any) -> by_hand.Act:
    return by_hand.noisy(policy[0].module, policy[2].sigma)


def act_greedy_q(policy: Any) -> by_hand.Act:
    return by_hand.greedy_q(policy[0][0].module, policy[1].eps)


def act_normal(policy: Any) -> by_hand.Act:
    return by_hand.normal(policy[0].module)


# ---- the table ------------------------------------------------------------------------------------------------------

Aims = Mapping[int, tuple[float | None, float | None]]  # by lanes: beside the loop by hand, beside TorchRL
SCRIPTS: dict[tuple[str, str], tuple[Script, dict[str, float], bool]] = {}  # by group and name, with aims


def add(
    group: str,
    name: str,
    *,
    env: Callable[[int], Any],
    policy: Callable[[], nn.Module],
    act: Callable[[Any], by_hand.Act],
    game: Callable[[], Any],
    frames: int,
    aims: Aims,
    norm: Callable[[int], Callable[[Any], Any]] | None = None,
    counters: bool = False,
    ours: Callable[[int], Any] | None = None,
    **more: Any,
) -> None:
    """One line for each number of lanes in `aims`; those with an aim are on the board."""
    for n, (beside_hand, beside_theirs) in aims.items():

        def loop(model: nn.Module, steps: int, seed: int | None, n: int = n) -> Loop:
            lanes = by_hand.SerialLanes([game() for _ in range(n)], seed)
            normal = None if norm is None else norm(lanes.raw.shape[1])
            return by_hand.Loop(lanes, act(model), steps, norm=normal, counters=counters, single=n == 1)

        own = None if ours is None else partial(ours, n)
        most = min(frames, 800) if n == 1 else frames  # TorchRL needs a second for 800 frames of one lane
        script = Script(partial(env, n), policy, loop, n, most, own, **more)
        wanted = {HAND: beside_hand, TORCHRL: beside_theirs}
        told = {who: aim for who, aim in wanted.items() if aim is not None}
        SCRIPTS[group, f"{name}, {n} lane{'s' * (n > 1)}"] = script, told, bool(told)


def floats(width: int) -> Callable[[Any], Any]:
    """HalfCheetah's doubles as floats: the columns are float32 already."""
    return lambda rows: rows


def pixels(lanes: int) -> Any:
    from torchrl.envs import GymWrapper

    return lanes_of(lambda: GymWrapper(Pixels(), categorical_action_encoding=True), lanes)


def cartpole(lanes: int) -> Any:
    return bare("CartPole-v1", lanes, categorical_action_encoding=True)


def own_lanes(make: Callable[[], Any]) -> Callable[[int], Any]:
    """The same in reap's own envs."""
    from reap.envs import GymEnv, SerialEnv

    def lane() -> GymEnv:
        return GymEnv(make(), categorical_action_encoding=True)

    return lambda lanes: lane() if lanes == 1 else SerialEnv(lanes, lane)


def gym_env(name: str) -> Callable[[], Any]:
    return lambda: gym.make(name)


REAL, ACTORS, MODULES = "TorchRL's scripts", "TorchRL's actors on bare envs", "modules and functions"
CHEETAH, PENDULUM, CARTPOLE = map(gym_env, ("HalfCheetah-v5", "Pendulum-v1", "CartPole-v1"))
BOUNDED: Aims = {1: (0.85, 4.0)}
EITHER: Aims = {1: (0.85, 6.0), 8: (0.90, 12.0)}
NO_AIM = (None, None)


def ppo_cheetah() -> nn.Module:
    return actors.tanh_normal(17, 6, 1.0)


def ppo_pendulum() -> nn.Module:
    return actors.tanh_normal(3, 1, 2.0)


def sac_cheetah() -> nn.Module:
    return actors.sac(17, 6)


def one_hot() -> nn.Module:
    return actors.categorical(actors.network(4, 2), one_hot=True)


def pixel_net() -> nn.Module:
    return nn.Sequential(Flat(), mlp(64 * 64 * 3, 4))


def real_scripts() -> None:
    """Transforms and actors as TorchRL's examples have them."""
    add(
        REAL,
        "PPO, HalfCheetah-v5",
        env=partial(ppo_env, "HalfCheetah-v5"),
        policy=ppo_cheetah,
        act=act_tanh_normal(1.0),
        game=CHEETAH,
        frames=800,
        aims={1: (0.80, 5.0), 8: (0.90, 4.5)},
        norm=RunningNorm,
        counters=True,
    )
    add(
        REAL,
        "PPO, Pendulum-v1",
        env=partial(ppo_env, "Pendulum-v1"),
        policy=ppo_pendulum,
        act=act_tanh_normal(2.0),
        game=PENDULUM,
        frames=1600,
        aims={1: (0.75, 10.0), 8: (0.85, 12.0)},
        norm=RunningNorm,
        counters=True,
    )
    add(
        REAL,
        "PPO, CartPole-v1",
        env=partial(ppo_env, "CartPole-v1"),
        policy=one_hot,
        act=act_categorical,
        game=CARTPOLE,
        frames=1600,
        aims={1: (0.75, 10.0), 8: (0.85, 12.0)},
        norm=RunningNorm,
        counters=True,
    )
    add(
        REAL,
        "SAC, HalfCheetah-v5",
        env=sac_env,
        policy=sac_cheetah,
        act=act_sac,
        game=CHEETAH,
        frames=800,
        aims={1: (0.85, 4.0)},
        norm=floats,
        counters=True,
    )


def actors_on_bare_envs() -> None:
    cheetah: dict[str, Any] = {"env": partial(bare, "HalfCheetah-v5"), "game": CHEETAH, "norm": floats}
    cart: dict[str, Any] = {"env": partial(bare, "CartPole-v1"), "game": CARTPOLE, "frames": 1600}
    add(ACTORS, "SAC's actor, HalfCheetah-v5", policy=sac_cheetah, act=act_sac, frames=800, aims=BOUNDED, **cheetah)
    add(
        ACTORS,
        "TD3's actor and noise, HalfCheetah-v5",
        policy=lambda: actors.noisy(17, 6),
        act=act_noisy,
        frames=800,
        aims=BOUNDED,
        **cheetah,
    )
    add(
        ACTORS,
        "ProbabilisticActor, Categorical, CartPole-v1",
        policy=lambda: actors.categorical(actors.network(4, 2)),
        act=act_categorical,
        aims={**EITHER, 32: NO_AIM, 128: NO_AIM},
        **{**cart, "env": cartpole},
    )
    name = "ProbabilisticActor, OneHotCategorical, CartPole-v1"
    add(ACTORS, name, policy=one_hot, act=act_categorical, aims=EITHER, **cart)
    add(
        ACTORS,
        "ProbabilisticActor, TanhNormal, Pendulum-v1",
        env=partial(bare, "Pendulum-v1"),
        policy=ppo_pendulum,
        act=act_tanh_normal(2.0),
        game=PENDULUM,
        frames=1600,
        aims=EITHER,
    )
    add(
        ACTORS,
        "QValueActor and EGreedyModule, CartPole-v1",
        policy=lambda: actors.greedy_q(actors.network(4, 2), 2),
        act=act_greedy_q,
        aims=EITHER,
        **cart,
    )
    add(
        ACTORS,
        "ProbabilisticActor, IndependentNormal, HalfCheetah-v5",
        policy=lambda: actors.independent_normal(LocScale(mlp(17, 6), 6)),
        act=act_normal,
        frames=512,
        aims={8: NO_AIM},
        **cheetah,
    )
    add(
        ACTORS,
        "ProbabilisticActor, Categorical, pixels 64×64×3",
        env=pixels,
        policy=lambda: actors.categorical(pixel_net(), key="pixels"),
        act=act_categorical,
        game=Pixels,
        frames=512,
        aims={8: NO_AIM},
    )


def own_modules() -> None:
    add(
        MODULES,
        "nn.Module that samples in forward, CartPole-v1",
        env=cartpole,
        policy=actors.ActorCritic,
        act=by_hand.custom,
        game=CARTPOLE,
        frames=1600,
        aims={1: (1.3, 7.0), 8: (1.2, 12.0), 32: (1.05, 15.0), 128: NO_AIM},
        in_key="observation",
        out_keys=("action", "log_prob", "value"),
    )
    add(
        MODULES,
        "nn.Module, reap's envs, HalfCheetah-v5",
        env=partial(bare, "HalfCheetah-v5"),
        policy=lambda: GaussianPolicy(LocScale(nn.Sequential(Flat(), mlp(17, 6)), 6)),
        act=by_hand.plain,
        game=CHEETAH,
        frames=512,
        aims={8: (0.95, None)},
        ours=own_lanes(CHEETAH),
        in_key="observation",
    )
    add(
        MODULES,
        "nn.Module, reap's envs, pixels 64×64×3",
        env=pixels,
        policy=lambda: PixelPolicy(pixel_net()),
        act=by_hand.plain,
        game=Pixels,
        frames=512,
        aims={8: (0.95, None)},
        ours=own_lanes(Pixels),
        in_key="pixels",
    )
    add(
        MODULES,
        "nn.Module, reap's envs, CartPole-v1",
        env=cartpole,
        policy=lambda: DiscretePolicy(mlp(4, 2)),
        act=by_hand.plain,
        game=CARTPOLE,
        frames=1600,
        aims={1: (0.95, None), 8: (0.95, None), 32: (0.95, None), 128: NO_AIM},
        ours=own_lanes(CARTPOLE),
        in_key="observation",
    )


real_scripts()
actors_on_bare_envs()
own_modules()


def workloads() -> list[Race]:
    return [
        Race(group, name, aims, board, script.contenders) for (group, name), (script, aims, board) in SCRIPTS.items()
    ]
