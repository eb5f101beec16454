"""The same scenario in TorchRL and in reap: envs, policies, collectors side by side, and the comparison of batches.

make(kind, lane)  ──►  torchrl GymWrapper / SerialEnv  ──►  torchrl Collector  ──►  batches ┐
                  └─►  reap GymEnv / SerialEnv         ──►  reap Collector     ──►  batches ┴─ identical, bit for bit
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    import torchrl.collectors
    import torchrl.collectors.utils
    import torchrl.envs

import reap.collectors
import reap.envs
from reap.testing import CountingEnv

LIBRARIES = {"torchrl": torchrl, "reap": reap}


def differs(how: str, error: type[BaseException] = AssertionError) -> pytest.MarkDecorator:
    """A known difference: the test demands what TorchRL does; `how` says what reap does in its place."""
    return pytest.mark.xfail(strict=True, raises=error, reason=f"reap: {how}")


# ---- envs -----------------------------------------------------------------------------------------------------------


class SpaceEnv(gym.Env[Any, Any]):
    """Observations drawn from any space, a reward that depends on every number of the action, short episodes.

    It keeps what it was sent, so that two libraries can be compared in what an env receives, too.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lane: int = 0,
        lengths: tuple[int, ...] = (4, 1, 3),
    ) -> None:
        self.observation_space, self.action_space, self.lengths = observation_space, action_space, lengths
        self.received: list[np.ndarray[Any, Any]] = []
        self._source = copy.deepcopy(observation_space)
        self._source.seed(100 + lane)
        self._lane, self._episode, self._t = lane, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._source.seed(seed)
            self._episode = -1
        self._episode, self._t = self._episode + 1, 0
        return self._source.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        numbers = np.asarray(action)
        self.received.append(numbers.copy())
        self._t += 1
        flat = numbers.reshape(-1).astype(np.float64)
        reward = self._t + float(flat @ np.arange(1, len(flat) + 1))
        over = self._t >= self.lengths[(self._lane + self._episode) % len(self.lengths)]
        odd = self._episode % 2 == 1
        return self._source.sample(), reward, over and not odd, over and odd, {"episode": self._episode}


def box(*shape: int, dtype: Any = np.float32, low: float = -1.0, high: float = 1.0) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


image = spaces.Box(0, 255, (4, 5, 3), np.uint8)
nested = spaces.Dict(
    {
        "state": box(2),
        "camera": image,
        "body": spaces.Dict({"joints": box(3, dtype=np.float64), "arm": spaces.Dict({"gear": spaces.Discrete(3)})}),
    }
)

#: observation space and action space by name
SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "vector": (box(3), box(2)),
    "unbounded": (box(3, low=-np.inf, high=np.inf), box(2, low=-np.inf, high=np.inf)),
    "float64": (box(3, dtype=np.float64), box(2, dtype=np.float64)),
    "float16": (box(3, dtype=np.float16), box(2)),
    "whole numbers": (spaces.Box(-5, 5, (3,), np.int32), spaces.Box(-5, 5, (2,), np.int64)),
    "matrix": (box(2, 3), box(2, 2)),
    "scalar box": (spaces.Box(-1.0, 1.0, (), np.float32), spaces.Box(-1.0, 1.0, (), np.float32)),
    "pixels": (image, spaces.Discrete(4)),
    "uint8 vector": (spaces.Box(0, 255, (6,), np.uint8), spaces.Discrete(4)),
    "dict": (spaces.Dict({"a": box(2), "b": box(3, dtype=np.float64)}), box(1)),
    "nested dict": (nested, spaces.Discrete(3)),
    "tuple": (spaces.Tuple((box(2), box(2))), box(1)),
    "discrete": (spaces.Discrete(5), spaces.Discrete(3)),
    "multi-discrete": (spaces.MultiDiscrete([2, 4]), spaces.MultiDiscrete([2, 3, 4])),
    "multi-discrete equal": (spaces.MultiDiscrete([3, 3]), spaces.MultiDiscrete([3, 3])),
    "multi-binary": (spaces.MultiBinary(4), spaces.MultiBinary(5)),
}
GYMNASIUM = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 7},
    "FrozenLake-v1": {},
    "HalfCheetah-v5": {"max_episode_steps": 5},
}
KINDS = ["counting", *SPACES, *GYMNASIUM]
#: where the encoding of discrete spaces makes a difference
DISCRETE = [
    "pixels",
    "nested dict",
    "discrete",
    "multi-discrete",
    "multi-discrete equal",
    "CartPole-v1",
    "FrozenLake-v1",
]


