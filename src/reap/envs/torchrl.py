"""TorchRL's envs: every `EnvBase`, as it is.

    a bare GymEnv, or a SerialEnv of them     the Gymnasium envs inside are stepped directly (GymLanes)
    tensors of fixed shapes                   TorchRLRows: TorchRL steps, results are written into slots
    text, objects, ragged, lazy stacks        TorchRLFrames: TorchRL steps, its frames are kept and stacked

TorchRL decides about resets, in `step_and_maybe_reset`, as it does in its own collectors: an agent or a lane begins
anew when the env says so, and transforms see what they always see. Only this file imports torchrl, when one of its envs
is at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase

from reap.core.env import Env
from reap.envs.gymnasium import FrameSkip, GymLanes
from reap.envs.limit import STEP_COUNT, StepLimit
from reap.envs.torchrl_by_hand import handed_out, taken_back
from reap.envs.torchrl_captured import Base, CapturedRows, captured_whole, watching_resets
from reap.envs.torchrl_frames import TorchRLFrames
from reap.envs.torchrl_rows import TorchRLCells, TorchRLEnv, TorchRLRows, columns_of, give_spec
from reap.errors import UsageError, WrongState
from reap.pickling import before_packing
from reap.spec import Key


def is_torchrl(source: Any) -> bool:
    """Whether this is an env of TorchRL's."""
    return any(c.__name__ == "EnvBase" and c.__module__.startswith("torchrl.") for c in type(source).__mro__)


def _share_state(creator: Any) -> None:
    """Have what an `EnvCreator` gives to all its envs in shared memory, as it is asked to: statistics of a VecNorm."""

    def share(state: Any) -> None:
        for value in state.values():
            if isinstance(value, Mapping):
                share(value)
            elif isinstance(value, torch.Tensor):
                value.share_memory_()  # type: ignore[no-untyped-call]

    if getattr(creator, "_share_memory", True):
        share(creator.state_dict())


before_packing("torchrl.envs.env_creator", "EnvCreator", _share_state)


def torchrl_lanes(
    env: Any, kwargs: Mapping[str, Any] | None = None, limit: int | None = None, count: Key = STEP_COUNT
) -> Env:
    """A TorchRL env as lanes the engine can step; episodes of at most `limit` steps, counted under `count`."""
    if kwargs:
        if not hasattr(env, "update_kwargs"):
            raise WrongState(f"create_env_kwargs {sorted(kwargs)} need a factory; this {type(env).__name__} is made")
        env.update_kwargs(dict(kwargs))
    inside = _gymnasium(env)
    if inside is not None:
        return inside if limit is None else StepLimit(inside, limit, count)
    return _stepped(env if limit is None else _limited(env, limit, count))


def torchrl_joined(parts: Sequence[TorchRLEnv]) -> Env:
    """Single envs, each made already, as lanes of one that TorchRL steps one after another."""
    from torchrl.envs import SerialEnv

    env = SerialEnv(len(parts), [lambda env=part.env: env for part in parts])
    return _stepped(env, torch.stack([part.root for part in parts]))  # begun already, each by itself


def _stepped(env: Any, root: TensorDictBase | None = None) -> Env:
    """TorchRL steps; rows where everything has its place in a row, frames where not. `root`: where it is, if begun."""
    _ = env.output_spec  # before the reset: primers find their shapes in whichever comes first
    bases: list[Base] = []
    transformed: list[Any] = []
    inside = root is None and len(env.batch_size) < 2 and _inside(env, bases, transformed) and bool(transformed)
    if root is None:
        root = watching_resets(bases, env.reset) if inside else env.reset()
    columns = columns_of(env, root)
    if columns is None:
        return TorchRLFrames(env, root)
    if inside and "done" in columns.flags and not columns.ends:
        return CapturedRows(env, root, columns, bases, transformed)
    return TorchRLRows(env, root, columns)


def torchrl_cells(env: Env) -> Env:
    """An env whose frames would be kept whole, with texts and objects as columns where that is all they need."""
    if not isinstance(env, TorchRLFrames) or env.spec.batched:
        return env
    columns = columns_of(env.env, env.root, cells=True)
    return env if columns is None else TorchRLCells(env.env, env.root, columns)


