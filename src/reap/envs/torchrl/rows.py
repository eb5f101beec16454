"""TorchRL's envs on slots: TorchRL steps, and its results are written into rows.

    row.outputs ──► root TensorDict ──► env.step_and_maybe_reset ──► next ──► row.next, row.rewards, flags
                         ▲                         │
                         └──────── next root ◄─────┘     (reset already, where something ended)

The root TensorDict is TorchRL's own, carried from step to step: stateless envs keep their state in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor, nn

from reap._foreign import torchrl_internals
from reap.core.columns.batch_columns import RESERVED
from reap.core.columns.object_columns import private_copy
from reap.core.env import Env, Rows
from reap.core.policies.as_policy import waits_for_spec
from reap.core.policy import Policy, TensorDictPolicy
from reap.core.resume import CannotResume
from reap.core.slot import FLAGS, Row
from reap.envs.torchrl.by_hand import handed_out, seeded_reset, taken_back
from reap.envs.torchrl.root_policy import RootPolicy
from reap.errors import SpecMismatch, raised_by, reraise
from reap.spec import BatchShape, EnvSpec, Key, Leaf, as_array, as_key, private, show


@dataclass(frozen=True)
class Columns:
    """The columns for all that a TorchRL env reports and takes."""

    observation: dict[Key, Leaf]
    action: dict[Key, Leaf]
    reward: dict[Key, Leaf]
    flags: tuple[str, ...]  # which of the usual three flags it has at its root
    ends: tuple[Key, ...]  # its other done keys, which are observations here
    inner: dict[Key, tuple[int, ...]]  # branches with more batch dimensions than the env, and those dimensions


def torchrl_columns(env: Any, root: TensorDictBase, *, cells: bool = False) -> Columns | None:
    """Return the columns of an env, or None if it reports something that has no fixed place in a row.

    `cells`: texts and objects get columns, too, of references.
    """
    if torchrl_internals.has_dynamic_specs(env):
        return None
    fake = env.fake_tensordict()
    dims = len(env.batch_size)
    found, begun = _leaves(fake, dims, cells), _leaves(root, dims, cells)
    if found is None or begun is None:
        return None
    leaves, inner = found
    before = {key: leaf for key, leaf in leaves.items() if key[0] != "next"}
    after = {key[1:]: leaf for key, leaf in leaves.items() if key[0] == "next"}
    flags = tuple(f for f in FLAGS if (f,) in after)
    if any(after[(f,)] != Leaf((1,), torch.bool) or (f,) not in before for f in flags):
        return None
    reward = [as_key(key) for key in env.reward_keys]
    action = [as_key(key) for key in env.action_keys]
    usual = {(f,) for f in flags}
    observation = {key: leaf for key, leaf in before.items() if key not in action and key not in usual}
    first = {key: leaf for key, leaf in begun[0].items() if key not in usual}
    whole = (
        observation.keys() == {key for key in after if key not in reward and key not in usual}
        and all(after[key] == leaf for key, leaf in observation.items())
        and {key for key in reward if key in after} == set(reward)
        and first == observation
        and not any(key[0] in RESERVED for key in observation)
    )
    given = [before[key] for key in action if key in before] + [after[key] for key in reward if key in after]
    if not whole or not reward or any(leaf.loose for leaf in given):
        return None
    ends = [as_key(key) for key in env.done_keys if as_key(key) not in usual]
    if ends and not all(after[key].dtype is torch.bool for key in ends):
        return None
    specs = env.full_action_spec_unbatched
    return Columns(
        observation,
        {key: replace(before[key], space=specs[key]) for key in action},
        {key: after[key] for key in reward},
        flags,
        tuple(ends),
        inner,
    )


def _leaves(td: TensorDictBase, dims: int, cells: bool) -> tuple[dict[Key, Leaf], dict[Key, tuple[int, ...]]] | None:
    """Return the leaves of a TensorDict without its first `dims` dimensions, and the branches with more batch
    dimensions than that; None if not all leaves are tensors.
    """
    leaves: dict[Key, Leaf] = {}
    inner: dict[Key, tuple[int, ...]] = {}

    def walk(branch: TensorDictBase, at: Key) -> bool:
        if type(branch) is not TensorDict:
            return False
        if len(branch.batch_size) > dims:
            inner[at] = tuple(branch.batch_size[dims:])
        for name in branch.keys():  # noqa: SIM118
            value, key = branch.get(name), (*at, name)
            if private(key):
                continue
            if cells and is_non_tensor(value):
                leaves[key] = Leaf((), None)
            elif isinstance(value, TensorDictBase):
                if not walk(value, key):
                    return False
            elif not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
                return False
            else:
                leaves[key] = Leaf(tuple(value.shape[dims:]), value.dtype)
        return True

    return (leaves, inner) if walk(td, ()) else None


def looks_like(spec: EnvSpec, env: Any) -> bool:
    """Return whether observations and actions have the shapes and dtypes that TorchRL's env reports."""
    fake: TensorDictBase = env.fake_tensordict().exclude("next", *FLAGS)
    dims = len(env.batch_size)
    theirs = {
        as_key(key): (tuple(value.shape[dims:]), value.dtype if isinstance(value, Tensor) else None)
        for key, value in fake.items(True, True)
    }
    return theirs == {key: (leaf.shape, leaf.dtype) for key, leaf in {**spec.observation, **spec.action}.items()}