def one_episode(lane: int) -> SpaceEnv:
    """The env "vector" without an end."""
    return SpaceEnv(*SPACES["vector"], lane=lane, lengths=(10**6,))


def make(kind: str, lane: int = 0) -> gym.Env[Any, Any]:
    """A fresh env. Real ones are seeded here, so that the resets a library makes without a seed are the same ones."""
    if kind == "counting":
        return CountingEnv(lengths=[(3, 1, 5), (2, 4), (6,)][lane % 3], lane=lane)
    if kind in SPACES:
        return SpaceEnv(*SPACES[kind], lane=lane)
    env = gym.make(kind, **GYMNASIUM[kind])
    env.reset(seed=40 + lane)
    return env


def env_makers(
    kind: str | Callable[[int], gym.Env[Any, Any]], lanes: int | None = None, **wrap: Any
) -> dict[str, Callable[..., Any]]:
    """A factory for each library. `lanes` None: one env without a lane dimension."""
    raw = kind if callable(kind) else lambda lane: make(kind, lane)

    def maker(wrapper: Any, serial: Any) -> Callable[..., Any]:
        if lanes is None:
            return lambda **kwargs: wrapper(raw(0, **kwargs), **wrap)
        one = [lambda lane=lane, **kwargs: wrapper(raw(lane, **kwargs), **wrap) for lane in range(lanes)]
        return lambda: serial(lanes, one)

    return {
        # SerialEnv of TorchRL takes most of the time of this suite: few lanes are kinder than many
        "torchrl": maker(torchrl.envs.GymWrapper, torchrl.envs.SerialEnv),
        "reap": maker(reap.envs.GymWrapper, reap.envs.SerialEnv),
    }


# ---- policies -------------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Any observations to `size` numbers: a fixed linear map of all of them."""

    def __init__(self, shapes: list[tuple[int, ...]], size: int) -> None:
        super().__init__()
        self.shapes = shapes
        rng = torch.Generator().manual_seed(7)
        width = sum(math.prod(shape) for shape in shapes)
        self.weight = nn.Parameter(torch.randn(width, size, generator=rng, dtype=torch.float64))

    def forward(self, *observations: torch.Tensor) -> torch.Tensor:
        flat = [o.reshape(*o.shape[: o.ndim - len(s)], -1) for o, s in zip(observations, self.shapes)]
        return torch.cat([x.double() for x in flat], -1).sin() @ self.weight


class Choose(nn.Module):
    """Scores to an action of this space, as this encoding writes it."""

    def __init__(self, space: spaces.Space[Any], categorical: bool) -> None:
        super().__init__()
        self.space, self.categorical = space, categorical

    @property
    def size(self) -> int:
        if isinstance(self.space, spaces.Discrete):
            return int(self.space.n)
        if isinstance(self.space, spaces.MultiDiscrete):
            return int(self.space.nvec.sum())
        return math.prod(self.space.shape or (1,))

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        space, lead = self.space, scores.shape[:-1]
        if isinstance(space, spaces.Box):
            return scores.tanh().reshape(*lead, *(space.shape or (1,))).to(torch.from_numpy(space.low).dtype)
        if isinstance(space, spaces.MultiBinary):
            return (scores > 0).to(torch.int8)
        sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()
        index = torch.stack([part.argmax(-1) for part in scores.split(sizes, -1)], -1)
        if self.categorical:
            return index[..., 0] if isinstance(space, spaces.Discrete) else index
        hot = [nn.functional.one_hot(i, n) for i, n in zip(index.unbind(-1), sizes)]
        if isinstance(space, spaces.MultiDiscrete) and len(set(sizes)) == 1:
            return torch.stack(hot, -2)
        return torch.cat(hot, -1)