def _inside(env: Any, bases: list[Base], transformed: list[Any]) -> bool:
    """Find the innermost envs and the transformed ones around them; False if there is one reap cannot step itself."""
    from torchrl.envs import SerialEnv, TransformedEnv

    lanes = _gymnasium(env)
    if lanes is not None:
        bases.append(Base(env, lanes))
        return True
    if type(env) is TransformedEnv:
        transformed.append(env)
        return all(map(captured_whole, env.transform.modules())) and _inside(env.base_env, bases, transformed)
    return type(env) is SerialEnv and all(_inside(one, bases, transformed) for one in env._envs)


def _limited(env: Any, limit: int, count: Key) -> Any:
    """The env with episodes of at most so many steps, counted by TorchRL's own transform."""
    from torchrl.envs import StepCounter, TransformedEnv

    if count[0] in env.observation_spec.keys(True, True):
        raise UsageError("max_frames_per_traj adds 'step_count', which the env has already; leave one of them out")
    return TransformedEnv(env, StepCounter(max_steps=limit, step_count_key=count[0]))


class WrappedGym(GymLanes):
    """The Gymnasium envs inside TorchRL's; closing and state are the outer env's."""

    def __init__(self, outer: Any, envs: Sequence[gym.Env[Any, Any]], *, categorical: bool, batched: bool) -> None:
        super().__init__(envs, categorical=categorical, batched=batched)
        self.spec = replace(self.spec, look=replace(self.spec.look, contiguous=True))  # as from TorchRL's collectors
        self.outer = outer

    @property
    def as_given(self) -> Any:
        return handed_out(self.outer, self)

    def joined(self, others: Sequence[GymLanes]) -> GymLanes:
        lanes = super().joined(others)
        lanes.spec = replace(lanes.spec, look=replace(lanes.spec.look, contiguous=True))
        return lanes

    def meet(self, model: Any) -> None:
        give_spec(model, self.outer)

    def close(self) -> None:
        taken_back(self.outer)
        self.outer.close(raise_if_closed=False)


def _gymnasium(env: Any) -> Env | None:
    """The Gymnasium envs inside, if there is nothing around them and their data would be the same."""
    from torchrl.envs import GymEnv, GymWrapper, SerialEnv

    one = type(env) in (GymEnv, GymWrapper)
    if one:
        inside = [env]
    elif type(env) is SerialEnv:
        if env.is_closed:
            env.start()
        inside = list(env._envs)
    else:
        return None
    raw = [found for child in inside if (found := _bare(child, (GymEnv, GymWrapper))) is not None]
    if len(raw) < len(inside):
        return None
    kinds = {bool(child._categorical_action_encoding) for child in inside}
    if len(kinds) != 1:
        return None
    try:
        lanes = WrappedGym(env, raw, categorical=kinds.pop(), batched=not one)
    except UsageError:  # spaces only TorchRL can read, or envs that differ
        return None
    fake = env.fake_tensordict()
    return lanes if _looks(lanes.spec.observation, lanes.spec.action) == _looks_of(fake, len(env.batch_size)) else None


def _bare(env: Any, kinds: tuple[Any, ...]) -> gym.Env[Any, Any] | None:
    if type(env) not in kinds:
        return None
    inner = env._env
    plain = (
        isinstance(inner, gym.Env)
        and not env.batch_size
        and not env.info_dict_reader
        and getattr(env, "_convert_actions_to_numpy", True)
        and (env.device is None or env.device.type == "cpu")
    )
    if not plain:
        return None
    skip = int(getattr(env, "frame_skip", 1) or 1)
    return FrameSkip(inner, skip) if skip > 1 else inner


def _looks(observation: Mapping[Any, Any], action: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: (leaf.shape, leaf.dtype) for key, leaf in {**observation, **action}.items()}


def _looks_of(fake: TensorDictBase, dims: int) -> dict[Any, Any]:
    """Shapes and dtypes of the root of a TensorDict, flags left out."""
    found = {}
    for key, value in fake.exclude("next", "done", "terminated", "truncated").items(True, True):
        path = (key,) if isinstance(key, str) else key
        found[path] = (tuple(value.shape[dims:]), value.dtype if isinstance(value, torch.Tensor) else None)
    return found
