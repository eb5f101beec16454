"""TorchRL envs that users also move by hand: `collector.env` is the user's own object, usable between batches.

    collector.env.reset() ──► lanes.driver = None ──► the next rollout begins new episodes: the env's state is unknown

The two methods that move an env are replaced in the object handed out, and only there; its class is unchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase

from reap._foreign import torchrl_internals
from reap.core.env import Env
from reap.seeding import chain

SEEDED_BY_RESET = "_reap_seeded_by_reset"  # reap's mark in a ParallelEnv: its workers hold Gymnasium envs only
_MOVES = ("reset", "step")  # everything else that moves an env, like `rollout`, goes through these


class _Move:
    """Replaces one of these methods: notes that the user has moved the lanes, then calls the original."""

    def __init__(self, env: Any, name: str, lanes: Env) -> None:
        # Weak references, because the env holds this object.
        self._env, self._name, self._lanes = weakref.ref(env), name, weakref.ref(lanes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        env, lanes = self._env(), self._lanes()
        if lanes is not None:
            lanes.driver = None
        return getattr(type(env), self._name)(env, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle as the original method: a copy of the env has no lanes."""
        env = self._env()
        return functools.partial, (getattr(type(env), self._name), env)


def handed_out(env: Any, lanes: Env) -> Any:
    """Return `env` itself; from now on `lanes.driver` is cleared when it is moved by hand."""
    for name in _MOVES:
        vars(env)[name] = _Move(env, name, lanes)
    return env


def taken_back(env: Any) -> None:
    """Undo `handed_out`: restore the methods of the env's class."""
    for name in _MOVES:
        if isinstance(vars(env).get(name), _Move):
            del vars(env)[name]


def replaced(env: Any, names: Iterable[str]) -> bool:
    """Return whether somebody other than reap has replaced one of these methods in the object."""
    return any(name in vars(env) and not isinstance(vars(env)[name], _Move) for name in names)


def seeded_reset(env: Any, seed: int, *, static: bool) -> TensorDictBase:
    """Seed an env and reset it into the seeded state.

    TorchRL seeds a Gymnasium env by a reset and drops the observation; the next reset would show the second state.
    Therefore that reset is given the seed again.
    """
    env.set_seed(seed, static_seed=static)
    keywords, _ = _seeds_again(env, seed, static=static)
    found: TensorDictBase = env.reset(**keywords)
    return found


def inside(env: Any) -> Any:
    """Return the env inside a transformed one; None for other envs."""
    return dict(env.named_children()).get("base_env")


def innermost(env: Any) -> Any:
    """Return the env inside all transforms."""
    while (inner := inside(env)) is not None:
        env = inner
    return env


def _seeds_again(env: Any, seed: int, *, static: bool) -> tuple[dict[str, Any], int]:
    """Return keywords for `reset`, and the seed that follows.

    There are no keywords where `set_seed` leaves the first state to the reset, nor for envs in TorchRL's own processes:
    their kind is not known here, and a process whose env takes no keywords would end.
    """
    env = innermost(env)
    if vars(env).get(SEEDED_BY_RESET):  # in reap's processes, with Gymnasium envs only
        lanes = env.batch_size[1:].numel()  # per worker
        seeds, seed = chain(seed, env.num_workers * lanes, static=static)
        each: list[dict[str, Any]] = [{"seed": one} for one in seeds]
        if len(env.batch_size) > 1:
            each = [{"list_of_kwargs": each[n : n + lanes]} for n in range(0, len(each), lanes)]
        return {"list_of_kwargs": each}, seed
    children = torchrl_internals.serial_envs(env)
    if not children:
        keywords = {"seed": seed} if torchrl_internals.is_seeded_by_reset(env) else {}
        return keywords, chain(seed, 1, static=static)[1]
    each = []
    for child in children:
        keywords, seed = _seeds_again(child, seed, static=static)
        each.append(keywords)
    return {"list_of_kwargs": each} if any(each) else {}, seed
