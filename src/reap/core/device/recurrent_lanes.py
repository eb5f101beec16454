"""DeviceRecurrentState: store a recurrent policy's carry as columns on the device its lanes live on.

    row t      hidden, is_init ──► policy ──► ("next", hidden)
    row t+1    where(done, first carry, ("next", hidden)), is_init = done         the host never waits for the device

The columns have the same values as those of the host's `RecurrentState`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reap.core.device.device_env import DeviceEnv, WrappedOnDevice
from reap.core.policies.recurrent_state import IS_INIT, with_carry
from reap.spec import Key


class DeviceRecurrentState(WrappedOnDevice):
    """Adds `is_init` and the carry to the observations of lanes on a device."""

    def __init__(self, env: DeviceEnv, carry: Mapping[Key, Tensor]) -> None:
        super().__init__(env, with_carry(env.spec, carry))
        keys = list(self.spec.observation)
        self._flag = keys.index(IS_INIT) if IS_INIT not in env.spec.observation else None
        self._carried = [(keys.index(key), first.to(self.device)) for key, first in carry.items()]

    def reset(self, lanes: Sequence[int], into: Sequence[Any], seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into[: self._own], seeds)
        chosen = torch.as_tensor(list(lanes), device=self.device)
        if self._flag is not None:
            into[self._flag][chosen] = True
        for at, first in self._carried:
            into[at][chosen] = first

    def step(self, lanes: Sequence[int], row: Any) -> list[int]:
        if self._flag is not None:
            row.next[self._flag].zero_()
        return self._env.step(lanes, row)

    def after_step(self, row: Any) -> None:
        self._env.after_step(row)
        if self._flag is not None:
            row.after[self._flag][:, 0] = row.done
        for at, first in self._carried:
            done = row.done.reshape(-1, *[1] * first.ndim)
            torch.where(done, first, row.next[at], out=row.after[at])
