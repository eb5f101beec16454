"""Envs written in torch: they step many lanes at once, on any device, with tensors as inputs and outputs.

The protocol is three members and two calls:

    class MyEnv:
        num_envs = 4096
        single_observation_space, single_action_space = …   # Gymnasium spaces: what one lane sees and takes
        def reset(self, mask): …         # bool [N] → observations [N, …]; only masked lanes are reset
        def step(self, action): …        # → observation, reward, terminated, truncated, each [N, …]

The env never resets by itself: `step` returns the true successor, and the loop resets the lanes that ended.
Observations are tensors, or dicts of them as the space says. `seed(int)` is called if the env has it. An env with the
attribute `keeps_nothing = True` receives the original actions and masks, not copies that it may keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import torch
from torch import Tensor

from reap._foreign import torch_internals
from reap.core.device.device_env import DeviceEnv
from reap.core.env import Env, Rows
from reap.core.resume import CannotResume, has_own_state, packed, unpacked
from reap.core.slot import Row
from reap.envs.base import EnvBase
from reap.envs.spaces import Actions, Observations
from reap.errors import SpecMismatch, UsageError, WrongArgument, raised_by, reraise
from reap.spec import EnvSpec, Key, Leaf, show


@runtime_checkable
class TorchBatch(Protocol):
    """The protocol of an env that `TorchEnv` accepts; see the module's docstring."""

    @property
    def num_envs(self) -> int:
        """The number of lanes."""

    @property
    def single_observation_space(self) -> gym.Space[Any]:
        """The space of one lane's observation."""

    @property
    def single_action_space(self) -> gym.Space[Any]:
        """The space of one lane's action."""

    def reset(self, mask: Tensor) -> Any:
        """Begin new episodes where `mask` is True. Return observations of all lanes; the other lanes' are not read."""

    def step(self, action: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Step every lane, and return observation, reward, terminated and truncated."""


class TorchLanes(Env):
    """A batch of torch envs as lanes."""

    def __init__(self, env: TorchBatch, *, categorical: bool = True) -> None:
        self.env = env
        self._count = int(env.num_envs)
        self._device = torch.device(getattr(env, "device", "cpu"))
        self._observations = Observations(env.single_observation_space, categorical=categorical)
        self._actions = Actions(env.single_action_space, categorical=categorical)
        if len(self._actions.leaves) != 1:
            raise UsageError("a torch env takes one action tensor; join the parts of its action space into one")
        self.spec = EnvSpec(
            observation=self._observations.leaves,
            action=self._actions.leaves,
            lanes=self._count,
            batched=True,
            single_steps=False,
        )
        self._takes_argmax, self._start = False, 0
        self.keeps_nothing = bool(getattr(env, "keeps_nothing", False))  # whether actions and masks need no copy

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        (given,) = action.values()
        ((key, own),) = self.spec.action.items()
        self._actions.decoder(action, batch=True)  # refuses actions that cannot be read
        discrete = isinstance(own.space, gym.spaces.Discrete)
        self._takes_argmax = discrete and given.shape not in ((), (1,))
        self._start = int(own.space.start) if isinstance(own.space, gym.spaces.Discrete) else 0
        if not discrete and given.shape != own.shape:
            raise SpecMismatch(f"policy writes {show(key)} as {given}, the env takes {own}")

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self.seed(lanes, seeds)
        chosen = torch.as_tensor(list(lanes))
        mask = torch.zeros(self._count, dtype=torch.bool)
        mask[chosen] = True
        try:
            observation = self.env.reset(mask.to(self._device))
        except Exception as cause:
            raise raised_by("env.reset raised", cause) from cause
        for array, (key, value) in zip(into, self._tensors(observation)):
            torch.from_numpy(array)[chosen] = self._fit(key, value)[chosen.to(value.device)].to("cpu")

    def seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Seed the env, if it has `seed`, with one number for all lanes."""
        if seeds is not None and hasattr(self.env, "seed"):
            self.env.seed(int(seeds[0]))

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        returned: Any = _NOTHING
        try:
            action = self.decoded(torch.from_numpy(row.action[0]).to(self._device))
            returned = self.env.step(action)
            observation, reward, terminated, truncated = returned
            for array, (key, value) in zip(row.next, self._tensors(observation)):
                torch.from_numpy(array).copy_(self._fit(key, value))
            torch.from_numpy(row.reward).copy_(reward.reshape(self._count))
            done: Tensor = (terminated | truncated).reshape(self._count)
            if not bool(done.any()):
                return []
            torch.from_numpy(row.terminated).copy_(terminated.reshape(self._count))
            torch.from_numpy(row.truncated).copy_(truncated.reshape(self._count))
        except Exception as cause:
            self.check_returned(returned)
            reraise("env.step", cause)
        torch.from_numpy(row.done).copy_(done)
        return done.nonzero().reshape(-1).tolist()

    def decoded(self, action: Tensor) -> Tensor:
        """Return the action in the form the env takes. It is a copy, unless the env has `keeps_nothing`."""
        if self._takes_argmax:
            action = action.argmax(-1)
        if self._start:
            return action + self._start
        return action if self.keeps_nothing else action.clone()

    def open_state(self) -> Any:
        return saved_tensors(self.env)

    def load_open_state(self, state: Any) -> None:
        restore_tensors(self.env, state)

    def on_device(self) -> DeviceEnv | None:
        return None if self._device.type == "cpu" else DeviceTorchLanes(self)

    def check_returned(self, returned: Any) -> None:
        """Raise SpecMismatch if the result of `env.step` is malformed; it says what was returned and what should be."""
        if returned is _NOTHING:
            return
        wanted = f"(observation, reward, terminated, truncated), tensors of {self._count} lanes, both flags bool"
        if not isinstance(returned, (tuple, list)) or len(returned) != 4:
            got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {type(returned).__name__}"
            raise SpecMismatch(f"env.step must return {wanted}; it returned {got}")
        for name, value in zip(("reward", "terminated", "truncated"), returned[1:]):
            tensor = isinstance(value, Tensor)
            if tensor and value.numel() == self._count and (name == "reward" or not value.is_floating_point()):
                continue
            got = _describe(value) if tensor else f"a {type(value).__name__}"
            raise SpecMismatch(f"env.step must return {wanted}; it returned {name} as {got}")

    def _tensors(self, observation: Any) -> list[tuple[Key, Tensor]]:
        found = []
        for key, path in zip(self.spec.observation, self._observations.paths):
            value = observation
            try:
                for part in path:
                    value = value[part]
            except (KeyError, IndexError, TypeError):
                raise SpecMismatch(f"env returned no {show(key)}, which its observation space has") from None
            found.append((key, value))
        return found

    def _fit(self, key: Key, value: Tensor) -> Tensor:
        leaf = self.spec.observation[key]
        if not isinstance(value, Tensor):
            raise SpecMismatch(f"env returned {show(key)} as a {type(value).__name__}, not as a tensor")
        if tuple(value.shape) != (self._count, *leaf.shape) or value.dtype is not leaf.dtype:
            got = _describe(value)
            raise SpecMismatch(
                f"env returned {show(key)} as {got}, its space says {leaf} for each of {self._count} lanes"
            )
        return value

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


_NOTHING = object()  # `env.step` has not returned


class DeviceTorchLanes(DeviceEnv):
    """The lanes of `TorchLanes`, with rows on their device: observations and actions are never copied to the host."""

    def __init__(self, lanes: TorchLanes) -> None:
        super().__init__(lanes, lanes.spec, lanes._device, [lanes.env])
        self._lanes = lanes

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self._lanes.seed(lanes, seeds)
        mask = torch.ones(self.spec.lanes, dtype=torch.bool, device=self.device)
        if len(lanes) < self.spec.lanes:
            mask.zero_()
            mask[torch.as_tensor(list(lanes), device=self.device)] = True
        self._begin(mask, into, into)

    def _begin(self, mask: Tensor, others: Sequence[Any], into: Sequence[Any]) -> None:
        """Reset the lanes in `mask`; write their first observations to `into`, and for the other lanes `others`."""
        try:
            observation = self._lanes.env.reset(mask)
        except Exception as cause:
            raise raised_by("env.reset raised", cause) from cause
        for column, other, (key, value) in zip(into, others, self._lanes._tensors(observation)):
            where = mask.reshape(-1, *[1] * (column.ndim - 1))
            torch.where(where, self._lanes._fit(key, value), other, out=column)

    def step(self, lanes: Sequence[int], row: Any) -> list[int]:
        count = self.spec.lanes
        returned: Any = _NOTHING
        try:
            returned = self._lanes.env.step(self._lanes.decoded(row.action[0]))
            observation, reward, terminated, truncated = returned
            made = [self._lanes._fit(key, value) for key, value in self._lanes._tensors(observation)]
            into = [*row.next[: len(made)], row.reward, row.terminated, row.truncated]  # wrappers may add leaves
            flags = (reward.reshape(count), terminated.reshape(count), truncated.reshape(count))
            torch_internals.copy_all(into, [*made, *flags])
        except Exception as cause:
            self._lanes.check_returned(returned)
            reraise("env.step", cause)
        torch.logical_or(row.terminated, row.truncated, out=row.done)
        return []

    def after_step(self, row: Any) -> None:
        self._begin(row.done if self._lanes.keeps_nothing else row.done.clone(), row.next, row.after)


def saved_tensors(env: Any) -> Any:
    """Return a torch env's state: that of its own `get_state`, else its tensors, generators, numbers and strings."""
    if has_own_state(env):
        return {"own": packed(env.get_state())}
    kept: dict[str, Any] = {}
    for name, value in vars(env).items():
        if isinstance(value, Tensor):
            kept[name] = value.detach().cpu().clone()
        elif isinstance(value, torch.Generator):
            kept[name] = value.get_state()
        elif isinstance(value, (int, float, str)) or value is None:
            kept[name] = value
        elif not (callable(value) or isinstance(value, _NO_STATE)):
            raise CannotResume(
                f"{type(env).__name__}.{name} is a {type(value).__name__}, which may be part of its state; "
                f"implement get_state() and set_state(state) so that its episodes can be resumed"
            )
    return {"tensors": kept}


def restore_tensors(env: Any, state: Mapping[str, Any]) -> None:
    """Restore what `saved_tensors` returned. A tensor of the same shape is overwritten in place."""
    if "own" in state:
        env.set_state(unpacked(state["own"]))
        return
    for name, value in state["tensors"].items():
        mine = vars(env).get(name)
        if isinstance(mine, torch.Generator):
            mine.set_state(value)
        elif isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape:
            mine.copy_(value)
        elif isinstance(value, Tensor):
            setattr(env, name, value.to(getattr(env, "device", "cpu")))
        else:
            setattr(env, name, value)


_NO_STATE = (gym.Space, torch.device, torch.dtype)


class TorchEnv(EnvBase):
    """A batch of envs written in torch.

    >>> collector = Collector(TorchEnv(my_env), policy, frames_per_batch=4096 * 32)

    Args:
        env: an object with `num_envs`, `single_observation_space`, `single_action_space`, `reset(mask)`, which returns
            the observations of all lanes, and `step(action)`, which returns (observation, reward, terminated,
            truncated). It never resets by itself. The page on envs has an example, and lists optional members.
        categorical_action_encoding: encode discrete spaces as an index (the default here) or one-hot.
    """

    def __init__(self, env: TorchBatch, *, categorical_action_encoding: bool = True, device: Any = None) -> None:
        if not isinstance(env, TorchBatch):
            needed = "num_envs, single_observation_space, single_action_space, reset(mask) and step(action)"
            raise WrongArgument(f"TorchEnv takes an object with {needed}; {type(env).__name__} lacks some of them")
        super().__init__(TorchLanes(env, categorical=categorical_action_encoding), device=device)
