"""TorchRL envs and options for the parity grid: the same scenario through TorchRL's collectors and reap's.

    ENVS[kind]()  ──►  torchrl Collector(env, policy_for(env), **OPTIONS[o])  ──►  batches ┐
                  └─►  reap Collector(the same)                               ──►  batches ┴─ the same, key by key

Most envs are those TorchRL tests itself with: code nobody here wrote.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase

from tests.worlds import pairs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import Composite, Unbounded
    from torchrl.envs import (
        CatFrames,
        Compose,
        DoubleToFloat,
        FlattenObservation,
        GymEnv,
        GymWrapper,
        InitTracker,
        ObservationNorm,
        PendulumEnv,
        RenameTransform,
        RewardScaling,
        RewardSum,
        SerialEnv,
        StepCounter,
        TensorDictPrimer,
        TransformedEnv,
        UnsqueezeTransform,
        VecNorm,
    )
    from torchrl.testing import mocking_classes as mocks

from reap.testing import CountingEnv

for _module in (pairs, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)


def counting(steps: int = 3) -> Any:
    return mocks.CountingEnv(max_steps=steps)


def gym(lane: int = 0) -> Any:
    return GymWrapper(CountingEnv(lengths=[(3, 1, 5), (2, 4)][lane], lane=lane))


def two(make: Callable[[int], Any] = lambda lane: counting(2 + lane)) -> Any:
    return SerialEnv(2, [lambda: make(0), lambda: make(1)])


def transformed(env: Any, *transforms: Any) -> Any:
    return TransformedEnv(env, Compose(*transforms))


#: by name: a factory. What each is of: one lane, many, transformed, several keys, no tensors
ENVS: dict[str, Callable[[], Any]] = {
    "counting": counting,
    "gym": gym,
    "gym lanes": lambda: two(gym),
    "lanes": two,
    "lanes of lanes": lambda: SerialEnv(2, lambda: two()),
    "one lane": lambda: SerialEnv(1, counting),
    "batched": lambda: mocks.CountingBatchedEnv(max_steps=torch.tensor([3, 2]), batch_size=[2]),
    "matrix of lanes": lambda: mocks.CountingBatchedEnv(max_steps=torch.tensor([[3, 2], [2, 4]]), batch_size=[2, 2]),
    "stateless": PendulumEnv,
    "unlocked": mocks.MockBatchedUnLockedEnv,
    "scalar action": mocks.EnvWithScalarAction,
    "counters": lambda: transformed(counting(), RewardSum(), StepCounter(), InitTracker()),
    "counters over lanes": lambda: transformed(two(), RewardSum(), StepCounter(4), InitTracker()),
    "counters under lanes": lambda: two(lambda lane: transformed(counting(2 + lane), RewardSum(), InitTracker())),
    "gym with counters": lambda: transformed(gym(), RewardSum(), StepCounter(4), DoubleToFloat()),
    "frame stack": lambda: transformed(gym(), CatFrames(3, dim=-1, in_keys=["observation"])),
    "moving norm": lambda: transformed(gym(), VecNorm(in_keys=["observation"])),
    "moving norm over lanes": lambda: transformed(two(gym), VecNorm(in_keys=["observation", "reward"])),
    "fixed norm": lambda: transformed(
        gym(), ObservationNorm(0.5, 2.0, in_keys=["observation"]), RewardScaling(1.0, 3.0)
    ),
    "renamed": lambda: transformed(
        gym(), RenameTransform(["observation"], ["seen"]), UnsqueezeTransform(-1, in_keys=["seen"])
    ),
    "flattened": lambda: transformed(
        gym(), UnsqueezeTransform(-1, in_keys=["observation"]), FlattenObservation(-2, -1, in_keys=["observation"])
    ),
    "primer": lambda: transformed(counting(), TensorDictPrimer(Composite(mem=Unbounded((3,))), default_value=2.0)),
    "nested": lambda: mocks.NestedCountingEnv(max_steps=3, nest_done=True, nest_reward=True, nest_obs_action=True),
    "nested over lanes": lambda: two(lambda lane: mocks.NestedCountingEnv(max_steps=2 + lane, nest_done=False)),
    "agents": lambda: mocks.MultiAgentCountingEnv(n_agents=2, max_steps=3),
    "groups": lambda: mocks.MultiKeyCountingEnv(max_steps=3),
    "groups over lanes": lambda: mocks.MultiKeyCountingEnv(max_steps=3, batch_size=[2]),
    "heterogeneous": lambda: mocks.HeterogeneousCountingEnv(max_steps=3),
    "text": lambda: Words(max_steps=3),
    "text actions": lambda: Talk(),
    "metadata": mocks.EnvWithMetadata,
    "tensorclass": lambda: mocks.EnvWithTensorClass(max_steps=3),
    "ragged": mocks.EnvWithDynamicSpec,
    "CartPole": lambda: seeded(GymEnv("CartPole-v1")),
    "CartPole with counters": lambda: seeded(transformed(GymEnv("CartPole-v1"), StepCounter(9), RewardSum())),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit": {"max_frames_per_traj": 2},
    "reset each": {"reset_at_each_iter": True},
    "truncated": {"set_truncated": True},
    "no ids": {"track_traj_ids": False},
    "split": {"split_trajs": True},
    "whole": {"trajs_per_batch": 2, "traj_format": "cat"},
    "padded": {"trajs_per_batch": 2, "traj_format": "padded"},
    "compact": {"compact_obs": True},
    "random": {"init_random_frames": 24},
    "stored": {"storing_device": "cpu"},
}


FRAMES = {"heterogeneous", "text", "text actions", "metadata", "tensorclass", "ragged"}
AGENTS = {"nested", "agents", "groups", "groups over lanes"}  # done flags of their own
#: options for some kinds only: the others TorchRL refuses, never ends with, or draws random numbers for differently
ONLY: dict[str, set[str]] = {
    "limit": set(ENVS)
    - {"counters", "counters over lanes", "gym with counters", "CartPole with counters", "nested", "agents"},
    "truncated": {"gym", "gym lanes", "scalar action", "counters over lanes", "gym with counters", "frame stack"}
    | {"moving norm", "moving norm over lanes", "fixed norm", "renamed", "flattened", "ragged", "CartPole"},
    "split": set(ENVS) - {"heterogeneous", "ragged", "groups over lanes"},
    "whole": {"gym", "counters", "gym with counters", "frame stack", "moving norm", "renamed"},
    "padded": {"gym", "counters", "gym with counters", "frame stack", "fixed norm", "flattened"},
    "compact": set(ENVS) - FRAMES - AGENTS - {"stateless"},
    "random": set(ENVS) - {"gym", "gym lanes"},
}
GRID = [(kind, option) for kind in ENVS for option in OPTIONS if kind in ONLY.get(option, ENVS)]


def seeded(env: Any) -> Any:
    env.set_seed(11)
    return env


class Words(mocks.CountingEnvWithString):
    """Says what it counts, in words one can predict."""

    def get_random_string(self) -> str:
        return f"at {int(self.count)}"


class Talk(mocks.Str2StrEnv):
    """Answers words with words one can predict, and never ends."""

    said = 0

    def get_random_string(self) -> str:
        self.said += 1
        return f"word {self.said}"

    def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
        return super()._reset(tensordict, **kwargs).set("done", torch.zeros(1, dtype=torch.bool))

    def _step(self, tensordict: Any, **kwargs: Any) -> Any:
        return super()._step(tensordict, **kwargs).set("done", torch.zeros(1, dtype=torch.bool))


class Banked(TensorDictModuleBase):
    """Chooses among fixed random actions by what it sees: deterministic, and right for any action spec."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.bank = [env.full_action_spec.rand() for _ in range(5)]
        self.in_keys = [k for k in env.observation_spec.keys(True, True) if _summed(env.observation_spec, k)]
        self.out_keys = list(env.action_keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        total = sum(float(tensordict.get(key).double().sum()) for key in self.in_keys)
        chosen = self.bank[int(abs(total) * 13) % len(self.bank)]
        for key in self.out_keys:
            if len(key) == 1 or isinstance(key, str) or key[0] not in tensordict.keys():
                tensordict.set(key, chosen.get(key))
            elif isinstance(tensordict.get(key[0]), LazyStackedTensorDict):
                tensordict.get(key[0]).update(chosen.get(key[0]))
            else:
                tensordict.set(key, chosen.get(key))
        return tensordict


def _summed(spec: Any, key: Any) -> bool:
    """Whether a leaf is a tensor of one shape, so that it can be added up."""
    try:
        leaf = spec[key]
    except Exception:
        return False
    return isinstance(key, str) and getattr(leaf, "dtype", None) is not None and -1 not in leaf.shape


def policy_for(kind: str) -> Banked:
    return Banked(ENVS[kind]())


# ---- comparing ------------------------------------------------------------------------------------------------------


def assert_same(got: Any, want: Any, where: str = "batch") -> None:
    """Same kind of collection, batch size, keys; every leaf the same shape, dtype and bytes, lazily stacked or not."""
    assert type(got) is type(want), f"{where}: {type(got)}, TorchRL {type(want)}"
    if isinstance(want, torch.Tensor):
        pairs.assert_identical_tensors(got, want, where)
        return
    if not is_tensor_collection(want):
        assert got == want, f"{where}: {got!r}, TorchRL {want!r}"
        return
    assert got.batch_size == want.batch_size, f"{where}: {got.batch_size}, TorchRL {want.batch_size}"
    if hasattr(want, "tolist") and not isinstance(want, TensorDictBase):
        assert got.tolist() == want.tolist(), where
        return
    if isinstance(want, LazyStackedTensorDict):
        assert got.stack_dim == want.stack_dim, f"{where}: stack_dim {got.stack_dim}, TorchRL {want.stack_dim}"
        for i, (ours, theirs) in enumerate(zip(got.unbind(got.stack_dim), want.unbind(want.stack_dim))):
            assert_same(ours, theirs, f"{where}[{i}]")
        return
    assert set(got.keys()) == set(want.keys()), f"{where}: only one has {set(got.keys()) ^ set(want.keys())}"
    assert got.device == want.device, f"{where}: device {got.device}, TorchRL {want.device}"
    if isinstance(want, TensorDictBase):
        assert got.names == want.names, f"{where}: names {got.names}, TorchRL {want.names}"
    for key in want.keys():
        assert_same(got.get(key), want.get(key), f"{where}[{key!r}]")
