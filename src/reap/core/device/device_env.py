"""DeviceEnv: an env whose rows are tensors on a device, and the base of wrappers around one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reap.core.env import Env
from reap.core.wrapped import Wrapped
from reap.spec import EnvSpec


class DeviceEnv(Wrapped):
    """The lanes of `env` with rows that are tensors on `device`; the rest is forwarded to `env`.

    The host never learns which lanes ended: `step` returns none, and `after_step` begins new episodes in the lanes
    where `row.done` is set, and writes what every lane sees next.
    """

    writes_after = True

    def __init__(self, env: Env, spec: EnvSpec, device: torch.device, holders: Sequence[Any]) -> None:
        super().__init__(env, spec)
        self.has_after_step = True
        self.device = device
        self.holders = holders  # objects whose tensor attributes are the lanes' state


class WrappedOnDevice(DeviceEnv):
    """An env on a device that wraps another, the counterpart of `Wrapped`."""

    def __init__(self, env: DeviceEnv, spec: EnvSpec) -> None:
        super().__init__(env, spec, env.device, env.holders)
        self._own = len(env.spec.observation)  # leaves of the env itself; added leaves follow them in a row
