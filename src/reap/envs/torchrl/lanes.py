"""TorchRL's envs as lanes: chooses how each `EnvBase` is stepped.

    a bare GymEnv, or a SerialEnv of them     the Gymnasium envs inside are stepped directly (WrappedGym)
    a ParallelEnv                             its envs are stepped in reap's env processes (ParallelLanes)
    one of these below transforms             CapturedRows: the transforms' torch calls are replayed around the envs
    tensors of fixed shapes                   TorchRLRows: TorchRL steps, results are written into slots
    text, objects, ragged, lazy stacks        TorchRLFrames: TorchRL steps, its frames are kept and stacked

Where TorchRL steps, it also decides about resets, in `step_and_maybe_reset`, as it does in its own collectors: an agent
or a lane is reset when the env says so, and transforms see the same calls as there. A captured step makes the same
resets. torchrl is imported here and in `_foreign/torchrl_internals.py`, and only once an env of TorchRL's is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase

from reap._foreign import torchrl_internals
from reap._system.messages.pickling import before_packing
from reap.core.env import Env
from reap.envs.adapters.gymnasium import FrameSkip, GymLanes
from reap.envs.step_limit import STEP_COUNT, StepLimit
from reap.envs.torchrl.by_hand import replaced, taken_back
from reap.envs.torchrl.captured import Base, CapturedRows, keeping_resets, not_replayable
from reap.envs.torchrl.frames import TorchRLFrames
from reap.envs.torchrl.rows import OfTorchRL, TorchRLCells, TorchRLEnv, TorchRLRows, looks_like, torchrl_columns
from reap.errors import UsageError, WrongState
from reap.spec import Key, Leaf, as_key, show_keys


def is_torchrl(source: Any) -> bool:
    """Return whether this is an env of TorchRL's."""
    return any(c.__name__ == "EnvBase" and c.__module__.startswith("torchrl.") for c in type(source).__mro__)


def _share_state(creator: Any) -> None:
    """Move the state that an `EnvCreator` shares among its envs (VecNorm's statistics) into shared memory, if it is
    asked to.
    """

    def share(state: Any) -> None:
        for value in state.values():
            if isinstance(value, Mapping):
                share(value)
            elif isinstance(value, torch.Tensor):
                value.share_memory_()  # type: ignore[no-untyped-call]

    if torchrl_internals.shares_state(creator):
        share(creator.state_dict())


before_packing("torchrl.envs.env_creator", "EnvCreator", _share_state)


def torchrl_lanes(
    env: Any, kwargs: Mapping[str, Any] | None = None, limit: int | None = None, count: Key = STEP_COUNT
) -> Env:
    """Return a TorchRL env as lanes; with `limit`, episodes have at most that many steps, counted under `count`."""
    if kwargs:
        if not hasattr(env, "update_kwargs"):
            raise WrongState(
                f"create_env_kwargs {sorted(kwargs)} need a factory, but this {type(env).__name__} is an env that "
                f"is already built"
            )
        env.update_kwargs(dict(kwargs))
    inside, left = _gymnasium_lanes(env), None
    if inside is None and _is_parallel(env):
        from reap.envs.torchrl.parallel import NotTakenOver, parallel_lanes  # late: its imports lead back here

        try:
            inside = parallel_lanes(env)
        except NotTakenOver as reason:
            left = str(reason)
    if inside is not None:
        return inside if limit is None else StepLimit(inside, limit, count)
    return _lanes_for(env if limit is None else _limited(env, limit, count), left=left)


def torchrl_joined(parts: Sequence[TorchRLEnv]) -> Env:
    """Return single envs, already built, as the lanes of a SerialEnv, which steps them one after another."""
    from torchrl.envs import SerialEnv

    env = SerialEnv(len(parts), [lambda env=part.env: env for part in parts])
    return _lanes_for(env, torch.stack([part.root for part in parts]))  # each was reset already


def _lanes_for(env: Any, root: TensorDictBase | None = None, left: str | None = None) -> Env:
    """Return lanes for a TorchRL env: captured if possible, else stepped by TorchRL, as rows or as whole frames.

    `root`: the env's state, if it was reset already. `left`: why reap does not step what is inside, if that is known.
    """
    _ = env.output_spec  # before the reset: primers take their shapes from whichever comes first
    bases: list[Base] = []
    transformed: list[Any] = []
    if root is None and left is None:
        left = _find_bases(env, bases, transformed)
        if left is None and transformed:
            found = _captured(env, bases, transformed)
            if found is not None:
                return found
        for base in bases:
            if _is_parallel(base.env):
                base.lanes.close()  # TorchRL uses workers of its own then
    if root is None:
        root = env.reset()
    columns = torchrl_columns(env, root)
    made = TorchRLFrames(env, root) if columns is None else TorchRLRows(env, root, columns)
    made.left = left
    return made


def _captured(env: Any, bases: Sequence[Base], transformed: Sequence[Any]) -> Env | None:
    """Return the captured form of a transformed env; None if something it reports has no place in a row."""
    root = keeping_resets(bases, env.reset)
    columns = torchrl_columns(env, root)
    if columns is not None and "done" in columns.flags and not columns.ends:
        return CapturedRows(env, root, columns, bases, transformed)
    return None


def torchrl_cells(env: Env) -> Env:
    """Return an env with columns of texts and objects in place of whole frames, where these suffice; else `env`."""
    if not isinstance(env, TorchRLFrames) or env.spec.batched:
        return env
    columns = torchrl_columns(env.env, env.root, cells=True)
    return env if columns is None else TorchRLCells(env.env, env.root, columns)


