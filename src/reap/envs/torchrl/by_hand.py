"""A TorchRL env as its owner sees it: `collector.env` is that very object, and may be moved by hand between batches.

    collector.env.reset() ──► lanes.driver = None ──► the next rollout begins new episodes: nobody knows where it is

The two methods that move an env are replaced in the object handed out, and only there; its class stays as it is.
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

SEEDED_BY_RESET = "_reap_seeded_by_reset"  # our mark in a ParallelEnv: all in its workers are of Gymnasium's kind
_MOVES = ("reset", "step")  # everything else that moves an env, like `rollout`, goes through these


class _Move:
    """One of these methods, which says that somebody has moved the lanes."""

    def __init__(self, env: Any, name: str, lanes: Env) -> None:
        # Neither is kept alive: the env holds this.
        self._env, self._name, self._lanes = weakref.ref(env), name, weakref.ref(lanes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        env, lanes = self._env(), self._lanes()
        if lanes is not None:
            lanes.driver = None
        return getattr(type(env), self._name)(env, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle as the plain method: a copy of the env has no lanes."""
        env = self._env()
        return functools.partial, (getattr(type(env), self._name), env)


def handed_out(env: Any, lanes: Env) -> Any:
    """`env` itself; from now on `lanes` hear when it is moved by hand."""
    for name in _MOVES:
        vars(env)[name] = _Move(env, name, lanes)
    return env


def taken_back(env: Any) -> None:
    """Put the methods of its class back: nobody collects from it any more."""
    for name in _MOVES:
        if isinstance(vars(env).get(name), _Move):
            del vars(env)[name]


def replaced(env: Any, names: Iterable[str]) -> bool:
    """Whether somebody else has put a method of his own into the object in place of one of these."""
    return any(name in vars(env) and not isinstance(vars(env)[name], _Move) for name in names)


def seeded_reset(env: Any, seed: int, *, static: bool) -> TensorDictBase:
    """Seed an env and begin in the seeded state.

    TorchRL seeds a Gymnasium env by a reset whose observation nobody sees; the reset after it would show the second
    state. So it is told the seed again.
    """
    env.set_seed(seed, static_seed=static)
    keywords, _ = _seeds_again(env, seed, static=static)
    found: TensorDictBase = env.reset(**keywords)
    return found


def inside(env: Any) -> Any:
    """The env that a transformed one is around; None for others."""
    return dict(env.named_children()).get("base_env")


def innermost(env: Any) -> Any:
    """The env inside all transforms."""
    while (inner := inside(env)) is not None:
        env = inner
    return env


def _seeds_again(env: Any, seed: int, *, static: bool) -> tuple[dict[str, Any], int]:
    """Keywords for `reset`, and the seed that follows.

    There are none where `set_seed` has left the first state to the reset, and for envs in TorchRL's processes, whose
    kind is not known here: those that take no keywords would end.
    """
    env = innermost(env)
    if vars(env).get(SEEDED_BY_RESET):  # in our own processes: all of Gymnasium's kind
        lanes = env.batch_size[1:].numel()  # of a worker
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
