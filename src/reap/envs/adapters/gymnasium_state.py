"""A Gymnasium env in the middle of an episode, saved and brought back.

By the env's own `get_state()` and `set_state(state)` where it has both; else by pickling it with all its wrappers, its
random generator among them. Two kinds of env cannot be pickled as they are: those that Gymnasium pickles by their
arguments (`EzPickle`: MuJoCo) would begin anew, so they are pickled by what they hold; Atari's emulator is saved as a
state of its own, for the emulator that is there. Whatever cannot be pickled either says so.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium.utils import EzPickle

from reap.core.resume import CannotResume, Packed, packed, unpacked
from reap.errors import CorruptState

_OWN, _PICKLED = "own", "pickled"


def saved_env(env: gym.Env[Any, Any], lane: int = 0) -> tuple[str, Packed]:
    """What `restore_env` takes."""
    try:
        if _has_own(env):
            return _OWN, packed(env.get_state())  # type: ignore[attr-defined]
        return _PICKLED, packed(env, _dumps)
    except Exception as cause:
        raise CannotResume(
            f"lane {lane}: {type(env.unwrapped).__name__} cannot be pickled ({cause}); give it get_state() and "
            f"set_state(state) for its episodes to go on"
        ) from cause


def restore_env(state: tuple[str, Packed], env: gym.Env[Any, Any]) -> None:
    """Let `env`, made as the saved one was, be where that one was."""
    how, data = state
    if how == _OWN:
        env.set_state(unpacked(data))  # type: ignore[attr-defined]
        return
    found: gym.Env[Any, Any] = unpacked(data, lambda raw: _Unpickler(io.BytesIO(raw), env).load())
    mine, saved = list(_layers(env)), list(_layers(found))
    if [type(one) for one in mine] != [type(one) for one in saved]:
        raise CorruptState(f"this state is of the env {found}, here is {env}; nothing was loaded")
    for one, other in zip(mine, saved):
        one.__dict__ = other.__dict__  # one for both: what is inside may know its env
    for outer, inner in itertools.pairwise(mine):
        vars(outer)["env"] = inner


def _layers(env: Any) -> Iterator[Any]:
    """An env and all that is inside it, from the outside inwards."""
    while env is not None:
        yield env
        env = env.env if isinstance(env, gym.Wrapper) else None


def _has_own(env: Any) -> bool:
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Envs by what they hold, never by the arguments they were made with."""

    def persistent_id(self, thing: Any) -> Any:
        if type(thing).__name__ == "ALEInterface":
            return "ale", thing.cloneSystemState()
        return None

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, EzPickle) and isinstance(thing, gym.Env):
            return _bare, (type(thing),), vars(thing).copy(), None, None, _hold
        return super().reducer_override(thing)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, env: Any) -> None:
        super().__init__(file)
        self._env = env

    def persistent_load(self, name: Any) -> Any:
        ale = self._env.unwrapped.ale
        ale.restoreSystemState(name[1])
        return ale


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _hold(env: Any, held: dict[str, Any]) -> None:
    vars(env).update(held)


def _dumps(env: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(env)
    return file.getvalue()
