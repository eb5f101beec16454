"""The child's side of a TorchRL ParallelEnv on reap's env processes: the envs that one process holds.

    order ──► a step of rows ──► each lane's env as reap steps it: Gymnasium's step, captured transforms
    CALL ──► TorchRL's own commands (reset, step, seed, state_dict, any attribute) ──► the same env, by TorchRL's code

Each lane has the env that one of TorchRL's workers would have, with its own transforms and statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase

from reap._foreign import torchrl_internals
from reap._system.messages.remote_errors import Raised
from reap.core.env import Env
from reap.core.slot import Layout, Row, RowKeys
from reap.envs.adapters.gymnasium import GymLanes
from reap.envs.parallel.env_child import DRAW, RESET, STEP, EnvChild, Traits, advance, reset_some
from reap.envs.parallel.lane_workers import joint_spec, joint_traits
from reap.envs.torchrl.by_hand import innermost, inside
from reap.envs.torchrl.captured import CapturedRows
from reap.envs.torchrl.lanes import WrappedGym, torchrl_lanes
from reap.envs.torchrl.parallel import NeedsOwnProcess, NotTakenOver, Recipe
from reap.spec import Key, Leaf

_KNOWN = ("gymnasium.", "ale_py.")  # envs of these packages use their own random numbers and share no state


class Lane(NamedTuple):
    """The env of one of TorchRL's workers, and the lanes through which reap steps it."""

    env: Any
    lanes: Env


class TorchRLChild(EnvChild):
    """The envs of some of TorchRL's workers, stepped one after another in this process."""

    def __init__(self, connection: Connection, fds: Sequence[int], *, makers: Sequence[Recipe], limit: None) -> None:
        self._lanes: list[Lane] = []
        try:
            for recipe in makers:
                env = _built_env(recipe)
                self._lanes.append(Lane(env, _stepped_by_reap(env, recipe)))
        except BaseException:
            self.close()
            raise
        parts = [lane.lanes for lane in self._lanes]
        if len(parts) > 1 and all(isinstance(part, WrappedGym) for part in parts):
            parts = [GymLanes.joined(parts[0], parts[1:])]  # type: ignore[arg-type]
        self._parts = parts
        spec, self._bounds = joint_spec([part.spec for part in parts])
        traits = joint_traits([Traits(part.has_after_step, part.draws) for part in parts])
        self._slots: dict[int, tuple[Layout, int, int]] = {}  # by slot number: layout, start, end of the file
        self._rows_by_part: dict[int, list[list[Row]]] = {}
        self._outputs = list(parts[0].spec.action)  # the policy outputs that the envs read
        super().__init__(spec if len(parts) > 1 else parts[0].spec, traits, connection, fds)

    def _execute(self, what: int, slot_number: int, step: int) -> None:
        if self._answer_ping(what, step):
            return
        for n, (part, (first, last)) in enumerate(zip(self._parts, self._bounds)):
            own: Sequence[int] = range(last - first)
            if what not in (STEP, DRAW):
                own = np.flatnonzero(self._some[first:last]).tolist()
            into = [array[first:last] for array in self._first]
            if what == RESET:
                reset_some(part, own, into, self._seeds[first:last])
            elif what == DRAW:
                part.draw(self._rows_by_part[slot_number][n][step])
            elif own:
                advance(part, own, self._rows_by_part[slot_number][n][step], into)
        self._answer()

    def do_slot(self, slot_number: int, layout: Layout, start: int, end: int) -> None:
        self._slots[slot_number] = layout, start, end
        self._cut_rows(slot_number)

    def _cut_rows(self, slot_number: int) -> None:
        self._rows_by_part[slot_number] = [
            self._rows_of(*self._slots[slot_number], first, last, part.spec)
            for part, (first, last) in zip(self._parts, self._bounds)
        ]

    def do_policy_keys(self, carried: Sequence[Key]) -> None:
        """Learn the policy outputs `carried`: next values of what the envs carry from step to step."""
        self._outputs = [*self.spec.action, *carried]
        self._keys = RowKeys(self.spec, outputs=self._outputs)
        for slot_number in self._slots:
            self._cut_rows(slot_number)
        for part in self._parts:
            part.set_policy_keys(self._outputs)

    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        for part in self._parts:
            part.expect(action)

    def do_capture(self, captures: bool) -> None:
        """Set whether transforms may be recorded and replayed."""
        for part in self._parts:
            part.captures = captures

    def do_explain(self) -> str:
        """Return a sentence that says how the lanes are stepped here."""
        return self._parts[0].explain()

    def do_torchrl(self, worker: int, command: Any, data: Any) -> Any:
        """Return what TorchRL's worker would answer to a command; an error is returned too, and the env goes on."""
        env, lanes = self._lanes[worker]
        try:
            found = _run_command(env, lanes, command, data)
        except Exception as error:
            return Raised.of(error, f"env.{command}")
        if isinstance(lanes, CapturedRows):
            lanes.set_policy_keys(self._outputs)  # the command may have changed a transform
        return (found,)

    def close(self) -> None:
        for lane in self._lanes:
            lane.lanes.close()


