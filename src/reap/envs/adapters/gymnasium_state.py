"""Save and restore a Gymnasium env in the middle of an episode.

An env with both `get_state()` and `set_state(state)` is saved by these; any other is pickled with all its wrappers and
its random generator. Two kinds of env need special treatment. Gymnasium pickles an `EzPickle` env (MuJoCo) by its
constructor arguments, which would restart its episode: its attributes are pickled instead. An Atari emulator is saved
by its own state, which is loaded into the emulator of the env being restored. That state lacks the previous action,
which sticky actions repeat: the action is saved beside it (`noting_actions`). `CannotResume` says why any other env
cannot be pickled.
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
_REPEATS = 64  # times an action is sent to an emulator that may repeat the previous action each time


def saved_env(env: gym.Env[Any, Any], lane: int = 0) -> tuple[str, Packed]:
    """Return the state of an env, for `restore_env`."""
    game: Any = env.unwrapped
    try:
        if hasattr(game, "ale") and (game.continuous or env.action_space != game.action_space):
            raise TypeError(
                "its emulator may repeat the previous action, which cannot be recorded for this action space"
            )
        if hasattr(game, "ale") and game.ale.getEpisodeFrameNumber() == 0:
            game.last_action = None  # it belongs to the previous episode
        return _saved(env)
    except Exception as cause:
        raise _not_pickled(game, cause, lane) from cause


def restore_env(state: tuple[str, Packed], env: Any) -> None:
    """Put `env`, which must be built like the saved one, into the saved state."""
    how, data = state
    if how == _OWN:
        env.set_state(unpacked(data))
        return
    reader = _Unpickler(io.BytesIO(unpacked(data, bytes)), env)
    found = reader.load()
    mine, saved = list(_layers(env)), list(_layers(found))
    if [type(one) for one in mine] != [type(one) for one in saved]:
        raise CorruptState(f"the saved state belongs to {found}, but this is {env}; nothing was loaded")
    for one, other in zip(mine, saved):
        one.__dict__ = other.__dict__  # the same dict object: something inside may refer to its env
    for outer, inner in itertools.pairwise(mine):
        vars(outer)["env"] = inner
    if reader.emulator_state is not None:
        _restore_emulator(env.unwrapped, reader.emulator_state)


def _layers(env: Any) -> Iterator[Any]:
    """Yield an env and every env inside its wrappers, from the outermost inwards."""
    while env is not None:
        yield env
        env = env.env if isinstance(env, (gym.Wrapper, VectorWrapper)) else None


def saved_vector_env(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """Return the state of a vector env, for `restore_vector_env`: its envs, if they live here, and its wrappers."""
    base = env.unwrapped
    if has_own_state(env):
        return {"own": packed(env.get_state())}  # type: ignore[attr-defined]
    if isinstance(base, AsyncVectorEnv):
        raise CannotResume("AsyncVectorEnv's processes cannot save their envs; use SyncVectorEnv or reap's ParallelEnv")
    inside = [saved_env(one, lane) for lane, one in enumerate(getattr(base, "envs", ()))]
    try:
        held = [packed(_own_attributes(layer), _dumps) for layer in _layers(env)]
    except Exception as cause:
        raise _not_pickled(base, cause) from cause
    return {"envs": inside, "layers": held, "kinds": [type(layer).__name__ for layer in _layers(env)]}


def restore_vector_env(state: Mapping[str, Any], env: VectorEnv[Any, Any, Any]) -> None:
    """Put `env`, which must be built like the saved one, into the saved state."""
    if "own" in state:
        env.set_state(unpacked(state["own"]))  # type: ignore[attr-defined]
        return
    layers = list(_layers(env))
    if state["kinds"] != [type(layer).__name__ for layer in layers]:
        raise CorruptState(f"the saved state belongs to {state['kinds']}, but this is {env}; nothing was loaded")
    for one, inner in zip(state["envs"], getattr(env.unwrapped, "envs", ())):
        restore_env(one, inner)
    for layer, held in zip(layers, state["layers"]):
        vars(layer).update(unpacked(held))


def _own_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of one layer of a vector env, without the envs inside it."""
    return {name: value for name, value in vars(layer).items() if name not in ("env", "envs", "env_fns")}


def saved_world(env: Any, lane: int = 0) -> tuple[str, Packed]:
    """Return the state of an env of another library (PettingZoo), for `restore_env`."""
    try:
        return _saved(env)
    except Exception as cause:
        raise _not_pickled(env, cause, lane) from cause


def _saved(env: Any) -> tuple[str, Packed]:
    return (_OWN, packed(env.get_state())) if has_own_state(env) else (_PICKLED, packed(env, _dumps))


def _not_pickled(env: Any, cause: Exception, lane: int | None = None) -> CannotResume:
    where = "" if lane is None else f"lane {lane}: "
    return CannotResume(
        f"{where}{type(env).__name__} cannot be pickled ({cause}); implement get_state() and set_state(state) so "
        f"that its episodes can be resumed"
    )


def noting_actions(env: gym.Env[Any, Any], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `step`; for an Atari game, wrapped so that each action is kept as the game's `last_action`."""
    game: Any = env.unwrapped
    if not hasattr(game, "ale"):
        return step

    def noted(action: Any) -> Any:
        game.last_action = action
        return step(action)

    return noted


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an env by its attributes, even if it is an `EzPickle`, and an Atari emulator by its own state."""

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
        self.emulator_state: Any = None

    def persistent_load(self, name: Any) -> Any:
        """Return the emulator of the env being restored, and keep the saved state in `emulator_state` for later."""
        self.emulator_state = name[1]
        return self._env.unwrapped.ale


def _restore_emulator(game: Any, state: Any) -> None:
    """Restore an emulator's state. Its last action is not part of that state, so it is played first."""
    game.ale.reset_game()
    action: Any = getattr(game, "last_action", None)
    least, all_of_them = game.ale.getMinimalActionSet(), game.ale.getLegalActionSet()
    actions = least if game.action_space.n == len(least) else all_of_them
    for _ in range(0 if action is None else _REPEATS):
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
