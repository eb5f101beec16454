"""Real scripts: TorchRL's envs, transforms and actors as its users write them, beside TorchRL and a loop by hand.

    python -m benchmarks.scripts                 everything
    python -m benchmarks.scripts --only ppo      workloads whose name contains this

Each workload is collected by TorchRL's collector, by reap's from the same script, and by a loop that an expert would
write for just this env, this policy and these columns, in `torch.inference_mode`. The three take turns, so that a busy
machine is busy for all. Printed are medians of frames per second and medians of the ratios within each turn.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import AddStateIndependentNormalScale, InteractionType, NormalParamExtractor, TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential
from torch import Tensor, nn

warnings.filterwarnings("ignore")

Step = Callable[[Tensor], dict[str, Tensor]]  # observations of all lanes → action and whatever else is kept


class Workload(NamedTuple):
    """One script, in three hands."""

    env: Callable[[], Any]  # as TorchRL and reap take it
    policy: Callable[[], nn.Module]
    by_hand: Callable[[nn.Module], Iterator[None]]  # each turn makes one batch
    frames: int


def networks(width: int, outputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    from torchrl.modules import MLP

    return MLP(in_features=width, out_features=outputs, num_cells=[64, 64], activation_class=activation)


# the actors, as scripts make them


def tanh_normal(width: int, actions: int, high: float) -> nn.Module:
    """PPO's of TorchRL's examples: the scale does not depend on the observation."""
    from torchrl.modules import ProbabilisticActor, TanhNormal

    body = nn.Sequential(networks(width, actions), AddStateIndependentNormalScale(actions, scale_lb=1e-8))
    return ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -high * torch.ones(actions), "high": high * torch.ones(actions), "tanh_loc": False},
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )


def categorical(width: int, actions: int, one_hot: bool) -> nn.Module:
    from torchrl.modules import OneHotCategorical, ProbabilisticActor

    return ProbabilisticActor(
        TensorDictModule(networks(width, actions), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical if one_hot else torch.distributions.Categorical,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )


def greedy_q(width: int, actions: int) -> nn.Module:
    from torchrl.data import Composite, OneHot
    from torchrl.modules import EGreedyModule, QValueActor

    values = QValueActor(networks(width, actions), in_keys=["observation"], spec=Composite(action=OneHot(actions)))
    return Sequential(values, EGreedyModule(spec=values.spec, eps_init=0.2, eps_end=0.1))


def noisy(width: int, actions: int) -> nn.Module:
    """TD3's: a deterministic actor and Gaussian noise within bounds."""
    from torchrl.data import Bounded
    from torchrl.modules import AdditiveGaussianModule, TanhModule

    body = TensorDictModule(networks(width, actions, nn.ReLU), ["observation"], ["param"])
    squash = TanhModule(in_keys=["param"], out_keys=["action"])
    return Sequential(
        body, squash, AdditiveGaussianModule(spec=Bounded(-1, 1, (actions,)), sigma_init=0.1, sigma_end=0.1)
    )


def sac(width: int, actions: int) -> nn.Module:
    from torchrl.modules import ProbabilisticActor, TanhNormal

    body = nn.Sequential(networks(width, 2 * actions, nn.ReLU), NormalParamExtractor(scale_lb=0.1))
    return ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -torch.ones(actions), "high": torch.ones(actions), "tanh_loc": False},
        return_log_prob=False,
        default_interaction_type=InteractionType.RANDOM,
    )


