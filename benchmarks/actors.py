"""TorchRL's own actors, as scripts make them, and a module of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    AddStateIndependentNormalScale,
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical


def network(width: int, outputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    from torchrl.modules import MLP

    return MLP(in_features=width, out_features=outputs, num_cells=[64, 64], activation_class=activation)


def sampled(body: nn.Module, keys: list[str], family: Any, *, key: str = "observation", **options: Any) -> nn.Module:
    """A ProbabilisticActor that samples."""
    from torchrl.modules import ProbabilisticActor

    return ProbabilisticActor(
        TensorDictModule(body, [key], keys),
        in_keys=keys,
        distribution_class=family,
        default_interaction_type=InteractionType.RANDOM,
        **options,
    )


def categorical(net: nn.Module, *, one_hot: bool = False, key: str = "observation") -> nn.Module:
    from torchrl.modules import OneHotCategorical

    return sampled(net, ["logits"], OneHotCategorical if one_hot else Categorical, key=key, return_log_prob=True)


def independent_normal(net: nn.Module) -> nn.Module:
    from torchrl.modules import IndependentNormal

    return sampled(net, ["loc", "scale"], IndependentNormal, return_log_prob=True)


def bounds(actions: int, high: float) -> dict[str, Any]:
    return {"low": -high * torch.ones(actions), "high": high * torch.ones(actions), "tanh_loc": False}


def tanh_normal(width: int, actions: int, high: float) -> nn.Module:
    """PPO's of TorchRL's examples: the scale does not depend on the observation."""
    from torchrl.modules import TanhNormal

    body = nn.Sequential(network(width, actions), AddStateIndependentNormalScale(actions, scale_lb=1e-8))
    limits = bounds(actions, high)
    return sampled(body, ["loc", "scale"], TanhNormal, distribution_kwargs=limits, return_log_prob=True)


def sac(width: int, actions: int) -> nn.Module:
    from torchrl.modules import TanhNormal

    body = nn.Sequential(network(width, 2 * actions, nn.ReLU), NormalParamExtractor(scale_lb=0.1))
    return sampled(body, ["loc", "scale"], TanhNormal, distribution_kwargs=bounds(actions, 1.0), return_log_prob=False)


def noisy(width: int, actions: int) -> nn.Module:
    """TD3's: a deterministic actor and Gaussian noise within bounds."""
    from torchrl.data import Bounded
    from torchrl.modules import AdditiveGaussianModule, TanhModule

    return TensorDictSequential(
        TensorDictModule(network(width, actions, nn.ReLU), ["observation"], ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"]),
        AdditiveGaussianModule(spec=Bounded(-1, 1, (actions,)), sigma_init=0.1, sigma_end=0.1),
    )


def greedy_q(net: nn.Module, actions: int, *, key: str = "observation", one_hot: bool = True) -> nn.Module:
    """DQN's: a QValueActor and an EGreedyModule."""
    from torchrl.data import Categorical as Numbers
    from torchrl.data import Composite, OneHot
    from torchrl.modules import EGreedyModule, QValueActor

    spec = Composite(action=OneHot(actions) if one_hot else Numbers(actions))
    values = QValueActor(net, in_keys=[key], spec=spec)
    return TensorDictSequential(values, EGreedyModule(spec=values.spec, eps_init=0.2, eps_end=0.1))


class ActorCritic(nn.Module):
    """As in CleanRL: it samples in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dist = Categorical(logits=self.actor(observation))
        action = dist.sample()
        return action, dist.log_prob(action), self.critic(observation)


class OnTensorDicts(TensorDictModuleBase):  # type: ignore[misc]
    """Code of the user's own on the whole TensorDict: nothing is known of it."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, actions))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"] = self.net(tensordict["observation"]).argmax(-1)
        return tensordict
