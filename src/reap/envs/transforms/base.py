"""Transforms: change observations and rewards between an env and the policy, for all lanes at once.

    env ── step ──► row of raw values ──► transform ──► … ──► row of the slot: what the policy sees and a batch holds

A `Transform` holds the settings; its `around(env)` returns a `TransformLanes`, an env that applies it. The inner env
writes a leaf that keeps its shape and dtype straight into the slot's row, where it is changed in place, and every other
leaf into separate memory first.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap.core.env import Env, Rows
from reap.core.measuring.moments import RunningStatistics
from reap.core.slot import Layout, Row, Slot
from reap.core.wrapped import Wrapped
from reap.envs.accept import as_env
from reap.envs.base import EnvBase
from reap.envs.torchrl.lanes import is_torchrl
from reap.errors import SpecMismatch, UsageError, WrongArgument
from reap.spec import AnyKey, EnvSpec, Key, Leaf, as_key, show, show_keys

Array = np.ndarray[Any, Any]


class Transform(abc.ABC):
    """The description of a change to an env's values. It can be used for several envs, and is sent to workers."""

    @abc.abstractmethod
    def around(self, env: Env) -> Env:
        """Return an env that steps `env` and applies this transform."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({settings})"


class TransformedEnv(EnvBase):
    """An env with transforms around it, applied in the order in which they are given.

    >>> env = TransformedEnv(SerialEnv(4, "CartPole-v1"), NormalizeObservation(), ScaleReward(0.1))
    >>> env.rollout(3)["observation"].shape
    torch.Size([4, 3, 4])

    Args:
        env: anything a collector accepts: one of reap's envs, a Gymnasium env or id, a vector env. If it has several
            lanes, transforms work on all of them at once.
        *transforms: transforms from `reap.envs.transforms`, the one nearest to the env first; or one list of them.
    """

    def __init__(self, env: Any, *transforms: Any, device: Any = None) -> None:
        if len(transforms) == 1 and isinstance(transforms[0], (list, tuple)):
            transforms = tuple(transforms[0])
        wrong = [one for one in transforms if not isinstance(one, Transform)]
        if wrong:
            raise WrongArgument(f"transforms must be instances of classes in reap.envs.transforms, got {wrong[0]!r}")
        if is_torchrl(env):
            raise UsageError(
                "a TorchRL env takes TorchRL's own transforms, which reap runs: torchrl.envs.TransformedEnv(env, …)"
            )
        self.transforms = transforms
        lanes = as_env(env)
        try:
            for one in transforms:
                lanes = one.around(lanes)
        except BaseException:
            lanes.close()
            raise
        super().__init__(lanes, device=device)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of the transforms and the state of the env itself."""
        return self.lanes_env.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.lanes_env.load_state_dict(state)


