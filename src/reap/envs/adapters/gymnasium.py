"""Gymnasium: `gym.Env`s as lanes, and `GymEnv`, the class that users call.

GymLanes   N separate envs, stepped one after another, whose results are written straight into slot rows
GymEnv     makes these lanes from an id, an env or a vector env
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registered

from reap.core.env import Env, Rows
from reap.core.slot import Row
from reap.envs.adapters.atari import UNDRAWN, undrawn_step
from reap.envs.adapters.gymnasium_checks import unchecked_step
from reap.envs.adapters.gymnasium_state import noting_actions, restore_env, saved_env
from reap.envs.adapters.gymnasium_vector import VectorLanes
from reap.envs.base import EnvBase
from reap.envs.gym_registry import registered
from reap.envs.info import InfoKeys, info_entry, info_leaves
from reap.envs.spaces import Actions, Observations, checked_space, fit
from reap.errors import ReapError, SpecMismatch, UsageError, WrongArgument, as_raised
from reap.seeding import restart_seed
from reap.spec import EnvSpec, Key, Leaf, numpy_dtype, show


class GymLanes(Env):
    """N `gym.Env`s with the same spaces, one lane each.

    With `truncates`, probabilities given in place of a one-hot action are truncated to integers before the argmax, as
    TorchRL does.
    """

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        *,
        categorical: bool = False,
        info_keys: InfoKeys = (),
        batched: bool = False,
        truncates: bool = False,
    ) -> None:
        if not envs:
            raise UsageError("an env needs at least one lane")
        self.envs = list(envs)
        if len({id(env) for env in self.envs}) < len(self.envs):
            raise UsageError("several lanes are the same env object; give a factory that makes a new one each time")
        self._settings: dict[str, Any] = {"categorical": categorical, "info_keys": info_keys}
        self._truncates = truncates
        first = self.envs[0]
        observation_space, action_space = (checked_space(first, what) for what in ("observation_space", "action_space"))
        for lane, env in enumerate(self.envs[1:], 1):
            for what in ("observation_space", "action_space"):
                mine, theirs = getattr(first, what), checked_space(env, what)
                if mine != theirs:
                    raise SpecMismatch(f"lane {lane} has {what} {theirs}, lane 0 has {mine}")
        self._observations = Observations(observation_space, categorical=categorical, loose=True)
        self._actions = Actions(action_space, categorical=categorical)
        self._info = info_leaves(info_keys, self._observations.leaves, first)
        self._info_at = len(self._observations.leaves)
        self.spec = EnvSpec(
            observation={**self._observations.leaves, **self._info},
            action=self._actions.leaves,
            lanes=len(self.envs),
            batched=batched,
            side=frozenset(self._info),
        )
        self._steps: list[Callable[[Any], Any]] = [noting_actions(env, env.step) for env in self.envs]
        self._unseen_steps = [*self._steps]  # steps for when the observations are not read
        self.checked = set(range(len(self.envs)))  # lanes whose Gymnasium wrappers still check their steps
        self._decode: Callable[..., Sequence[Any]] = self._actions.decoder(self._actions.leaves)
        self._current_lane: Any = [-1]
        self.remake: Callable[[int], gym.Env[Any, Any]] | None = None  # makes the env of a lane again, if known how
        self._on_failure: Callable[..., Any] | None = None  # decides about an env that raised, if set
        self._rebuild_count = 0
        self._last_seeds: dict[int, int] = {}  # by lane, of the lanes that were seeded

    def report_lane(self, memory: Any) -> None:
        self._current_lane = memory

    def wrap_first(self, wrapper: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]) -> None:
        """Put a wrapper around the env of the first lane, before any lane is stepped."""
        self._set_env(0, wrapper(self.envs[0]))

    def _set_env(self, lane: int, env: gym.Env[Any, Any]) -> None:
        self.envs[lane] = env
        self._steps[lane] = self._unseen_steps[lane] = noting_actions(env, env.step)
        self.checked.add(lane)

    def joined(self, others: Sequence[GymLanes]) -> GymLanes:
        """Join these lanes and those of `others` into one batched env."""
        for other in others:
            if other._settings != self._settings:
                raise SpecMismatch(f"lanes are encoded differently: {self._settings} and {other._settings}")
        envs = [e for lanes in (self, *others) for e in lanes.envs]
        return GymLanes(envs, batched=True, truncates=self._truncates, **self._settings)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        decode = self._decode = self._actions.decoder(action)
        if self._truncates:
            dtypes = [(leaf.one_hot, action[key].dtype) for key, leaf in self._actions.leaves.items()]
            floats = [one_hot and dtype is not None and dtype.is_floating_point for one_hot, dtype in dtypes]
            if any(floats):
                self._decode = lambda *arrays: decode(*(a.astype(np.int64) if f else a for a, f in zip(arrays, floats)))

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        shape, dtype = self._observations.plain
        if seeds is not None:
            self._last_seeds.update(zip(lanes, seeds))
        i, lane, found = 0, 0, None
        try:
            for i, lane in enumerate(lanes):
                self._current_lane[0], found = lane, None
                env = self.envs[lane]
                found = env.reset() if seeds is None else env.reset(seed=seeds[i])
                if found.__class__ is not tuple and not isinstance(found, (tuple, list)):  # a dict unpacks to its keys
                    raise _not_a_reset(found)
                observation, info = found
                if lane in self.checked:
                    self._skip_checks(lane)
                if observation.__class__ is np.ndarray and observation.dtype is dtype and observation.shape == shape:
                    into[0][lane] = observation
                else:
                    self._observations.write(observation, into, lane)
                if self._info:
                    self._write_info(info, into, lane)
        except Exception as cause:
            wrong = isinstance(found, (tuple, list)) and len(found) != 2
            what = "env.reset raised" if found is None else "what env.reset returned cannot be read:"
            error = as_raised(what, _not_a_reset(found) if wrong else cause).at(lane=lane)
            if self._on_failure is None:
                raise error from error.__cause__
            self._replace_env(lane, error, into)
            self.reset(list(lanes)[i + 1 :], into, None if seeds is None else list(seeds)[i + 1 :])
        self._current_lane[0] = -1

    def leave_out_checks(self) -> None:
        """Skip Gymnasium's checks in lanes that have passed them, also if another library made the steps so far."""
        for lane in [*self.checked]:
            self._skip_checks(lane)

    def _skip_checks(self, lane: int) -> None:
        env = self.envs[lane]
        step = unchecked_step(env)
        if step is not None:
            self._steps[lane] = noting_actions(env, step)
            self._unseen_steps[lane] = noting_actions(env, undrawn_step(env, step))
            self.checked.remove(lane)

    def step(self, lanes: Sequence[int], row: Row, *, unseen: bool = False) -> list[int]:
        """Step the lanes. With `unseen`, the observations are not read and may be left out."""
        actions = self._decode(*row.action)
        steps = self._unseen_steps if unseen else self._steps
        write, successors, reward = self._observations.write, row.next, row.reward
        first, infos, at = successors[0], self._info, self._current_lane
        shape, dtype = self._observations.plain
        ended: list[int] = []
        lane = 0
        try:
            for lane in lanes:
                at[0] = lane
                observation, r, terminated, truncated, info = steps[lane](actions[lane])
                # An array of exactly the right shape and dtype is the common case: a bare row assignment.
                if observation.__class__ is np.ndarray and observation.dtype is dtype and observation.shape == shape:
                    first[lane] = observation
                elif observation is not UNDRAWN:
                    write(observation, successors, lane)
                try:
                    reward[lane] = r
                except (TypeError, ValueError):
                    reward[lane] = np.asarray(r).item()  # an array of one number counts as a number
                if r is None:  # NumPy would make it NaN
                    raise SpecMismatch("env.step returned None as the reward")
                if infos:
                    self._write_info(info, successors, lane)
                if terminated or truncated:
                    row.terminated[lane], row.truncated[lane], row.done[lane] = terminated, truncated, True
                    ended += [lane]
        except Exception as cause:
            by_env = _raised_by_env(cause)
            what = "env.step raised" if by_env else "what env.step returned cannot be read:"
            if not by_env and "unpack" in str(cause):
                what = f"env.step must return (observation, reward, terminated, truncated, info); {what}"
            error = as_raised(what, cause).at(lane=lane)
            if self._on_failure is None:
                raise error from error.__cause__
            self._replace_env(lane, error)
            ended = [*ended, lane, *self._step_rest(lane, lanes, row)]
        at[0] = -1
        return ended

    # ---- envs that raised -------------------------------------------------------------------------------------------

    def rebuild_lanes(self, replace: Callable[..., Any]) -> bool:
        if self.remake is None or any(leaf.loose for leaf in self.spec.observation.values()):
            return False
        self._on_failure, self.reports_cuts = replace, True
        return True

    def restarts(self) -> int:
        return self._rebuild_count

    def _step_rest(self, lane: int, lanes: Sequence[int], row: Row) -> list[int]:
        """Mark that `lane` has made no frame, and step the lanes that come after it."""
        row.leave_out([lane])
        rest = list(lanes)[list(lanes).index(lane) + 1 :]
        return self.step(rest, row) if rest else []

    def _replace_env(self, lane: int, error: ReapError, into: Rows | None = None) -> None:
        """Replace the env of a lane that raised. With `into`, also write the first observation of a new episode."""
        remake, replace = self.remake, self._on_failure
        assert remake is not None
        assert replace is not None
        with contextlib.suppress(Exception):  # the env has failed already
            self.envs[lane].close()

        def made() -> tuple[gym.Env[Any, Any], Any]:
            try:
                new = remake(lane)
                for what in ("observation_space", "action_space"):
                    mine, theirs = getattr(self.envs[lane], what), getattr(new, what)
                    if mine != theirs:
                        raise SpecMismatch(
                            f"lane {lane} was rebuilt with a different {what}: {theirs} instead of {mine}"
                        )
                seed = self._last_seeds.get(lane)
                if seed is not None:
                    return new, new.reset(seed=restart_seed(seed, self._rebuild_count + 1))
                return new, None if into is None else new.reset()
            except Exception as cause:
                again = as_raised("rebuilding the env of the lane raised", cause).at(lane=lane)
                raise again from again.__cause__

        env, first = replace(lane, error, made)
        self._set_env(lane, env)
        self._rebuild_count += 1
        if into is not None:
            observation, info = first
            self._observations.write(observation, into, lane)
            if self._info:
                self._write_info(info, into, lane)

    def open_state(self) -> Any:
        return [self.lane_state(lane) for lane in range(len(self.envs))]

    def load_open_state(self, state: Any) -> None:
        for lane, one in zip(range(len(self.envs)), state):
            self.load_lane_state(lane, one)

    def lane_state(self, lane: int) -> Any:
        return saved_env(self.envs[lane], lane)

    def load_lane_state(self, lane: int, state: Any) -> None:
        restore_env(state, self.envs[lane])
        self._set_env(lane, self.envs[lane])
        self._skip_checks(lane)

    def _write_info(self, info: Mapping[str, Any], arrays: Rows, lane: int) -> None:
        for array, (key, leaf) in zip(arrays[self._info_at :], self._info.items()):
            value = info_entry(info, key)
            array[lane] = (
                0 if value is None else fit(value, leaf.shape, numpy_dtype(leaf.dtype), what=f"info {show(key)}")
            )

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all, also if one of them raises
            for env in reversed(self.envs):
                stack.callback(env.close)


