"""Wrapped: an env around another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reap.core.env import Env, Rows
from reap.core.slot import Layout, Row, Slot
from reap.spec import EnvSpec, Key, Leaf


class Wrapped(Env):
    """An env around another: everything is passed on, for subclasses to change what they must."""

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self._env, self.spec, self.tidies, self.draws = env, spec, env.tidies, env.draws

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
    def captures(self) -> bool:
        return self._env.captures

    @captures.setter
    def captures(self, captures: bool) -> None:
        self._env.captures = captures

    def say_lane_in(self, memory: Any) -> None:
        self._env.say_lane_in(memory)

    def draw(self, row: Row) -> None:
        self._env.draw(row)

    def meet(self, model: Any) -> None:
        self._env.meet(model)

    def play(self, model: Any, kind: Any, device: Any) -> Any:
        return self._env.play(model, kind, device)

    def explain(self) -> str:
        return self._env.explain()

    def follow(self, outputs: Sequence[Key]) -> None:
        self._env.follow(outputs)

    def filled(self) -> int:
        return self._env.filled()

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._env.expect(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self._env.reset(lanes, into, seeds)

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        return self._env.step(lanes, row)

    def tidy(self, row: Row) -> None:
        self._env.tidy(row)

    def make_slot(self, layout: Layout, index: int) -> Slot:
        return self._env.make_slot(layout, index)

    def close(self) -> None:
        self._env.close()

    def state_dict(self) -> dict[str, Any]:
        return self._env.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._env.load_state_dict(state)