class TransformLanes(Wrapped):
    """An env around another that changes the other's values.

    `changed` holds the new leaves of the observations it changes, `added` the leaves it adds. `_converted` holds the
    indices of changed leaves with another shape or dtype. Each gets memory of its own, `_raw[index]`, into which the
    inner env writes; a subclass with `_needs_memory = False` gives the inner env other arrays (`_inner_arrays`).
    """

    _needs_memory = True

    def __init__(
        self,
        env: Env,
        name: str,
        *,
        changed: Mapping[Key, Leaf] | None = None,
        added: Mapping[Key, Leaf] | None = None,
    ) -> None:
        spec = env.spec
        if spec.ready_of is not None:
            raise UsageError(
                f"{name} needs lanes that step together, but these are asynchronous: wrap each env of the pool, "
                f"TransformedEnv(env, {name}(…))"
            )
        clash = [key for key in added or {} if key in spec.observation]
        if clash:
            raise UsageError(f"{name} adds {show(clash[0])}, which the env has already; give it another key")
        own = spec.observation
        new = {key: (changed or {}).get(key, leaf) for key, leaf in own.items()} | dict(added or {})
        side = spec.side | (added or {}).keys()
        super().__init__(env, dataclasses.replace(spec, observation=new, side=side))
        self._name, self._inner_leaves = name, len(own)
        both = [(leaf, new[key]) for key, leaf in own.items()]
        self._converted = [at for at, (a, b) in enumerate(both) if (a.shape, a.dtype) != (b.shape, b.dtype)]
        separate = self._converted if self._needs_memory else ()
        self._raw: dict[int, Array] = {at: both[at][0].column(spec.lanes) for at in separate}
        self._inner_row = Row()
        self._inner_row.copies, self._inner_row.place, self._inner_row.narrow = (), None, {}

    def joined(self, others: Sequence[Any]) -> Env:
        """Refuse: transforms of single envs would not work on all lanes at once."""
        raise UsageError(
            f"envs with transforms cannot be joined; put the transforms around the lanes: "
            f"TransformedEnv(SerialEnv(n, make_env), {self._name}(…))"
        )

    def make_slot(self, layout: Layout, index: int) -> Slot:
        """Return a slot the inner env can write to directly only if both have the same leaves, else a plain one."""
        same = not self._converted and self.spec.observation.keys() == self._env.spec.observation.keys()
        return self._env.make_slot(layout, index) if same else Slot(layout, index)

    def _inner_arrays(self, arrays: Rows) -> list[Array]:
        """Return the arrays that the inner env writes its leaves into."""
        return [self._raw.get(at, array) for at, array in enumerate(arrays[: self._inner_leaves])]

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        inner = self._inner_arrays(into)
        self._env.reset(lanes, inner, seeds)
        self._on_reset(list(lanes), inner, into)

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        if not self._converted:
            ended = self._env.step(lanes, row)
            return self._on_step(lanes, row.next, row, ended)
        inner = self._inner_row
        inner.inputs, inner.outputs, inner.action, inner.after = row.inputs, row.outputs, row.action, row.after
        inner.rewards, inner.reward, inner.mask = row.rewards, row.reward, row.mask
        inner.terminated, inner.truncated, inner.done = row.terminated, row.truncated, row.done
        inner.next = tuple(self._inner_arrays(row.next))
        ended = self._env.step(lanes, inner)
        return self._on_step(lanes, inner.next, row, ended)

    def _on_reset(self, lanes: list[int], raw: Rows, into: Rows) -> None:
        """Called after a reset of these lanes: turn their observations in `raw` into those in `into`."""

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        """Called after a step: turn the lanes' successors in `raw` into those in `row.next`. Return the ended lanes."""
        return ended

    def _frame_lanes(self, lanes: Sequence[int], row: Row) -> Any:
        """Return the lanes that made a frame in this step, as an index into columns."""
        if row.mask is not None:
            return [lane for lane in lanes if row.mask[lane]]
        return slice(None) if len(lanes) == self.spec.lanes else list(lanes)

    # ---- state ----------------------------------------------------------------------------------------------------

    def _statistics_state(self) -> dict[str, Any]:
        """Return the statistics learned from all lanes, for `state_dict`."""
        return {}

    def _load_statistics(self, state: Mapping[str, Any]) -> None:
        """Load what `_statistics_state` returned."""

    def _lane_arrays(self) -> dict[str, Array]:
        """Return the transform's memory of each lane's open episode, as arrays `[N, …]`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"transform": self._name, "learned": self._statistics_state(), "env": self._env.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        if state.get("transform") != self._name:
            raise UsageError(f"the saved state belongs to {state.get('transform')}, but this is {self._name}")
        self._load_statistics(state["learned"])
        self._env.load_state_dict(state["env"])

    def open_state(self) -> Any:
        kept = {name: torch.from_numpy(array.copy()) for name, array in self._lane_arrays().items()}
        return {"env": self._env.open_state(), "lanes": kept}

    def load_open_state(self, state: Any) -> None:
        self._env.load_open_state(state["env"])
        for name, array in self._lane_arrays().items():
            array[...] = state["lanes"][name].numpy()

    def lane_state(self, lane: int) -> Any:
        kept = {name: torch.from_numpy(array[lane : lane + 1].copy()) for name, array in self._lane_arrays().items()}
        return {"env": self._env.lane_state(lane), "lanes": kept}

    def load_lane_state(self, lane: int, state: Any) -> None:
        self._env.load_lane_state(lane, state["env"])
        for name, array in self._lane_arrays().items():
            array[lane] = state["lanes"][name].numpy()[0]


class LearningLanes(TransformLanes):
    """A transform with running statistics that are shared among all workers."""

    def __init__(
        self, env: Env, name: str, statistics: Sequence[RunningStatistics], *, training: bool, **more: Any
    ) -> None:
        super().__init__(env, name, **more)
        self._statistics, self._training = statistics, training

    def running_statistics(self) -> Sequence[RunningStatistics]:
        return [*self._env.running_statistics(), *(self._statistics if self._training else ())]

    def _statistics_state(self) -> dict[str, Any]:
        return {str(at): one.state() for at, one in enumerate(self._statistics)}

    def _load_statistics(self, state: Mapping[str, Any]) -> None:
        for at, one in enumerate(self._statistics):
            one.load(state[str(at)])


def chosen_keys(name: str, keys: Collection[AnyKey] | AnyKey | None, spec: EnvSpec) -> list[Key]:
    """Return the observations a transform applies to: those named, or all tensors except counters and infos."""
    if keys is None:
        found = [key for key, leaf in spec.observation.items() if key not in spec.side and not leaf.loose]
    else:
        named = [keys] if isinstance(keys, str) or (isinstance(keys, tuple) and keys in spec.observation) else keys
        found = [as_key(key) for key in named]
        absent = [key for key in found if key not in spec.observation]
        if absent:
            raise SpecMismatch(
                f"{name}: keys contains {show(absent[0])}, which is not an observation; the env has "
                f"{show_keys(spec.observation)}"
            )
    stacked = [key for key in found if spec.observation[key].once]
    if stacked:
        raise SpecMismatch(f"{name}: {show(stacked[0])} is stacked already; put FrameStack last")
    loose = [key for key in found if spec.observation[key].loose]
    if loose or not found:
        what = f"{show(loose[0])} has no fixed shape" if loose else "the env has no observation that is a tensor"
        raise SpecMismatch(f"{name}: {what}")
    return found


def float_leaf(leaf: Leaf) -> Leaf:
    """Return a floating-point leaf of the same shape without bounds: float32 unless NumPy has its float dtype."""
    floats = leaf.dtype is not None and leaf.dtype.is_floating_point and leaf.dtype is not torch.bfloat16
    return Leaf(leaf.shape, leaf.dtype if floats else torch.float32)