def give_spec(model: Any, env: Any) -> None:
    """Give the env's action spec to exploration modules and random policies that were made without one."""
    if waits_for_spec(model):
        model.set_action_spec_from_env(env)
    for part in model.modules() if isinstance(model, nn.Module) else ():
        if torchrl_internals.lacks_spec(part):
            part.spec = env.full_action_spec if len(env.action_keys) > 1 else env.action_spec


class OfTorchRL(Env):
    """What all lanes of TorchRL envs have in common, whether reap or TorchRL steps them; `outer` is the user's env."""

    outer: Any

    @property
    def as_given(self) -> Any:
        return handed_out(self.outer, self)

    def bind_policy(self, model: Any) -> None:
        give_spec(model, self.outer)

    def why_not_rebuilt(self) -> str:
        return (
            "TorchRL's env object cannot replace one of its inner envs; give the factories to "
            "reap.envs.ParallelEnv(on_failure=) or SerialEnv"
        )


class TorchRLEnv(OfTorchRL):
    """What envs that TorchRL steps have in common, as rows or as frames: root, resets, seeds, state."""

    draws = True
    left: str | None = None  # why the env is left to TorchRL, where that is known

    def __init__(self, env: Any, root: TensorDictBase, spec: EnvSpec) -> None:
        self.env = self.outer = env
        self.root, self.spec = root, spec
        self.unseen = True  # whether the root comes from a reset that no rollout has used yet
        self._ended: list[int] = []  # lanes that TorchRL has reset by itself in the last step

    def moved_to(self, root: TensorDictBase) -> None:
        """Continue from `root`: the user has moved the env there by TorchRL's own methods."""
        self.root, self.unseen, self._ended = root, False, []

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes in TorchRL's env, so that paths like `env.transform[0]` work as they do there."""
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Start new episodes in `lanes`, unless TorchRL has started them already."""
        whole, driver = len(lanes) == self.spec.lanes, self.driver
        try:
            if seeds is not None:
                self.root = seeded_reset(self.env, int(seeds[0]), static=len(seeds) > 1 and seeds[0] == seeds[1])
            elif not (self.unseen and whole) and not (isinstance(lanes, list) and lanes == self._ended):
                self.root = self.env.reset() if whole else self.env.reset(self._marked(lanes))
        except Exception as cause:
            raise raised_by("env.reset raised", cause) from cause
        self.unseen, self._ended, self.driver = False, [], driver  # moved here, not by hand

    def _marked(self, lanes: Sequence[int]) -> TensorDictBase:
        """Return the root with TorchRL's reset marks for `lanes`."""
        chosen = torch.zeros(self.spec.lanes, dtype=torch.bool)
        chosen[list(lanes)] = True
        size = self.env.batch_size
        root = self.root.copy()
        for done, mark in zip(self.env.done_keys_groups, self.env.reset_keys):
            like = self.root.get(done[0])
            marks = chosen.reshape(*size, *[1] * (like.ndim - len(size)))
            root.set(mark, marks.expand(like.shape).clone().to(like.device))
        return root

    def ended(self, next_: TensorDictBase) -> np.ndarray[Any, Any]:
        """Return which lanes' episodes are over: by the root's done flag, or else by any done flag in the lane."""
        keys = [("done",)] if ("done",) in self._done_keys else self._done_keys
        flags = [next_.get(key).reshape(self.spec.lanes, -1).any(-1) for key in keys]
        return torch.stack(flags).any(0).numpy(force=True)

    @property
    def _done_keys(self) -> list[Key]:
        return [as_key(key) for key in self.env.done_keys]

    def explain(self) -> str:
        return "TorchRL steps it" if self.left is None else f"TorchRL steps it: {self.left}"

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        pass

    def close(self) -> None:
        taken_back(self.env)
        self.env.close(raise_if_closed=False)

    def open_state(self) -> Any:
        raise CannotResume(f"{self.explain()}; the unfinished episode of a {type(self.env).__name__} cannot be saved")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.env.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.env.load_state_dict(state)