def actor(kind: str | Callable[[int], gym.Env[Any, Any]], categorical: bool = False) -> TensorDictModule:
    """A deterministic policy for any kind of env: reads all it observes, writes `scores` and `action`."""
    leaves, action_space = _spaces_of(kind, categorical)
    choose = Choose(action_space, categorical)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.choose = Scores(list(leaves.values()), choose.size), choose

        def forward(self, *observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = self.scores(*observations)
            return scores, self.choose(scores)

    return TensorDictModule(Both(), in_keys=list(leaves), out_keys=["scores", "action"])


@functools.cache
def _spaces_of(kind: Any, categorical: bool) -> tuple[dict[Any, tuple[int, ...]], spaces.Space[Any]]:
    """Keys and shapes of what TorchRL says an env observes, and the space of its actions."""
    raw = kind(0) if callable(kind) else make(kind)
    spec = torchrl.envs.GymWrapper(raw, categorical_action_encoding=categorical).observation_spec
    return {key: tuple(spec[key].shape) for key in spec.keys(True, True)}, raw.action_space


# ---- collectors -----------------------------------------------------------------------------------------------------


def collectors(envs: dict[str, Any], policy: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """A collector of each library, each with its own policy (made from the same seed) and its own copy of options."""
    made = {}
    for name, library in LIBRARIES.items():
        torch.manual_seed(0)
        own = {k: v.get(name) if isinstance(v, Each) else v for k, v in options.items()}
        made[name] = library.collectors.Collector(envs[name], policy(), **own)
    return made


class Each(dict[str, Any]):
    """An option that differs between the libraries: a hook, a stateful object, a class of the library."""

    @classmethod
    def of(cls, make_one: Callable[[], Any]) -> Each:
        return cls({name: make_one() for name in LIBRARIES})


def run(collector: Any, batches: int | None = None, seed: int = 3) -> list[Any]:
    """The next `batches` batches (None: all), copied, with torch's generator at `seed` when the first begins."""
    torch.manual_seed(seed)
    out = []
    for batch in collector:
        out.append(batch.clone())
        if batches is not None and len(out) == batches:
            break
    return out


def assert_same_batches(made: dict[str, Any], batches: int | None = 2) -> list[Any]:
    """Both libraries' next batches are identical; returns reap's."""
    want, got = run(made["torchrl"], batches), run(made["reap"], batches)
    assert len(got) == len(want)
    assert got, "no batch came"
    for i, (ours, theirs) in enumerate(zip(got, want)):
        assert_identical(ours, theirs, f"batch {i}")
    return got


# ---- comparing ------------------------------------------------------------------------------------------------------


def assert_identical(got: Any, want: Any, where: str = "batch") -> None:
    """Same type, keys at every level, batch size, names, device; every leaf the same shape, dtype, device and bytes."""
    assert isinstance(got, TensorDictBase), f"{where}: {type(got)}"
    assert type(got) is type(want), f"{where}: {type(got)}, TorchRL {type(want)}"
    for what in ("batch_size", "names", "device", "is_locked"):
        ours, theirs = getattr(got, what), getattr(want, what)
        assert ours == theirs, f"{where}: {what} is {ours}, TorchRL {theirs}"
    assert set(got.keys()) == set(want.keys()), f"{where}: only one has {set(got.keys()) ^ set(want.keys())}"
    for key in want.keys():
        ours, theirs, path = got.get(key), want.get(key), f"{where}[{key!r}]"
        if isinstance(theirs, TensorDictBase):
            assert_identical(ours, theirs, path)
        else:
            assert_identical_tensors(ours, theirs, path)


def assert_identical_tensors(got: torch.Tensor, want: torch.Tensor, where: str = "tensor") -> None:
    assert isinstance(got, torch.Tensor), f"{where}: {type(got)}"
    for what in ("dtype", "device", "requires_grad", "is_nested"):
        ours, theirs = getattr(got, what), getattr(want, what)
        assert ours == theirs, f"{where}: {what} is {ours}, TorchRL {theirs}"
    if want.is_nested:
        assert len(got.unbind()) == len(want.unbind()), where
        for i, (ours, theirs) in enumerate(zip(got.unbind(), want.unbind())):
            assert_identical_tensors(ours, theirs, f"{where}[{i}]")
        return
    assert got.shape == want.shape, f"{where}: shape {list(got.shape)}, TorchRL {list(want.shape)}"
    if _bytes(got) != _bytes(want):
        at = (got != want).nonzero()[:1].squeeze(0).tolist()
        raise AssertionError(f"{where}: first difference at {at}:\n{got}\nTorchRL:\n{want}")


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy().tobytes()


def columns(batch: TensorDict) -> dict[Any, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype by key."""
    return {key: (value.shape, value.dtype) for key, value in batch.items(True, True)}
