"""TorchRL's transformed envs without TorchRL's step: what transforms ask of torch is recorded once and replayed.

    row.outputs, root ──► inverse transforms ──► Gymnasium (reap's lanes) ──► transforms ──► row.next, rewards, flags
                          └───────────────────── one recorded function ──────────────┘           │
                                                                           next root  ◄──────────┘

The first step is TorchRL's own. Then `step`, with the innermost env's step as a foreign call in it, is captured (see
core/capture.py): the same torch calls on the transforms' own tensors, so the same numbers, and statistics that
`env.transform[0]` and its `state_dict` show as ever. Where an episode ends TorchRL resets, as it always does.

A transform that cannot be captured (its Python code looks at values, or steps the env by itself) leaves the env to
TorchRL's step; `why` says which it was. One that is changed between two rollouts is recorded again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from reap.core.as_policy import untouched
from reap.core.capture import Captured, NotCaptured, foreign
from reap.core.env import Env
from reap.core.policy import Policy, TensorDictPolicy
from reap.core.slot import FLAGS, Row
from reap.envs.torchrl_rows import Columns, TorchRLRows
from reap.errors import ReapError, WorkerRaised
from reap.spec import Key, Leaf, as_key

_TRIES = 3  # recordings in a row that did not last a rollout, before it is given up


class Base:
    """The innermost env, stepped by reap: called by the recorded step in place of its TorchRL `_step`."""

    def __init__(self, env: Any, lanes: Env) -> None:
        self.env, self.lanes = env, lanes
        self.size = tuple(env.batch_size)
        self.keys: list[Any] = []  # of what its step returns
        self.stepped: list[Tensor] = []  # what TorchRL's own step returned last, by these keys
        self.given: Sequence[Tensor] = ()  # what is returned in place of a step, while it is recorded and compared
        self.asked: Sequence[Tensor] = ()  # the actions of the last step that was recorded
        self._rows: list[tuple[Row, tuple[Tensor, ...]]] = []
        self._turn = 0
        self.locks: Sequence[Any] = ()
        self.fresh = False  # whether each step's results need memory of their own

    def watched(self, td: TensorDictBase) -> TensorDictBase:
        """TorchRL's own step, whose results are kept for the recording."""
        result: TensorDictBase = type(self.env)._step(self.env, td)
        self.keys = sorted(result.keys(True, True), key=str)
        self.stepped = [result.get(key).clone() for key in self.keys]
        return result

    def stand_in(self, td: TensorDictBase) -> TensorDictBase:
        """`given`, as TorchRL's step would return it; noted as a call of `step`."""
        self.asked = [td.get(key) for key in self.env.action_keys]
        made = foreign(self.step, self.asked, lambda: [value.clone() for value in self.given])
        result = TensorDict({}, batch_size=td.batch_size, device=self.env.device)
        for key, value in zip(self.keys, made):
            result.set(key, value)
        return result

    def prepare(self) -> None:
        """Make room for a step's results, twice: the last one's are still looked at when the next are written."""
        spec, dims = self.lanes.spec, len(self.size)
        keys = [as_key(key) for key in self.env.action_keys]
        self.lanes.expect({key: Leaf(tuple(a.shape[dims:]), a.dtype) for key, a in zip(keys, self.asked)})
        self._rows = []
        for _ in range(2):
            row = Row()
            row.next = tuple(leaf.column(spec.lanes) for leaf in spec.observation.values())
            row.rewards = tuple(leaf.column(spec.lanes) for leaf in spec.reward.values())
            row.reward = row.rewards[0][:, 0]
            flags = {flag: np.zeros((spec.lanes, 1), bool) for flag in FLAGS}
            row.done, row.terminated, row.truncated = (flags[f][:, 0] for f in ("done", "terminated", "truncated"))
            arrays: dict[Key, Any] = dict(zip((*spec.observation, *spec.reward), (*row.next, *row.rewards)))
            arrays.update({(flag,): array for flag, array in flags.items()})
            tensors = [torch.from_numpy(arrays[as_key(key)]) for key in self.keys]
            results = tuple(t.reshape(*self.size, *t.shape[1:]) for t in tensors)
            if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in self.stepped]:
                raise NotCaptured(f"TorchRL's {type(self.env).__name__} returns other shapes or types than its env")
            self._rows.append((row, results))

    def step(self, *actions: Tensor) -> tuple[Tensor, ...]:
        """One step of all lanes. What is returned is written over by the next step but one."""
        if self.given:
            return tuple(value.clone() for value in self.given)
        self._turn ^= 1
        row, results = self._rows[self._turn]
        row.done[:] = row.terminated[:] = row.truncated[:] = False
        lanes, dims = self.lanes.spec.lanes, len(self.size)
        row.action = tuple([a.numpy().reshape(lanes, *a.shape[dims:]) for a in actions])
        for lock in self.locks:  # others may use shared statistics while this env computes
            lock.release()
        try:
            self.lanes.step(range(lanes), row)
        finally:
            for lock in self.locks:
                lock.acquire()
        return tuple([t.clone() for t in results]) if self.fresh else results


