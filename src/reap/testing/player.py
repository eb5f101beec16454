"""The player: plays a Gymnasium env with actions from a fixed seed, and records what it sees and what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from reap.testing import generators
from reap.testing.resets import kept_final
from reap.testing.values import copied, equal, kind

SEED = 7


class Player:
    """Plays an env with actions drawn from a fixed seed, and records what it sees."""

    def __init__(self, env: gym.Env[Any, Any], wrong: list[str], remarks: list[str], *, seed: int = SEED) -> None:
        self.env, self._wrong, self._remarks, self._seed = env, wrong, remarks, seed
        self._actions = copy.deepcopy(env.action_space)  # copies of the env may share one space, and so its generator
        self._reported: set[str] = set()
        self.failed = False  # whether anything was wrong
        self.history: list[Any] = []
        self._seen: Any = None  # the last observation

    def _error(self, topic: str, sentence: str) -> None:
        self.failed = True
        if topic not in self._reported:  # once is enough
            self._reported.add(topic)
            self._wrong.append(sentence)

    def _remark(self, topic: str, sentence: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            self._remarks.append(sentence)

    def play(self, steps: int) -> list[Any]:
        """Play all steps; return what was seen."""
        for _ in self.moves(steps):
            pass
        return self.history

    def moves(self, steps: int) -> Iterator[None]:
        """Play one step at a time, until something is wrong."""
        self._actions.seed(self._seed)
        self._reset(self._seed)
        ends = 0
        for t in range(steps):
            if self.failed:
                return
            yield
            if self._step(t):
                ends += 1
                self._reset(None)
        if not ends:
            self._remark(
                "endless", f"No episode ended in {steps} steps; if that is meant, consider max_frames_per_traj."
            )

    def _step(self, t: int) -> bool:
        """Make one step; return whether the episode is over."""
        action, seen = self._actions.sample(), self._seen
        given, before, drawn = copied(action), copied(seen), generators.state()
        try:
            result = self.env.step(action)
        except Exception as cause:
            self._error(
                "step", f"step raised {cause!r} at step {t}, for the action {given!r} from its own action_space."
            )
            return False
        self._check_generators("step", drawn)
        if not isinstance(result, tuple) or len(result) != 5:
            self._error(
                "tuple", f"step must return (observation, reward, terminated, truncated, info), got {kind(result)}."
            )
            return False
        if not equal(action, given):
            self._error("action", "step changes the action it is given; copy it first.")
        if not equal(seen, before):
            self._remark("alias", "step changes the observation returned before; reap copies each one in time.")
        self._seen, reward, terminated, truncated, info = result
        self._check_observation("step", self._seen, t)
        self._check_result(reward, terminated, truncated, info, t)
        if self.failed:
            return False
        over = bool(terminated or truncated)
        self.history.append((copied(self._seen), copied(reward), bool(terminated), bool(truncated)))
        lost = kept_final(self._seen, info) if over else None
        if lost is not None:
            self._error(
                "autoreset",
                f"The env resets itself inside step: at step {t}, with its done flag, it returns another observation "
                f"than the last one of the episode, which is in info[{lost!r}]. Return that one; reap resets.",
            )
        return over

    def _check_generators(self, call: str, before: generators.State) -> None:
        for name in generators.moved(before, generators.state()):
            self._error(
                name,
                f"{call} draws from {name} or seeds it: every env, policy and trainer in the process shares that one. "
                f"Draw from self.np_random, which reset(seed=…) seeds.",
            )

    def _reset(self, seed: int | None) -> None:
        drawn = generators.state()
        try:
            result = self.env.reset(seed=seed)
        except TypeError as cause:
            self._error(
                "reset", f"reset must take a keyword seed: reset(*, seed=None, options=None). It raised {cause!r}."
            )
            return
        except Exception as cause:
            self._error("reset", f"reset raised {cause!r}.")
            return
        self._check_generators("reset" if seed is None else f"reset(seed={seed})", drawn)
        if not isinstance(result, tuple) or len(result) != 2:
            self._error("reset tuple", f"reset must return (observation, info), got {kind(result)}.")
            return
        self._seen, info = result
        if not isinstance(info, Mapping):
            self._error("info", f"reset must return a dict as info, got {kind(info)}.")
        self._check_observation("reset", self._seen, None)
        if not self.failed:
            self.history.append(copied(self._seen))

    def _check_observation(self, call: str, observation: Any, t: int | None) -> None:
        where = f"{call} returned" if t is None else f"At step {t}, {call} returned"
        space = self.env.observation_space
        for path in _undeclared(space, observation):
            topic = f"{where} observation{path}, which its space does not declare; it is not collected."
            self._remark("undeclared" + path, topic)
        for path, part, value in _leaves(space, observation):
            name = f"observation{path}"
            if value is _MISSING:
                self._error("missing" + path, f"{where} no {name}; the observation_space has it.")
                continue
            shape, dtype = part.shape, part.dtype
            if shape is None or dtype is None or not isinstance(part, _ARRAYS):
                if not part.contains(value):
                    self._error("outside" + path, f"{where} {name} = {value!r}, which is not in its space {part}.")
                continue
            try:
                array = np.asarray(value)
            except ValueError:  # NumPy requires nested lists of equal lengths
                self._error("ragged" + path, f"{where} {name} as lists of different lengths; its space says {part}.")
                continue
            if array.dtype == object:
                self._error("object" + path, f"{where} {name} = {value!r}, no array of numbers; its space says {part}.")
            elif array.shape != tuple(shape):
                self._error(
                    "shape" + path, f"{where} {name} of shape {list(array.shape)}; its space says {list(shape)}."
                )
            elif not np.can_cast(array.dtype, dtype, "same_kind"):
                self._error("dtype" + path, f"{where} {name} of dtype {array.dtype}; its space says {dtype}.")
            elif np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
                self._error("nan" + path, f"{where} {name} with NaN in it.")
            elif not part.contains(array.astype(dtype) if array.shape else array.astype(dtype)[()]):
                self._error("bounds" + path, f"{where} {name} outside the bounds of its space {part}.")
            elif array.dtype != dtype and isinstance(value, np.ndarray):
                self._remark(
                    "converted" + path,
                    f"{where} {name} of dtype {array.dtype}; its space says {dtype}. It is converted in every step: "
                    f"return {dtype}.",
                )

    def _check_result(self, reward: Any, terminated: Any, truncated: Any, info: Any, t: int) -> None:
        try:
            number = np.asarray("None" if reward is None else reward, np.float64)  # NumPy would convert None to NaN
        except (TypeError, ValueError):
            self._error("reward", f"At step {t} the reward is {reward!r}, not a number.")
        else:
            if number.size != 1:
                self._error("reward", f"At step {t} the reward has {number.size} numbers; one is expected.")
            elif not np.isfinite(number).all():
                self._error("reward", f"At step {t} the reward is {float(number.reshape(-1)[0])}.")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, (bool, np.bool_)):
                self._error(name, f"At step {t}, {name} is {flag!r}; True or False is expected.")
        if not isinstance(info, Mapping):
            self._error("info", f"At step {t} info is {kind(info)}; a dict is expected.")


_MISSING = object()
_ARRAYS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def _undeclared(space: gym.Space[Any], value: Any, path: str = "") -> list[str]:
    """Return the paths of entries of an observation that its space does not declare."""
    found: list[str] = []
    if isinstance(space, gym.spaces.Dict) and isinstance(value, Mapping):
        found += [f"{path}[{name!r}]" for name in value if name not in space.spaces]
        for name, part in space.spaces.items():
            found += _undeclared(part, value.get(name), f"{path}[{name!r}]")
    elif isinstance(space, gym.spaces.Tuple) and isinstance(value, (tuple, list)):
        for i, (part, inside) in enumerate(zip(space.spaces, value)):
            found += _undeclared(part, inside, f"{path}[{i}]")
    return found


def _leaves(space: gym.Space[Any], value: Any, path: str = "") -> list[tuple[str, gym.Space[Any], Any]]:
    if isinstance(space, gym.spaces.Dict):
        found = []
        for name, part in space.spaces.items():
            inside = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
            found += _leaves(part, inside, f"{path}[{name!r}]")
        return found
    if isinstance(space, gym.spaces.Tuple):
        found = []
        for i, part in enumerate(space.spaces):
            inside = value[i] if isinstance(value, (tuple, list)) and i < len(value) else _MISSING
            found += _leaves(part, inside, f"{path}[{i}]")
        return found
    return [(path, space, value)]
