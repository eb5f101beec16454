"""check_env: what reap needs from an env, tried out; what is wrong, in plain words.

make_env() ─► look at it ─► play it twice with the same seed and actions ─► list of sentences
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from reap.core.cells import own
from reap.envs import as_env
from reap.errors import ReapError

_SEED = 7


def check_env(make_env: Callable[[], Any], *, steps: int = 200) -> list[str]:
    """Try a Gymnasium env and raise an AssertionError that lists all that is wrong with it, one sentence each.

    Returns remarks: things that are allowed, and worth knowing.

    >>> check_env(lambda: gymnasium.make("CartPole-v1"))
    []

    Args:
        make_env: makes the env; called several times.
        steps: how long to play.
    """
    if not callable(make_env) or isinstance(make_env, gym.Env):
        raise AssertionError("check_env takes a factory, not a finished env: several copies are needed to compare")
    wrong: list[str] = []
    remarks: list[str] = []
    _travels(make_env, wrong)
    env = _made(make_env, wrong)
    if env is not None:
        first = _Player(env, wrong, remarks).play(steps)
        other = _made(make_env, [])
        if first is not None and other is not None and not wrong:
            again = _Player(other, [], []).play(steps)
            _compare(first, again, wrong)
        _lives(env, wrong)
    if not wrong:
        _fits(make_env, wrong)
    if wrong:
        raise AssertionError("this env would not give true data:\n" + "\n".join(f"- {sentence}" for sentence in wrong))
    return remarks


def _travels(make_env: Callable[[], Any], wrong: list[str]) -> None:
    try:
        cloudpickle.loads(cloudpickle.dumps(make_env))
    except Exception as cause:
        wrong.append(f"The factory cannot be sent to a worker process: pickling it raised {cause!r}.")


def _made(make_env: Callable[[], Any], wrong: list[str]) -> gym.Env[Any, Any] | None:
    try:
        env = make_env()
    except Exception as cause:
        wrong.append(f"The factory raised {cause!r}.")
        return None
    if not isinstance(env, gym.Env):
        wrong.append(f"The factory returned {type(env).__name__}, not a gymnasium.Env.")
        return None
    for what in ("observation_space", "action_space"):
        if not isinstance(getattr(env, what, None), gym.Space):
            wrong.append(f"The env has no {what}.")
            return None
    return env


class _Player:
    """Plays an env with actions drawn from a fixed seed and writes down what it sees."""

    def __init__(self, env: gym.Env[Any, Any], wrong: list[str], remarks: list[str]) -> None:
        self.env, self._wrong, self._remarks = env, wrong, remarks
        self._said: set[str] = set()

    def _say(self, topic: str, sentence: str) -> None:
        if topic not in self._said:  # once is enough
            self._said.add(topic)
            self._wrong.append(sentence)

    def play(self, steps: int) -> list[Any] | None:
        env = self.env
        env.action_space.seed(_SEED)
        story: list[Any] = []
        observation = self._reset(_SEED)
        if observation is None:
            return None
        story.append(_copy(observation))
        episodes = 0
        for t in range(steps):
            action = env.action_space.sample()
            given, before = _copy(action), _copy(observation)
            try:
                result = env.step(action)
            except Exception as cause:
                self._say(
                    "step", f"step raised {cause!r} at step {t}, for the action {given!r} from its own action_space."
                )
                return None
            if not isinstance(result, tuple) or len(result) != 5:
                self._say(
                    "tuple",
                    f"step must return (observation, reward, terminated, truncated, info), got {_kind(result)}.",
                )
                return None
            if not _equal(action, given):
                self._say("action", "step changes the action it is given; copy it first.")
            if not _equal(observation, before):
                self._remark("alias", "step changes the observation returned before; reap copies each one in time.")
            observation, reward, terminated, truncated, info = result
            self._look("step", observation, t)
            self._judge(reward, terminated, truncated, info, t)
            story.append((_copy(observation), _copy(reward), bool(terminated), bool(truncated)))
            if self._wrong:
                return None
            if terminated or truncated:
                episodes += 1
                observation = self._reset(None)
                if observation is None:
                    return None
                story.append(_copy(observation))
        if not episodes:
            self._remark(
                "endless", f"No episode ended in {steps} steps; if that is meant, consider max_frames_per_traj."
            )
        return story

    def _remark(self, topic: str, sentence: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            self._remarks.append(sentence)

    def _reset(self, seed: int | None) -> Any:
        try:
            result = self.env.reset(seed=seed)
        except TypeError as cause:
            self._say(
                "reset", f"reset must take a keyword seed: reset(*, seed=None, options=None). It raised {cause!r}."
            )
            return None
        except Exception as cause:
            self._say("reset", f"reset raised {cause!r}.")
            return None
        if not isinstance(result, tuple) or len(result) != 2:
            self._say("reset tuple", f"reset must return (observation, info), got {_kind(result)}.")
            return None
        observation, info = result
        if not isinstance(info, Mapping):
            self._say("info", f"reset must return a dict as info, got {_kind(info)}.")
        self._look("reset", observation, None)
        return observation

    def _look(self, call: str, observation: Any, t: int | None) -> None:
        where = f"{call} returned" if t is None else f"At step {t}, {call} returned"
        space = self.env.observation_space
        for path, part, value in _leaves(space, observation):
            name = f"observation{path}"
            if value is _ABSENT:
                self._say("missing" + path, f"{where} no {name}; the observation_space has it.")
                continue
            shape, dtype = part.shape, part.dtype
            if shape is None or dtype is None or not isinstance(part, _ARRAYS):
                if not part.contains(value):
                    self._say("outside" + path, f"{where} {name} = {value!r}, which is not in its space {part}.")
                continue
            array = np.asarray(value)
            if array.shape != tuple(shape):
                self._say("shape" + path, f"{where} {name} of shape {list(array.shape)}; its space says {list(shape)}.")
            elif not np.can_cast(array.dtype, dtype, "same_kind"):
                self._say("dtype" + path, f"{where} {name} of dtype {array.dtype}; its space says {dtype}.")
            elif np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
                self._say("nan" + path, f"{where} {name} with NaN in it.")
            elif not part.contains(array.astype(dtype) if array.shape else array.astype(dtype)[()]):
                self._say("bounds" + path, f"{where} {name} outside the bounds of its space {part}.")

    def _judge(self, reward: Any, terminated: Any, truncated: Any, info: Any, t: int) -> None:
        try:
            number = np.asarray(reward, np.float64)
        except (TypeError, ValueError):
            self._say("reward", f"At step {t} the reward is {reward!r}, not a number.")
        else:
            if number.size != 1:
                self._say("reward", f"At step {t} the reward has {number.size} numbers; one is expected.")
            elif not np.isfinite(number).all():
                self._say("reward", f"At step {t} the reward is {float(number.reshape(-1)[0])}.")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, (bool, np.bool_)):
                self._say(name, f"At step {t}, {name} is {flag!r}; True or False is expected.")
        if not isinstance(info, Mapping):
            self._say("info", f"At step {t} info is {_kind(info)}; a dict is expected.")


def _compare(first: list[Any], again: list[Any] | None, wrong: list[str]) -> None:
    if again is None or len(first) != len(again):
        wrong.append(f"Two copies with the same seed ({_SEED}) and actions had episodes of different length.")
        return
    for t, (a, b) in enumerate(zip(first, again)):
        if not _equal(a, b):
            what = "first observation" if t == 0 else f"step {t}"
            wrong.append(
                f"Two copies with the same seed ({_SEED}) and actions differ at the {what}: seed every random draw."
            )
            return


def _lives(env: gym.Env[Any, Any], wrong: list[str]) -> None:
    for time in ("once", "twice"):
        try:
            env.close()
        except Exception as cause:
            wrong.append(f"close, called {time}, raised {cause!r}.")
            return


def _fits(make_env: Callable[[], Any], wrong: list[str]) -> None:
    try:
        as_env(make_env).close()
    except ReapError as cause:
        wrong.append(f"reap has no form for it: {cause}.")


_ABSENT = object()
_ARRAYS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def _leaves(space: gym.Space[Any], value: Any, path: str = "") -> list[tuple[str, gym.Space[Any], Any]]:
    if isinstance(space, gym.spaces.Dict):
        found = []
        for name, part in space.spaces.items():
            inside = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            found += _leaves(part, inside, f"{path}[{name!r}]")
        return found
    if isinstance(space, gym.spaces.Tuple):
        found = []
        for i, part in enumerate(space.spaces):
            inside = value[i] if isinstance(value, (tuple, list)) and i < len(value) else _ABSENT
            found += _leaves(part, inside, f"{path}[{i}]")
        return found
    return [(path, space, value)]


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_copy(v) for v in value)
    return np.array(value, copy=True) if isinstance(value, (np.ndarray, np.generic, int, float, bool)) else own(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_equal, a, b))
    if getattr(type(a), "__eq__") is object.__eq__:  # noqa: B009
        return type(a) is type(b)  # objects that cannot be compared
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f"))


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