class CapturedRows(TorchRLRows):
    """A transformed env over `bases`, whose step is captured after the first."""

    def __init__(
        self, env: Any, root: TensorDictBase, columns: Columns, bases: Sequence[Base], transformed: Sequence[Any]
    ) -> None:
        self._leaves: Sequence[Tensor] | None = (
            None  # the root's values by `_root_keys`, where they are newer than `_root`
        )
        self._root_keys: list[Any] = []
        super().__init__(env, root, columns)
        self._bases, self._transformed = bases, transformed
        self._run: Callable[..., tuple[Any, ...]] | None = None
        self._captured: Captured | None = None
        self._tries = 0
        self.why: str | None = "it is captured after its first step"
        self._following: Sequence[Key] = ()

    @property
    def root(self) -> TensorDictBase:
        """What the policy sees next, as TorchRL has it."""
        if self._leaves is not None:
            root = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
            for key, value in zip(self._root_keys, self._leaves):
                root.set(key, value)
            self._root, self._leaves = root, None
        return self._root

    @root.setter
    def root(self, root: TensorDictBase) -> None:
        self._root, self._leaves = root, None

    def lend(self, policy: TensorDictPolicy) -> Policy:
        return policy if self.captures else super().lend(policy)

    def follow(self, outputs: Sequence[Key]) -> None:
        super().follow(outputs)
        if self._captured is not None and (tuple(outputs) != self._following or not self._rebound()):
            self._captured = self._run = None  # somebody changed a transform: it is recorded again
        self._following = tuple(outputs)

    def _rebound(self) -> bool:
        assert self._captured is not None
        if self._transforms() != self._relied_on or not self._captured.bind():
            return False
        for base in self._bases:
            base.prepare()  # somebody may have used the env by hand since
        self._run, self._tries = self._captured.run, 0
        return True

    def _transforms(self) -> list[Any]:
        return [env.transform for env in self._transformed]

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        if self._run is None:
            return self._torchrl_step(lanes, row)
        leaves = self._leaves
        if leaves is None:
            try:
                leaves = [self._root.get(key) for key in self._root_keys]
            except KeyError:
                leaves = [None]  # type: ignore[list-item]
            if any(value is None for value in leaves):
                return super().step(lanes, row)  # a reset dropped something: TorchRL knows what comes next
        outputs = [torch.from_numpy(array) for array in row.outputs]
        if self._copies:
            outputs = [value.clone() for value in outputs]
        given = [*leaves, *outputs]
        for lock in self._locks:
            lock.acquire()
        try:
            values = self._run(*[given[i] for i in self._used])
        except ReapError:
            raise
        except Exception as cause:
            raise WorkerRaised(f"env.step raised {cause!r}") from cause
        finally:
            for lock in self._locks:
                lock.release()
        for array, value in zip((*row.next, *row.rewards), values):
            array[...] = value.numpy().reshape(array.shape)
        done = values[self._flag_at["done"]].numpy()
        self._leaves = values[self._after_at : self._after_to]
        if not done.any():
            self._ended = []
            return self._ended
        try:
            self.root = self.env.maybe_reset(self.root)
        except ReapError:
            raise
        except Exception as cause:
            raise WorkerRaised(f"env.reset raised {cause!r}") from cause
        over = done.reshape(self.spec.lanes)
        row.done[:] = over
        for flag, column in (("terminated", row.terminated), ("truncated", row.truncated)):
            if flag in self._flag_at:
                column[:] = values[self._flag_at[flag]].numpy().reshape(self.spec.lanes)
        self._ended = np.flatnonzero(over).tolist()
        return self._ended

    def _torchrl_step(self, lanes: Sequence[int], row: Row) -> list[int]:
        """TorchRL's step, and the recording of the next ones."""
        if self._tries >= _TRIES or not self.captures:
            return super().step(lanes, row)
        before = self.root.copy()
        with _in_place_of_step({base: base.watched for base in self._bases}):
            ended = super().step(lanes, row)
        self._tries += 1
        try:
            self._capture(before, row)
            self.why = None
        except NotCaptured as reason:
            self.why, self._tries = str(reason), _TRIES
        except Exception as cause:  # whatever transforms make of a recording: TorchRL steps on
            self.why, self._tries = f"recording it raised {cause!r}", _TRIES
        return ended

    def _capture(self, before: TensorDictBase, row: Row) -> None:
        env, outputs = self.env, list(self._outputs)
        own = {as_key(key) for key in outputs}
        self._root_keys = [key for key in before.keys(True, True) if as_key(key) not in own]
        sizes = [len(base.stepped) for base in self._bases]
        observation, rewards = list(self.spec.observation), list(self.spec.reward)

        def step(*values: Tensor) -> list[Tensor]:
            td = TensorDict({}, batch_size=env.batch_size, device=env.device)
            for key, value in zip((*self._root_keys, *outputs), values):
                td.set(key, value)
            at = len(self._root_keys) + len(outputs)
            for base, size in zip(self._bases, sizes):
                base.given, at = values[at : at + size], at + size
            with _in_place_of_step({base: base.stand_in for base in self._bases}):
                stepped = env.step(td)
            next_ = stepped.get("next")
            root = env._step_mdp(stepped)
            if env._post_step_mdp_hooks is not None:
                stepped, root = env._post_step_mdp_hooks(stepped, root)
            found = [next_.get(key) for key in (*observation, *rewards)]
            found += [next_.get(flag) for flag in self._flags]
            found += [root.get(key) for key in self._root_keys]
            return [*found, *(action for base in self._bases for action in base.asked)]

        leaves = [before.get(key) for key in self._root_keys]
        acted = [torch.from_numpy(array.copy()) for array in row.outputs]
        first = [*leaves, *acted, *(value for base in self._bases for value in base.stepped)]
        transforms = self._transforms()
        with contextlib.ExitStack() as stack:
            for transform in transforms:
                stack.enter_context(untouched(transform))
            try:
                captured = Captured(transforms, step, [first, *(_varied(first, by) for by in (1, 2, 3))], writes=True)
            finally:
                for base in self._bases:
                    base.given = ()
        for base in self._bases:
            base.prepare()
        self._captured, self._run, self._relied_on = captured, captured.run, transforms
        self._used = captured.used
        flags_at = len(observation) + len(rewards)
        self._flag_at = {flag: flags_at + i for i, flag in enumerate(self._flags)}
        self._after_at = flags_at + len(self._flags)
        self._after_to = self._after_at + len(self._root_keys)
        # What a step leaves for the next in the memory of what it was given must be memory of its own.
        self._copies = any(captured.aliases[self._after_at : self._after_to])
        locks = {id(lock): lock for t in transforms for part in t.modules() if (lock := getattr(part, "lock", None))}
        self._locks = list(locks.values())
        for base in self._bases:
            base.locks, base.fresh = self._locks, self._copies


@contextlib.contextmanager
def _in_place_of_step(stand_ins: Mapping[Base, Callable[..., Any]]) -> Iterator[None]:
    """Let TorchRL's code call these in place of the `_step` of each base."""
    for base, stand_in in stand_ins.items():
        base.env.__dict__["_step"] = stand_in
    try:
        yield
    finally:
        for base in stand_ins:
            del base.env.__dict__["_step"]


def _varied(values: Sequence[Tensor], by: int) -> list[Tensor]:
    """Other values of the same kinds: a step that is captured must be the same for these."""
    varied = []
    for value in values:
        if value.dtype is torch.bool:
            varied.append(torch.rand(value.shape) < 0.5)
        elif value.dtype.is_floating_point:
            varied.append(value + by * torch.randn(value.shape, dtype=value.dtype))
        elif value.dtype is torch.uint8:
            varied.append(torch.randint_like(value, 256))
        else:  # a one-hot action stays one
            varied.append(value + by if value.numel() and int(value.max()) > 1 else value.clone())
    return varied
