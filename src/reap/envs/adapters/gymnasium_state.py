"""A Gymnasium env in the middle of an episode, saved and brought back.

By the env's own `get_state()` and `set_state(state)` where it has both; else by pickling it with all its wrappers, its
random generator among them. Two kinds of env cannot be pickled as they are: those that Gymnasium pickles by their
arguments (`EzPickle`: MuJoCo) would begin anew, so they are pickled by what they hold; Atari's emulator is saved as a
state of its own, for the emulator that is there. That state lacks the action which sticky actions would repeat: it is
kept beside it (`noting_actions`). Whatever cannot be pickled either says so.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium.utils import EzPickle
from gymnasium.vector import AsyncVectorEnv, VectorEnv, VectorWrapper

from reap.core.resume import CannotResume, Packed, has_own_state, packed, unpacked
from reap.errors import CorruptState

_OWN, _PICKLED = "own", "pickled"
_SURELY = 64  # times an action is given to an emulator that at each time may repeat the one before it


def saved_env(env: gym.Env[Any, Any], lane: int = 0) -> tuple[str, Packed]:
    """Return the state of an env, as `restore_env` takes it."""
    game: Any = env.unwrapped
    try:
        if hasattr(game, "ale") and (game.continuous or env.action_space != game.action_space):
            raise TypeError("its emulator would repeat an action that is not known")
        if hasattr(game, "ale") and game.ale.getEpisodeFrameNumber() == 0:
            game.last_action = None  # it was of the episode before
        return _saved(env)
    except Exception as cause:
        raise _not_pickled(game, cause, lane) from cause


def restore_env(state: tuple[str, Packed], env: Any) -> None:
    """Let `env`, made as the saved one was, be where that one was."""
    how, data = state
    if how == _OWN:
        env.set_state(unpacked(data))
        return
    reader = _Unpickler(io.BytesIO(unpacked(data, bytes)), env)
    found = reader.load()
    mine, saved = list(_layers(env)), list(_layers(found))
    if [type(one) for one in mine] != [type(one) for one in saved]:
        raise CorruptState(f"this state is of the env {found}, here is {env}; nothing was loaded")
    for one, other in zip(mine, saved):
        one.__dict__ = other.__dict__  # one for both: what is inside may know its env
    for outer, inner in itertools.pairwise(mine):
        vars(outer)["env"] = inner
    if reader.emulated is not None:
        _emulate(env.unwrapped, reader.emulated)


def _layers(env: Any) -> Iterator[Any]:
    """An env and all that is inside it, from the outside inwards."""
    while env is not None:
        yield env
        env = env.env if isinstance(env, (gym.Wrapper, VectorWrapper)) else None


def saved_vector_env(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """What `restore_vector_env` takes: each of its envs, where it has them here, and what all layers hold beside."""
    base = env.unwrapped
    if has_own_state(env):
        return {"own": packed(env.get_state())}  # type: ignore[attr-defined]
    if isinstance(base, AsyncVectorEnv):
        raise CannotResume(
            "AsyncVectorEnv keeps its envs in processes that do not say where they are; take SyncVectorEnv, or reap's "
            "ParallelEnv"
        )
    inside = [saved_env(one, lane) for lane, one in enumerate(getattr(base, "envs", ()))]
    try:
        held = [packed(_held(layer), _dumps) for layer in _layers(env)]
    except Exception as cause:
        raise _not_pickled(base, cause) from cause
    return {"envs": inside, "layers": held, "kinds": [type(layer).__name__ for layer in _layers(env)]}


def restore_vector_env(state: Mapping[str, Any], env: VectorEnv[Any, Any, Any]) -> None:
    """Let `env`, made as the saved one was, be where that one was."""
    if "own" in state:
        env.set_state(unpacked(state["own"]))  # type: ignore[attr-defined]
        return
    layers = list(_layers(env))
    if state["kinds"] != [type(layer).__name__ for layer in layers]:
        raise CorruptState(f"this state is of the env {state['kinds']}, here is {env}; nothing was loaded")
    for one, inner in zip(state["envs"], getattr(env.unwrapped, "envs", ())):
        restore_env(one, inner)
    for layer, held in zip(layers, state["layers"]):
        vars(layer).update(unpacked(held))


def _held(layer: Any) -> dict[str, Any]:
    """What a layer of a vector env holds, without the envs inside it."""
    return {name: value for name, value in vars(layer).items() if name not in ("env", "envs", "env_fns")}


def saved_world(env: Any, lane: int = 0) -> tuple[str, Packed]:
    """What `restore_env` takes, of an env of another library's (PettingZoo)."""
    try:
        return _saved(env)
    except Exception as cause:
        raise _not_pickled(env, cause, lane) from cause


def _saved(env: Any) -> tuple[str, Packed]:
    return (_OWN, packed(env.get_state())) if has_own_state(env) else (_PICKLED, packed(env, _dumps))


def _not_pickled(env: Any, cause: Exception, lane: int | None = None) -> CannotResume:
    where = "" if lane is None else f"lane {lane}: "
    return CannotResume(
        f"{where}{type(env).__name__} cannot be pickled ({cause}); give it get_state() and set_state(state) for its "
        f"episodes to go on"
    )


def noting_actions(env: gym.Env[Any, Any], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`env.step`; of an Atari game one that keeps the last action with it."""
    game: Any = env.unwrapped
    if not hasattr(game, "ale"):
        return step

    def noted(action: Any) -> Any:
        game.last_action = action
        return step(action)

    return noted


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Envs by what they hold, never by the arguments they were made with."""

    def persistent_id(self, thing: Any) -> Any:
        return ("ale", thing.cloneSystemState()) if type(thing).__name__ == "ALEInterface" else None

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, EzPickle):
            return _bare, (type(thing),), vars(thing).copy(), None, None, _hold
        return super().reducer_override(thing)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, env: Any) -> None:
        super().__init__(file)
        self._env = env
        self.emulated: Any = None

    def persistent_load(self, name: Any) -> Any:
        """The emulator that is there; what is given back to it, once its env is known, is `emulated`."""
        self.emulated = name[1]
        return self._env.unwrapped.ale


def _emulate(game: Any, state: Any) -> None:
    """Let an emulator be where another was: its last action first, which its state does not hold."""
    game.ale.reset_game()
    action: Any = getattr(game, "last_action", None)
    least, all_of_them = game.ale.getMinimalActionSet(), game.ale.getLegalActionSet()
    actions = least if game.action_space.n == len(least) else all_of_them
    for _ in range(0 if action is None else _SURELY):
        game.ale.act(actions[int(action)])
    game.ale.restoreSystemState(state)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _hold(env: Any, held: dict[str, Any]) -> None:
    vars(env).update(held)


def _dumps(env: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(env)
    return file.getvalue()
