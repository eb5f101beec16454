"""Wrapped: an env around another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from reap.core.env import DeviceEnv, Env, Rows
from reap.core.measuring.moments import RunningStatistics
from reap.core.slot import Layout, Row, Slot
from reap.spec import EnvSpec, Key, Leaf


class Wrapped(Env):
    """An env around another: everything is passed on, for subclasses to change what they must.

    But for two: `send` and `recv` are `step`, which a subclass may have changed; and `on_device` would step the inner
    env without whoever is around it, so a subclass that can be on a device says so itself.
    """

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self._env, self.spec, self.has_after_step, self.draws = env, spec, env.has_after_step, env.draws
        self.elsewhere = env.elsewhere

    def __getattr__(self, name: str) -> Any:
        """What is not here is the inner env's: whoever looks for it need not know what is around it."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def as_given(self) -> Any:
        inner = self._env.as_given
        return self if inner is self._env else inner

    @property
    def pending_seeds(self) -> Sequence[int] | None:
        return self._env.pending_seeds

    @pending_seeds.setter
    def pending_seeds(self, seeds: Sequence[int] | None) -> None:
        self._env.pending_seeds = seeds

    @property
    def driver(self) -> object:
        return self._env.driver

    @driver.setter
    def driver(self, who: object) -> None:
        self._env.driver = who

    @property
    def tells_cuts(self) -> bool:  # type: ignore[override]
        return self._env.tells_cuts

    @property
    def captures(self) -> bool:
        return self._env.captures

    @captures.setter
    def captures(self, allowed: bool) -> None:
        self._env.captures = allowed

    def report_lane(self, memory: Any) -> None:
        self._env.report_lane(memory)

    def draw(self, row: Row) -> None:
        self._env.draw(row)

    def bind_policy(self, model: Any) -> None:
        self._env.bind_policy(model)

    def make_policy(self, model: Any, kind: Any, device: Any) -> Any:
        return self._env.make_policy(model, kind, device)

    def wrap_policy(self, policy: Any) -> Any:
        """A policy that may read what is added here cannot act on the inner env's own TensorDict: that lacks it."""
        added = self.spec.observation.keys() != self._env.spec.observation.keys()
        return policy if added else self._env.wrap_policy(policy)

    def running_statistics(self) -> Sequence[RunningStatistics]:
        return self._env.running_statistics()

    def rebuild_lanes(self, replace: Callable[..., Any]) -> bool:
        return self._env.rebuild_lanes(replace)

    def not_rebuilt(self) -> str:
        return self._env.not_rebuilt()

    def restarts(self) -> int:
        return self._env.restarts()

    def dropped(self) -> Collection[int]:
        return self._env.dropped()

    def explain(self) -> str:
        return self._env.explain()

    def stacks(self) -> dict[str, str]:
        return self._env.stacks()

    def set_policy_keys(self, outputs: Sequence[Key]) -> None:
        self._env.set_policy_keys(outputs)

    def looks_at(self, outputs: Collection[Key]) -> Collection[Key]:
        return self._env.looks_at(outputs)

    def filled(self) -> int:
        return self._env.filled()

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._env.expect(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into, seeds)

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        return self._env.step(lanes, row)

    def after_step(self, row: Row) -> None:
        self._env.after_step(row)

    def open_state(self) -> Any:
        return self._env.open_state()

    def load_open_state(self, state: Any) -> None:
        self._env.load_open_state(state)

    def lane_state(self, lane: int) -> Any:
        return self._env.lane_state(lane)

    def load_lane_state(self, lane: int, state: Any) -> None:
        self._env.load_lane_state(lane, state)

    def make_slot(self, layout: Layout, index: int) -> Slot:
        return self._env.make_slot(layout, index)

    def close(self) -> None:
        self._env.close()

    def state_dict(self) -> dict[str, Any]:
        return self._env.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._env.load_state_dict(state)


class WrappedOnDevice(DeviceEnv):
    """An env on a device around another, as `Wrapped` is elsewhere."""

    def __init__(self, env: DeviceEnv, spec: EnvSpec) -> None:
        self._env = self.behind = env
        self.spec, self.device, self.holders, self.pending_seeds = spec, env.device, env.holders, env.pending_seeds
        self._own = len(env.spec.observation)  # leaves of the env itself; what is added follows them in a row

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._env.expect(action)

    def open_state(self) -> Any:
        return self._env.open_state()

    def load_open_state(self, state: Any) -> None:
        self._env.load_open_state(state)

    def close(self) -> None:
        self._env.close()