class ActorCritic(nn.Module):
    """As in CleanRL: samples in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dist = torch.distributions.Categorical(logits=self.actor(observation))
        action = dist.sample()
        return action, dist.log_prob(action), self.critic(observation)


# the loops by hand


def tanh_normal_by_hand(policy: nn.Module, high: float) -> Step:
    body, scaling = policy[0].module  # type: ignore[index]
    affine = math.log(high)

    def step(x: Tensor) -> dict[str, Tensor]:
        loc = body(x)
        scale = scaling.state_independent_scale.exp().clamp_min(1e-8).expand_as(loc)
        noise = torch.randn_like(loc)
        raw = loc + noise * scale
        squashed = raw.tanh().clamp(-1 + 1e-6, 1 - 1e-6)
        log_prob = -0.5 * noise**2 - scale.log() - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw)) - affine
        return {"action": squashed * high, "loc": loc, "scale": scale, "action_log_prob": log_prob.sum(-1)}

    return step


def sac_by_hand(policy: nn.Module) -> Step:
    body, extract = policy[0].module  # type: ignore[index]

    def step(x: Tensor) -> dict[str, Tensor]:
        loc, scale = extract(body(x))
        action = (loc + torch.randn_like(loc) * scale).tanh().clamp(-1 + 1e-6, 1 - 1e-6)
        return {"action": action, "loc": loc, "scale": scale}

    return step


def noisy_by_hand(policy: nn.Module) -> Step:
    body, noise = policy[0].module, policy[2]  # type: ignore[index]

    def step(x: Tensor) -> dict[str, Tensor]:
        param = body(x)
        action = param.tanh()
        return {"param": param, "action": (action + torch.randn_like(action) * noise.sigma).clamp(-1, 1)}

    return step


def categorical_by_hand(policy: nn.Module) -> Step:
    body = policy[0].module  # type: ignore[index]

    def step(x: Tensor) -> dict[str, Tensor]:
        logits = body(x)
        normal = logits - logits.logsumexp(-1, keepdim=True)
        action = torch.multinomial(normal.exp(), 1)
        return {
            "action": action.squeeze(-1),
            "logits": logits,
            "action_log_prob": normal.gather(-1, action).squeeze(-1),
        }

    return step


def greedy_q_by_hand(policy: nn.Module) -> Step:
    body, explore = policy[0][0].module, policy[1]  # type: ignore[index]

    def step(x: Tensor) -> dict[str, Tensor]:
        values = body(x)
        best, action = values.max(-1, keepdim=True)
        action = action.squeeze(-1)
        random = torch.randint_like(action, values.shape[-1])
        action = torch.where(torch.rand(action.shape) < explore.eps, random, action)
        return {"action": action, "action_value": values, "chosen_action_value": best}

    return step


def module_by_hand(policy: nn.Module) -> Step:
    def step(x: Tensor) -> dict[str, Tensor]:
        action, log_prob, value = policy(x)
        return {"action": action, "log_prob": log_prob, "value": value}

    return step


class Normalised:
    """A running mean and variance with decay, as VecNorm keeps them."""

    def __init__(self, width: int, decay: float, eps: float) -> None:
        self.sum, self.squares = np.zeros(width), np.zeros(width)
        self.count: float = 0.0
        self.decay, self.eps = decay, eps

    def __call__(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.sum *= self.decay
        self.sum += x.sum(0)
        self.squares *= self.decay
        self.squares += (x**2).sum(0)
        self.count = self.count * self.decay + len(x)
        mean = self.sum / self.count
        scale = np.sqrt(np.maximum(self.squares / self.count - mean**2, self.eps))
        return np.clip((x - mean) / np.maximum(scale, self.eps), -10, 10)


def loop(make: Callable[[], Any], lanes: int, steps: int, act: Step, *, transformed: bool) -> Iterator[None]:
    """Collects `steps` of `lanes` into arrays, over and over; `transformed` as the PPO script has it."""
    envs = [make() for _ in range(lanes)]
    width, discrete = envs[0].observation_space.shape[0], isinstance(envs[0].action_space, gym.spaces.Discrete)
    norm = Normalised(width, 0.99999, 1e-2) if transformed else (lambda x: x)
    now = norm(np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])).astype(np.float32)
    total, count = np.zeros(lanes, np.float32), np.zeros(lanes, np.int64)
    raw = np.empty((lanes, width))
    observations, successors = (np.empty((steps, lanes, width), np.float32) for _ in range(2))
    rewards, totals = (np.empty((steps, lanes), np.float32) for _ in range(2))
    counts = np.empty((steps, lanes), np.int64)
    terminated, truncated = (np.empty((steps, lanes), bool) for _ in range(2))
    columns: dict[str, Tensor] = {}
    while True:
        with torch.inference_mode():
            for t in range(steps):
                observations[t] = now
                row = act(torch.from_numpy(observations[t]))
                if not columns:
                    columns = {k: torch.empty((steps, *v.shape), dtype=v.dtype) for k, v in row.items()}
                for key, value in row.items():
                    columns[key][t] = value
                actions = row["action"].tolist() if discrete else row["action"].numpy()
                for i, env in enumerate(envs):
                    raw[i], rewards[t, i], terminated[t, i], truncated[t, i], _ = env.step(actions[i])
                successors[t] = now = norm(raw).astype(np.float32)
                ended = terminated[t] | truncated[t]
                if transformed:
                    total += rewards[t]
                    count += 1
                    totals[t], counts[t] = total, count
                if ended.any():
                    now = now.copy()
                    for lane in np.flatnonzero(ended).tolist():
                        now[lane] = norm(envs[lane].reset()[0][None])[0]
                    total[ended], count[ended] = 0, 0
        yield


# the workloads


def ppo_env(name: str, lanes: int) -> Any:
    """As TorchRL's PPO example transforms it."""
    from torchrl.envs import (
        ClipTransform,
        Compose,
        DoubleToFloat,
        GymEnv,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
        VecNorm,
    )

    base = GymEnv(name) if lanes == 1 else SerialEnv(lanes, lambda: GymEnv(name))
    doubles = [DoubleToFloat(in_keys=["observation"])] if "Cheetah" in name else []
    return TransformedEnv(
        base,
        Compose(
            VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2),
            ClipTransform(in_keys=["observation"], low=-10, high=10),
            RewardSum(),
            StepCounter(),
            *doubles,
        ),
    )


