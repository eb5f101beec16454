"""Env: N lanes that take actions and report what happened. Here is what every env has; env_hooks.py has what some need.

The loop that calls an env (see rollout.py; `row` is one time step of a slot):

    env.reset(lanes, into)                  # start episodes; first observations go to `into`
    while collecting:
        policy.act(row)                     # reads row.inputs, writes row.outputs (row.action is among them)
        ended = env.step(lanes, row)        # writes row.next, row.reward, and the flags of lanes that ended
        if ended:
            env.reset(ended, row.after)     # the loop decides about resets, never the env

Guarantees an adapter gives, whatever the library behind it does by itself:
- `row.next` is the true successor, also at an episode's end: never a reset observation, a zero or a phantom;
- terminated and truncated are kept apart; `row.done` is their union;
- flags are written only for lanes that ended (the loop has cleared the row);
- nothing given to it is kept: actions handed to foreign code are copies, since slots are recycled.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reap.core.env_hooks import EnvHooks
from reap.core.slot import Layout, Row, Slot
from reap.errors import UsageError
from reap.spec import EnvSpec, Key, Leaf

if TYPE_CHECKING:
    from reap.core.device.device_env import DeviceEnv

Rows = Sequence["np.ndarray[Any, Any]"]


CLOSED = object()  # the driver of lanes nobody can move any more


class Env(EnvHooks, abc.ABC):
    """N lanes in lockstep. Adapters implement `expect`, `reset`, `close` and either `step` or `send` and `recv`.

    What only some of them have to say besides are hooks (env_hooks.py).
    """

    spec: EnvSpec
    pending_seeds: Sequence[int] | None = None  # for the next first reset, set by hand before a worker takes over
    driver: object = None  # whoever moved the lanes last: nobody else knows where they are

    @abc.abstractmethod
    def expect(self, action: Mapping[Key, Leaf]) -> None:
        """Learn how actions will look; SpecMismatch if they cannot be understood."""

    @abc.abstractmethod
    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        """Start an episode in each of `lanes`; write first observations to `into[leaf][lane]`."""

    def send(self, lanes: Sequence[int], row: Row) -> None:
        """Begin one step of `lanes` with the actions in `row`."""
        self._sent = lanes, row

    def recv(self) -> list[int]:
        """Finish the step begun by `send`; returns the lanes whose episode ended."""
        return self.step(*self._sent)

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        """Make one step: `send`, then `recv`."""
        self.send(lanes, row)
        return self.recv()

    def make_slot(self, layout: Layout, index: int) -> Slot:
        """Memory for a rollout. An env whose lanes live elsewhere makes it where they can write to it."""
        return Slot(layout, index)

    def on_device(self) -> DeviceEnv | None:
        """These lanes with rows of tensors on the device they live on; None where rows are the host's."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. May be called twice."""

    def state_dict(self) -> dict[str, Any]:
        """What the env would need to go on elsewhere; most have nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if state:
            raise UsageError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")
