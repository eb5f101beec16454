"""DeviceEnv: an env whose rows are tensors on a device, and the base of wrappers around one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reap.core.env import Env
from reap.spec import EnvSpec, Key, Leaf


class DeviceEnv(Env):
    """An env whose rows are tensors on `device`. The host never learns which lanes ended: `step` returns none, and
    `after_step` begins new episodes in the lanes where `row.done` is set, and writes what every lane sees next.
    """

    has_after_step = writes_after = True
    behind: Env  # the env that owns the lanes
    device: torch.device
    holders: Sequence[Any] = ()  # objects whose tensor attributes are the lanes' state

    @property
    def driver(self) -> object:
        return self.behind.driver

    @driver.setter
    def driver(self, who: object) -> None:
        self.behind.driver = who

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self.behind.expect(action)

    def open_state(self) -> Any:
        return self.behind.open_state()

    def load_open_state(self, state: Any) -> None:
        self.behind.load_open_state(state)

    def close(self) -> None:
        self.behind.close()


class WrappedOnDevice(DeviceEnv):
    """An env on a device that wraps another, the counterpart of `Wrapped`."""

    def __init__(self, env: DeviceEnv, spec: EnvSpec) -> None:
        self._env = self.behind = env
        self.spec, self.device, self.holders, self.pending_seeds = spec, env.device, env.holders, env.pending_seeds
        self._own = len(env.spec.observation)  # leaves of the env itself; added leaves follow them in a row