def bare(name: str, lanes: int, **options: Any) -> Any:
    from torchrl.envs import DoubleToFloat, GymEnv, SerialEnv, TransformedEnv

    base = GymEnv(name, **options) if lanes == 1 else SerialEnv(lanes, lambda: GymEnv(name, **options))
    return TransformedEnv(base, DoubleToFloat(in_keys=["observation"])) if "Cheetah" in name else base


def workloads() -> dict[str, Workload]:
    found: dict[str, Workload] = {}

    def add(
        name: str,
        env: Callable[[int], Any],
        policy: Callable[[], nn.Module],
        hand: Callable[[nn.Module], Step],
        game: str,
        frames: int,
        lanes: tuple[int, ...] = (1, 8),
        transformed: bool = False,
    ) -> None:
        for n in lanes:

            def by_hand(model: nn.Module, n: int = n) -> Iterator[None]:
                return loop(lambda: gym.make(game), n, frames // n, hand(model), transformed=transformed)

            found[f"{name}, {n} lane{'s' * (n > 1)}"] = Workload(lambda n=n: env(n), policy, by_hand, frames)  # type: ignore[misc]

    add(
        "ppo script, HalfCheetah",
        lambda n: ppo_env("HalfCheetah-v5", n),
        lambda: tanh_normal(17, 6, 1.0),
        lambda p: tanh_normal_by_hand(p, 1.0),
        "HalfCheetah-v5",
        800,
        transformed=True,
    )
    add(
        "ppo script, Pendulum",
        lambda n: ppo_env("Pendulum-v1", n),
        lambda: tanh_normal(3, 1, 2.0),
        lambda p: tanh_normal_by_hand(p, 2.0),
        "Pendulum-v1",
        1600,
        transformed=True,
    )
    add(
        "ppo script, CartPole",
        lambda n: ppo_env("CartPole-v1", n),
        lambda: categorical(4, 2, True),
        categorical_by_hand,
        "CartPole-v1",
        1600,
        transformed=True,
    )
    add(
        "td3 actor, HalfCheetah",
        lambda n: bare("HalfCheetah-v5", n),
        lambda: noisy(17, 6),
        noisy_by_hand,
        "HalfCheetah-v5",
        800,
        (1,),
    )
    add(
        "sac actor, HalfCheetah",
        lambda n: bare("HalfCheetah-v5", n),
        lambda: sac(17, 6),
        sac_by_hand,
        "HalfCheetah-v5",
        800,
        (1,),
    )
    add(
        "Categorical, CartPole",
        lambda n: bare("CartPole-v1", n, categorical_action_encoding=True),
        lambda: categorical(4, 2, False),
        categorical_by_hand,
        "CartPole-v1",
        1600,
    )
    add(
        "OneHotCategorical, CartPole",
        lambda n: bare("CartPole-v1", n),
        lambda: categorical(4, 2, True),
        categorical_by_hand,
        "CartPole-v1",
        1600,
    )
    add(
        "TanhNormal, Pendulum",
        lambda n: bare("Pendulum-v1", n),
        lambda: tanh_normal(3, 1, 2.0),
        lambda p: tanh_normal_by_hand(p, 2.0),
        "Pendulum-v1",
        1600,
    )
    add(
        "QValueActor + EGreedy, CartPole",
        lambda n: bare("CartPole-v1", n),
        lambda: greedy_q(4, 2),
        greedy_q_by_hand,
        "CartPole-v1",
        1600,
    )
    add(
        "custom nn.Module, CartPole",
        lambda n: bare("CartPole-v1", n, categorical_action_encoding=True),
        ActorCritic,
        module_by_hand,
        "CartPole-v1",
        1600,
        (1, 8, 32),
    )
    return found


def measure(work: Workload, rounds: int) -> dict[str, float]:
    """Median frames per second of each system, and medians of the ratios within each turn."""
    import torchrl.collectors

    import reap.collectors

    torch.manual_seed(0)
    policy = work.policy()
    wrapped = policy
    if isinstance(policy, ActorCritic):  # TorchRL wants keys
        wrapped = TensorDictModule(policy, ["observation"], ["action", "log_prob", "value"])
    frames = work.frames
    theirs = torchrl.collectors.Collector(work.env(), wrapped, frames_per_batch=frames, total_frames=-1)
    ours = reap.collectors.Collector(work.env(), policy, frames_per_batch=frames, total_frames=-1)
    turns = {"TorchRL": iter(theirs), "reap": iter(ours), "by hand": work.by_hand(policy)}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        next(turn)
    for _ in range(rounds):
        for name, turn in turns.items():
            began = time.perf_counter()
            next(turn)
            times[name].append(time.perf_counter() - began)
    theirs.shutdown()
    ours.shutdown()
    found = {name: frames / statistics.median(spent) for name, spent in times.items()}
    found["of the loop by hand"] = statistics.median(h / r for h, r in zip(times["by hand"], times["reap"]))
    found["times TorchRL"] = statistics.median(t / r for t, r in zip(times["TorchRL"], times["reap"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--json", type=Path, help="write figures, machine and versions there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'frames per second':36}{'TorchRL':>9}{'reap':>9}{'by hand':>9}{'of hand':>9}{'× TorchRL':>11}")
    results = {}
    for name, work in workloads().items():
        if given.only not in name:
            continue
        found = results[name] = measure(work, given.rounds)
        speeds = "".join(f"{found[system]:9,.0f}" for system in ("TorchRL", "reap", "by hand"))
        print(f"{name:36}{speeds}{found['of the loop by hand']:9.2f}{found['times TorchRL']:10.1f}×", flush=True)
    if given.json is not None:
        about = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.platform()}
        given.json.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