def _find_bases(env: Any, bases: list[Base], transformed: list[Any]) -> str | None:
    """Collect the innermost envs and the transformed ones around them; return why reap cannot step them, or None."""
    from torchrl.envs import SerialEnv, TransformedEnv

    lanes = _gymnasium_lanes(env)
    if lanes is not None:
        bases.append(Base(env, lanes))
        return None
    if type(env) is TransformedEnv:
        transformed.append(env)
        return not_replayable([env.transform]) or _find_bases(env.base_env, bases, transformed)
    if type(env) is SerialEnv:
        parts = torchrl_internals.serial_envs(env)
        if not parts:
            return "this version of TorchRL does not show the envs of a SerialEnv"
        reasons = (_find_bases(one, bases, transformed) for one in parts)
        return next((reason for reason in reasons if reason is not None), None)
    if _is_parallel(env):
        return _find_parallel_base(env, bases, transformed)
    return f"{type(env).__name__} is not a Gymnasium env that reap can step itself"


def _find_parallel_base(env: Any, bases: list[Base], transformed: Sequence[Any]) -> str | None:
    """Take over the workers of a ParallelEnv below transforms; returns why that cannot be done, or None."""
    from reap.envs.torchrl.parallel import NotTakenOver, ParallelBase, parallel_lanes

    # The workers carry these from step to step, and would be sent what a transform on this side makes of them.
    carried = set(map(as_key, env.full_state_spec.keys(True, True)))
    around = [part for outer in transformed for part in outer.transform.modules() if hasattr(part, "out_keys")]
    written = {as_key(key) for part in around for key in _writes(part)}
    if carried & written:
        return (
            f"a transform around ParallelEnv writes {show_keys(sorted(carried & written))}, which its workers "
            f"keep as their own state"
        )
    try:
        lanes = parallel_lanes(env, below=True)
    except NotTakenOver as reason:
        return str(reason)
    bases.append(ParallelBase(env, lanes))
    return None


def _writes(transform: Any) -> Iterator[Any]:
    """Yield the keys that a transform may write: all that its attributes name, except those it only reads."""
    yield from transform.out_keys or ()  # some transforms compute them when they are read
    for name, value in vars(transform).items():
        if name not in torchrl_internals.READS:
            for key in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(key, (str, tuple)):
                    yield key


def _is_parallel(env: Any) -> bool:
    from torchrl.envs import ParallelEnv

    return type(env) is ParallelEnv


def _limited(env: Any, limit: int, count: Key) -> Any:
    """Return the env with episodes of at most `limit` steps, counted by TorchRL's StepCounter."""
    from torchrl.envs import StepCounter, TransformedEnv

    if count[0] in env.observation_spec.keys(True, True):
        raise UsageError("max_frames_per_traj adds 'step_count', which the env already has; leave one of them out")
    return TransformedEnv(env, StepCounter(max_steps=limit, step_count_key=count[0]))


class WrappedGym(OfTorchRL, GymLanes):
    """The Gymnasium envs inside a TorchRL env, stepped directly; `close` closes the outer env."""

    def __init__(self, outer: Any, envs: Sequence[gym.Env[Any, Any]], *, categorical: bool, batched: bool) -> None:
        super().__init__(envs, categorical=categorical, batched=batched, truncates=True)
        self.spec = replace(self.spec, look=replace(self.spec.look, contiguous=True))  # as from TorchRL's collectors
        self.outer = outer
        self._expected: Mapping[Key, Leaf] | None = None

    def joined(self, others: Sequence[GymLanes]) -> GymLanes:
        lanes = super().joined(others)
        lanes.spec = replace(lanes.spec, look=replace(lanes.spec.look, contiguous=True))
        return lanes

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        if action is self._expected:  # as in the last rollout, and not called by hand since
            return
        super().expect(action)
        self._expected = action

    def close(self) -> None:
        taken_back(self.outer)
        self.outer.close(raise_if_closed=False)


def _gymnasium_lanes(env: Any) -> Env | None:
    """Return lanes of the Gymnasium envs inside, if nothing is around them and their data would be the same."""
    from torchrl.envs import GymEnv, GymWrapper, SerialEnv

    one = type(env) in (GymEnv, GymWrapper)
    if one:
        inside = [env]
    elif type(env) is SerialEnv:
        if env.is_closed:
            env.start()
        inside = torchrl_internals.serial_envs(env)
    else:
        return None
    raw = [found for child in inside if (found := _plain_gymnasium(child, (GymEnv, GymWrapper))) is not None]
    if len(raw) < len(inside) or any(replaced(one, torchrl_internals.MOVES) for one in (env, *inside)):
        return None
    kinds = {torchrl_internals.takes_categories(child) for child in inside}
    categorical = kinds.pop() if len(kinds) == 1 else None
    if categorical is None:
        return None
    try:
        lanes = WrappedGym(env, raw, categorical=categorical, batched=not one)
    except UsageError:  # spaces only TorchRL can read, or envs that differ
        return None
    return lanes if looks_like(lanes.spec, env) else None


def _plain_gymnasium(env: Any, kinds: tuple[Any, ...]) -> gym.Env[Any, Any] | None:
    if type(env) not in kinds:
        return None
    inner = torchrl_internals.gymnasium_env(env)
    plain = (
        isinstance(inner, gym.Env)
        and not env.batch_size
        and not env.info_dict_reader
        and torchrl_internals.converts_actions(env)
        and (env.device is None or env.device.type == "cpu")
    )
    if not plain:
        return None
    skip = int(getattr(env, "frame_skip", 1) or 1)
    return FrameSkip(inner, skip) if skip > 1 else inner