class TorchRLRows(TorchRLEnv):
    """A TorchRL env whose values all have a place in a row."""

    def __init__(self, env: Any, root: TensorDictBase, columns: Columns) -> None:
        size = tuple(env.batch_size)
        lanes = int(np.prod(size, dtype=np.int64))
        hidden = {(f,) for f in FLAGS if f not in columns.flags}
        look = BatchShape(
            dims=size if len(size) > 1 else None,
            hidden=frozenset(hidden | {("next", *key) for key in hidden}),
            inner=columns.inner,
            contiguous=True,
        )
        spec = EnvSpec(
            observation=columns.observation,
            action=columns.action,
            lanes=lanes,
            batched=bool(size),
            reward=columns.reward,
            single_steps=False,
            look=look,
            primed=frozenset(columns.observation) - frozenset(columns.ends),
        )
        super().__init__(env, root, spec)
        self.has_after_step = bool(columns.ends)
        self._flags, self._ends = columns.flags, columns.ends
        self._usual = "done" in columns.flags
        self._reads = [(key, torch.Size((*size, *leaf.shape))) for key, leaf in columns.observation.items()]
        self._rewards = [(key, torch.Size((*size, *leaf.shape))) for key, leaf in columns.reward.items()]
        self._outputs: Sequence[Key] = tuple(columns.action)
        self._began = False
        self.decided = False  # whether the root holds the actions already, from a RootPolicy or `draw`

    def wrap_policy(self, policy: TensorDictPolicy) -> Policy:
        here = all(isinstance(value, Tensor) and value.device.type == "cpu" for value in self.root.values(True, True))
        # An env with its own way from root to root (ParallelEnv) drops what the policy wrote into it.
        kept = type(self.env).step_and_maybe_reset.__qualname__ == "EnvBase.step_and_maybe_reset"
        seen = policy.device is None and policy.shown in (None, self.root.device)
        return RootPolicy(policy, self) if here and kept and seen else policy

    def outputs_read(self, outputs: Collection[Key]) -> Collection[Key]:
        return outputs  # its transforms may read anything

    def set_policy_keys(self, outputs: Sequence[Key]) -> None:
        self.decided = False
        self._outputs = [key if len(key) > 1 else key[0] for key in outputs]  # type: ignore[misc]

    def draw(self, row: Row) -> None:
        self.root = self.env.rand_action(self.root)
        for key, array in zip(self.spec.action, row.action):
            array[...] = as_array(self.root.get(key)).reshape(array.shape)
        self.decided = True  # the root holds the action; no policy has written other outputs

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self.begin(lanes, seeds)
        self._show(self.root, into, list(lanes))

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        root = self.root
        try:
            if self.decided:
                self.decided = False
            else:
                for key, array in zip(self._outputs, row.outputs):
                    root.set(key, torch.from_numpy(array.copy()))
            stepped, self.root = self.env.step_and_maybe_reset(root)
            reached = stepped.get("next")
        except Exception as cause:
            reraise("env.step", cause)
        self._show(reached, row.next)
        for (key, shape), array in zip(self._rewards, row.rewards):
            array[...] = self._fit(key, reached.get(key), shape).reshape(array.shape)
        if not self._usual:
            self._began = bool(any(reached.get(key).any() for key in self._ends))
            over = self.ended(reached) if self._began else None
        else:
            done = reached.get("done").numpy(force=True)
            over = done.reshape(self.spec.lanes) if done.any() else None
            if self._ends:
                self._began = over is not None or any(bool(reached.get(key).any()) for key in self._ends)
        if over is None or not over.any():
            self._ended = []
            return self._ended
        row.done[:] = over
        for flag, column in (("terminated", row.terminated), ("truncated", row.truncated)):
            if flag in self._flags:
                column[:] = reached.get(flag).numpy(force=True).reshape(self.spec.lanes)
        self._ended = np.flatnonzero(over).tolist()
        return self._ended

    def after_step(self, row: Row) -> None:
        """Show the root where an agent may have been reset while its lane goes on."""
        if self._began:
            self._show(self.root, row.after)

    def _show(self, td: TensorDictBase, into: Rows, lanes: list[int] | None = None) -> None:
        for (key, shape), array in zip(self._reads, into):
            value = self._fit(key, td.get(key), shape).reshape(array.shape)
            if lanes is None:
                array[...] = value
            else:
                array[lanes] = value[lanes]

    def _fit(self, key: Key, value: Any, shape: torch.Size) -> np.ndarray[Any, Any]:
        if value is None or value.shape != shape:
            got = "nothing" if value is None else list(value.shape)
            raise SpecMismatch(f"env returned {got} as {show(key)}, its spec says {list(shape)}")
        return as_array(value)


class TorchRLCells(TorchRLRows):
    """A single TorchRL env with texts or objects among its observations: their columns hold references."""

    def __init__(self, env: Any, root: TensorDictBase, columns: Columns) -> None:
        super().__init__(env, root, columns)
        self._cells = {key for key, leaf in columns.observation.items() if leaf.loose}

    def _fit(self, key: Key, value: Any, shape: torch.Size) -> np.ndarray[Any, Any]:
        if key not in self._cells:
            return super()._fit(key, value, shape)
        cell = np.full(1, None, object)
        cell[0] = private_copy(value.data if is_non_tensor(value) else value)
        return cell