class FrameSkip(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats each action, sums the rewards, and stops early if the episode ends."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        if times < 1:
            raise UsageError(f"frame_skip must be at least 1, got {times}")
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class GymEnv(EnvBase):
    """A Gymnasium env, made from an id or wrapped around an env.

    >>> env = GymEnv("CartPole-v1")
    >>> env.rollout(3)["observation"].shape
    torch.Size([3, 4])

    Args:
        env: a Gymnasium id or its registered spec (further keywords go to `gymnasium.make`), a `gymnasium.Env` or a
            `VectorEnv`.
        num_envs: the number of lanes, with an id. With `vectorization_mode` they come from `gymnasium.make_vec`.
        categorical_action_encoding: encode discrete spaces as an index instead of one-hot.
        frame_skip: repeat each action this many times and sum the rewards.
        from_pixels: observe the image from `render()` as "pixels", in place of the env's own observations, or beside
            them with `pixels_only=False`.
        info_keys: info entries to keep as columns: names (float32 numbers), or a mapping from name to a dtype, a
            (dtype, shape) or a space. Missing entries are zero. A tuple names an entry of a nested dict; "episode"
            stands for all entries that Gymnasium's `RecordEpisodeStatistics` adds when an episode ends.
        device: where to place the tensors that `reset`, `step` and `rollout` return.
    """

    def __init__(
        self,
        env: str | Registered | gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any],
        *,
        num_envs: int | None = None,
        categorical_action_encoding: bool = False,
        frame_skip: int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
        info_keys: InfoKeys = (),
        device: Any = None,
        **make_kwargs: Any,
    ) -> None:
        settings: dict[str, Any] = {"categorical": categorical_action_encoding, "info_keys": info_keys}
        if isinstance(env, str):
            env = registered(env)
        if not isinstance(env, Registered) and (make_kwargs or num_envs is not None):
            extra = sorted(make_kwargs) or ["num_envs"]
            raise WrongArgument(
                f"{extra} are arguments of gymnasium.make; they have no effect on an env that is already made"
            )
        if isinstance(env, Registered) and "vectorization_mode" in make_kwargs:
            env = gym.make_vec(env, num_envs or 1, **make_kwargs)
        if isinstance(env, gym.vector.VectorEnv):
            if frame_skip not in (None, 1) or from_pixels:
                raise UsageError("frame_skip and from_pixels wrap single envs; wrap them before making the vector env")
            super().__init__(VectorLanes(env, **settings), device=device)
            return
        if isinstance(env, Registered):
            if from_pixels:
                make_kwargs.setdefault("render_mode", "rgb_array")
            envs = [gym.make(env, **make_kwargs) for _ in range(num_envs or 1)]
        elif isinstance(env, gym.Env):
            envs = [env]
        else:
            raise WrongArgument(f"GymEnv takes an id or a gymnasium.Env, got {type(env).__name__}")
        if frame_skip not in (None, 1):
            envs = [FrameSkip(one, frame_skip or 0) for one in envs]
        if from_pixels:
            envs = [_with_pixels(one, pixels_only) for one in envs]
        super().__init__(GymLanes(envs, batched=num_envs is not None, **settings), device=device)


_READERS = (Observations.write.__code__, GymLanes._write_info.__code__)


def _raised_by_env(cause: Exception) -> bool:
    """Return whether the code of an env raised in `step`, and not the code here that reads what it returned."""
    called = cause.__traceback__.tb_next if cause.__traceback__ is not None else None
    return called is not None and called.tb_frame.f_code not in _READERS


def _not_a_reset(found: Any) -> SpecMismatch:
    got = f"a {type(found).__name__} of {len(found)}" if isinstance(found, (tuple, list)) else type(found).__name__
    return SpecMismatch(f"env.reset must return (observation, info), got {got}")


def _with_pixels(env: gym.Env[Any, Any], only: bool) -> gym.Env[Any, Any]:
    env.reset()  # some envs can render only after a reset, and the wrapper renders to learn the shape
    return gym.wrappers.AddRenderObservation(env, render_only=only, render_key="pixels", obs_key="observation")
