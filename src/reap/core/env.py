"""Env: N lanes that take actions and report what happened. Methods that only some envs need are in env_hooks.py.

The loop that calls an env (see rollout.py; `row` is one time step of a slot):

    env.reset(lanes, into)                  # start episodes; first observations go to `into`
    while collecting:
        policy.act(row)                     # reads row.inputs, writes row.outputs (row.action is among them)
        ended = env.step(lanes, row)        # writes row.next, row.reward, and the flags of lanes that ended
        if ended:
            env.reset(ended, row.after)     # the loop decides about resets, never the env

Every adapter guarantees, whatever the library behind it does:
- `row.next` is the true next observation, also where an episode ended: never a reset observation or zeros;
- terminated and truncated are kept apart; `row.done` is their union;
- flags are written only for lanes that ended (the loop has cleared the row);
- it keeps no reference to memory it is given: it passes copies of actions to foreign code, since slots are reused.
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


CLOSED = object()  # the `driver` of an env that is closed


class Env(EnvHooks, abc.ABC):
    """N lanes stepped together. Adapters implement `expect`, `reset`, `close` and either `step` or `send` and `recv`.

    Adapters that need more override hooks (env_hooks.py).
    """

    spec: EnvSpec
    pending_seeds: Sequence[int] | None = None  # from a `set_seed` by hand; the next reset of all lanes uses them
    driver: object = None  # the token of the loop that stepped or reset the lanes last; None: the user did, by hand

    @abc.abstractmethod
    def expect(self, action: Mapping[Key, Leaf]) -> None:
        """Learn the shapes and dtypes of actions; raise SpecMismatch if the env cannot use them."""

    @abc.abstractmethod
    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        """Start an episode in each of `lanes`; write first observations to `into[leaf][lane]`."""

    def send(self, lanes: Sequence[int], row: Row) -> None:
        """Begin one step of `lanes` with the actions in `row`."""
        self._sent = lanes, row

    def recv(self) -> list[int]:
        """Finish the step begun by `send`, and return the lanes whose episode ended."""
        return self.step(*self._sent)

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        """Make one step (`send`, then `recv`), and return the lanes whose episode ended."""
        self.send(lanes, row)
        return self.recv()

    def make_slot(self, layout: Layout, index: int) -> Slot:
        """Return memory for a rollout. An env whose lanes are in other processes uses memory that they share."""
        return Slot(layout, index)

    def on_device(self) -> DeviceEnv | None:
        """Return an env that steps these lanes on their device, with tensors as rows; None if rows are NumPy arrays."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Free all resources. May be called twice."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the same env in another process would need to continue; most envs have none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise UsageError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")