def _built_env(recipe: Recipe) -> Any:
    """Build the env as TorchRL's worker has it before its first command."""
    env = recipe.make(**recipe.keywords)
    if recipe.seed is not None:
        torch.manual_seed(recipe.seed)
        env.set_seed(recipe.seed)
    env.set_spec_lock_()
    return env


def _stepped_by_reap(env: Any, recipe: Recipe) -> Env:
    """Return the env as lanes that reap steps; `NotTakenOver` if only TorchRL can step it."""
    try:
        if not _known_kind(env):
            if recipe.running:
                raise NotTakenOver("its workers were running already, with envs that may have been changed there")
            if recipe.shared:
                raise NeedsOwnProcess("its envs may share state with other envs in their process")
        primers = [part for part in _transforms(env) if type(part).__name__ == "TensorDictPrimer"]
        if primers and recipe.below:
            raise NotTakenOver(
                "its workers hold a TensorDictPrimer, and transforms around the ParallelEnv cannot see the "
                "recurrent state; put the primer around it, or all transforms inside"
            )
        if any(primer.random for primer in primers):
            raise NotTakenOver("a TensorDictPrimer in its workers draws random initial values there")
        lanes = torchrl_lanes(env)
        if not isinstance(lanes, (WrappedGym, CapturedRows)):
            raise NotTakenOver(f"in its workers {lanes.explain()}")
        lanes.set_policy_keys(list(lanes.spec.action))
    except BaseException:
        env.close(raise_if_closed=False)
        raise
    return lanes


def _transforms(env: Any) -> list[Any]:
    """Return all parts of all transforms of an env and of the envs inside it."""
    found: list[Any] = []
    while (inner := inside(env)) is not None:
        found += env.transform.modules()
        env = inner
    for child in _children(env):
        found += _transforms(child)
    return found


def _children(env: Any) -> list[Any]:
    """Return the envs of a SerialEnv, which is started if needed; none for other envs."""
    if type(env).__name__ == "SerialEnv" and env.is_closed:
        env.start()
    return torchrl_internals.serial_envs(env)


def _known_kind(env: Any) -> bool:
    """Return whether every Gymnasium env and wrapper inside is one of Gymnasium's own, or Atari's."""
    env = innermost(env)
    children = _children(env)
    if children:
        return all(map(_known_kind, children))
    inner = torchrl_internals.gymnasium_env(env)
    while isinstance(inner, gym.Wrapper):
        if not type(inner).__module__.startswith(_KNOWN):
            return False
        inner = inner.env
    return type(inner).__module__.startswith(_KNOWN)


def _run_command(env: Any, lanes: Env, command: Any, data: Any) -> Any:
    if command == "reset":
        given, keywords = data
        if isinstance(lanes, CapturedRows) and lanes.unseen and not keywords:
            found = lanes.root.clone()
        else:
            found = env.reset(given, **keywords)
        _moved(lanes, found)
        return found
    if command in ("step", "step_and_maybe_reset"):
        if command == "step":
            stepped = env.step(data)
            root = torchrl_internals.next_root(env, stepped)
        else:
            stepped, root = env.step_and_maybe_reset(data)
        _moved(lanes, root)
        return stepped.get("next"), root
    if command == "seed":
        seed, static = data
        torch.manual_seed(seed)
        following = env.set_seed(seed, static_seed=static)
        if isinstance(lanes, CapturedRows):
            lanes.moved_to(lanes.root)
        return following
    if command == "state_dict":
        return _without_locks(env.state_dict())
    if command == "load_state_dict":
        return env.load_state_dict(data)
    found = env
    for name in command if isinstance(command, (tuple, list)) else (command,):
        found = getattr(found, name)
    if callable(found):
        arguments, keywords = data
        found = found(
            *[one for one in arguments if not (isinstance(one, str) and one == torchrl_internals.SELF)], **keywords
        )
    return None if command == "to" else found


def _moved(lanes: Env, root: TensorDictBase) -> None:
    if isinstance(lanes, CapturedRows):
        lanes.moved_to(root.clone())


def _without_locks(state: Any) -> Any:
    """Return a state without locks, which cannot be sent to other processes."""
    kept = type(state)()
    for key, value in state.items():
        if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
            kept[key] = _without_locks(value)
        elif not hasattr(value, "acquire"):
            kept[key] = value
    return kept
