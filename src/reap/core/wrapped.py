"""Wrapped: an env around another one, to which it forwards everything that it does not change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reap.core.env import Env, Rows
from reap.core.slot import Row
from reap.spec import EnvSpec, Key, Leaf


class Wrapped(Env):
    """An env around another one, which forwards everything, so that subclasses override only what they change.

    Not forwarded are `send` and `recv`, which call `step` because a subclass may override it, and `on_device`, which
    would bypass this env: a subclass that can run on a device implements it.
    """

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self._env, self.spec, self.has_after_step, self.draws = env, spec, env.has_after_step, env.draws
        self.runs_elsewhere = env.runs_elsewhere

    def __getattr__(self, name: str) -> Any:
        """Return other public attributes of the inner env, so that callers need not know that it is wrapped."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def as_given(self) -> Any:
        inner = self._env.as_given
        return self if inner is self._env else inner

    @property
    def driver(self) -> object:
        return self._env.driver

    @driver.setter
    def driver(self, who: object) -> None:
        self._env.driver = who

    def wrap_policy(self, policy: Any) -> Any:
        """Return `policy` itself if this env adds observations, which the inner env's own TensorDict lacks."""
        added = self.spec.observation.keys() != self._env.spec.observation.keys()
        return policy if added else self._env.wrap_policy(policy)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._env.expect(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into, seeds)

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        return self._env.step(lanes, row)

    def after_step(self, row: Row) -> None:
        self._env.after_step(row)

    def close(self) -> None:
        self._env.close()


def _method_of_inner(name: str) -> Callable[..., Any]:
    inner = operator.attrgetter(f"_env.{name}")

    def call(self: Wrapped, *arguments: Any) -> Any:
        return inner(self)(*arguments)

    call.__name__ = name
    return call


def _attribute_of_inner(name: str) -> property:
    return property(operator.attrgetter(f"_env.{name}"), lambda self, value: setattr(self._env, name, value))


# The remaining hooks, which the loop itself does not call at every step, are forwarded unchanged.
for _name in (
    *("report_lane", "draw", "bind_policy", "make_policy", "set_policy_keys", "outputs_read", "filled"),
    *("running_statistics", "rebuild_lanes", "why_not_rebuilt", "restarts", "dropped", "explain", "stacks"),
    *("open_state", "load_open_state", "lane_state", "load_lane_state", "make_slot", "state_dict", "load_state_dict"),
):
    setattr(Wrapped, _name, _method_of_inner(_name))
for _name in ("pending_seeds", "captures", "reports_cuts"):
    setattr(Wrapped, _name, _attribute_of_inner(_name))
