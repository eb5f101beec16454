"""JAX envs as lanes: gymnax and brax envs, vmapped over lanes and compiled once.

    torch action ── dlpack ──► jit(vmap(step)) ── dlpack ──► torch rows          no NumPy in between

gymnax   `step_env` and `reset_env` are called, which never reset by themselves, so the true last observation is kept.
         From 1.0 on `is_truncated` reports the time limit. Before, `done` means either: an end at
         `params.max_steps_in_episode` is truncated, and also terminated only if `is_terminal` holds without the limit
brax     `done` with `info["truncation"]` is truncated, without it terminated. An AutoResetWrapper is refused

Every lane has a key, made from its seed. Episode `e` has the key `fold_in(lane's key, e)`, and step `t` of it
`fold_in(episode's key, t)`; the reset is step 0. So the lane's seed, the episode's number and the actions determine an
episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from reap.core.resume import CannotResume
from reap.envs.adapters.torch_native import TorchLanes
from reap.envs.base import EnvBase
from reap.envs.spaces import Observations
from reap.errors import CorruptState, UsageError, WrongArgument, missing
from reap.seeding import chain, fresh_seed
from reap.spec import torch_dtype

Reset = Callable[[Any], tuple[Any, Any]]  # key → observation, state
Step = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any]]  # key, state, action → obs, state, reward, flags


def is_gymnax(thing: Any) -> bool:
    """Whether this is a gymnax env. gymnax's wrappers are not: their class lacks these methods and forwards them."""
    return all(hasattr(type(thing), name) for name in ("reset_env", "step_env", "action_space"))


def is_brax(thing: Any) -> bool:
    """Whether this is a brax env."""
    # brax's size properties perform a reset when they are read; getattr_static does not read them
    names = ("observation_size", "action_size", "reset", "step")
    return not isinstance(thing, type) and all(inspect.getattr_static(thing, name, None) for name in names)


class JaxBatch:
    """N copies of a functional env, with the protocol of `reap.envs.adapters.torch_native`."""

    def __init__(self, env: Any, params: Any, num_envs: int, seed: int | None, *, categorical: bool) -> None:
        try:
            import jax
        except ImportError:
            raise missing("jax", "jax") from None
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise WrongArgument(f"num_envs must be a whole number of at least 1, got {num_envs!r}")
        self._jax, self.num_envs = jax, num_envs
        if is_gymnax(env):
            params = env.default_params if params is None else params
            reset, step, action_space = _gymnax(env, params)
            seen = env.observation_space(params)
        else:
            if params is not None:
                raise WrongArgument("params are for gymnax envs; a brax env has its own")
            reset, step, action_space, seen = *_brax(env), None
        self.single_action_space = _action_space(action_space)
        like, _ = jax.eval_shape(reset, jax.random.PRNGKey(0))
        self.single_observation_space = _observation_space(seen, like)
        self._compile(reset, step, categorical)
        self._keys = jax.numpy.zeros((num_envs, 2), "uint32")
        self._episode = jax.numpy.zeros(num_envs, "int32")
        self._run: Any = None  # per lane: steps made in this episode, env state
        self.seed(range(num_envs), chain(fresh_seed() if seed is None else seed, num_envs)[0])
        self.device = from_dlpack(self._episode).device

    def _compile(self, reset: Reset, step: Step, categorical: bool) -> None:
        jax, jnp = self._jax, self._jax.numpy
        leaves = Observations(self.single_observation_space, categorical=categorical)
        self._leaves = list(zip(leaves.paths, leaves.leaves.values()))
        wanted = self.single_action_space
        self._action_dtype = torch.int32 if isinstance(wanted, gym.spaces.Discrete) else torch_dtype(wanted.dtype)

        def batch_leaves(observation: Any) -> list[Any]:
            """Return one lane's leaves in the form they have in a batch."""
            found = []
            for path, leaf in self._leaves:
                value = observation
                for part in path:
                    value = value[part]
                if leaf.one_hot:
                    value = jax.nn.one_hot(value, leaf.shape[-1], dtype=jnp.int32)
                found.append((value.astype(jnp.int8) if value.dtype == bool else value).reshape(leaf.shape))
            return found

        def step_key(key: Any, episode: Any, t: Any) -> Any:
            return jax.random.fold_in(jax.random.fold_in(key, episode), t)

        def reset_lane(mask: Any, key: Any, episode: Any) -> tuple[Any, ...]:
            episode = episode + mask
            observation, state = reset(step_key(key, episode, 0))
            return batch_leaves(observation), episode, (jnp.int32(0), state)

        def step_lane(key: Any, episode: Any, run: Any, action: Any) -> tuple[Any, ...]:
            t, state = run
            t = t + 1
            observation, state, reward, terminated, truncated = step(
                step_key(key, episode, t), state, action.reshape(wanted.shape)
            )
            flags = (jnp.asarray(x).reshape(()).astype(bool) for x in (terminated, truncated))
            return batch_leaves(observation), (t, state), jnp.asarray(reward, jnp.float32).reshape(()), *flags

        def select(mask: Any, new: Any, old: Any) -> Any:
            def leaf(a: Any, b: Any) -> Any:
                return jnp.where(mask.reshape(-1, *(1,) * (jnp.ndim(a) - 1)), a, b)

            return jax.tree.map(leaf, new, old)

        self._reset_lanes, self._step_lanes = jax.jit(jax.vmap(reset_lane)), jax.jit(jax.vmap(step_lane))
        self._select = jax.jit(select)

    def seed(self, lanes: Sequence[int], seeds: Sequence[int]) -> None:
        """Give `lanes` new keys, and count their episodes from 0 again."""
        chosen = np.asarray(lanes)
        keys = self._jax.vmap(self._jax.random.PRNGKey)(np.array([seed % 2**32 for seed in seeds], np.uint32))
        self._keys = self._keys.at[chosen].set(keys)
        self._episode = self._episode.at[chosen].set(-1)

    def reset(self, mask: Tensor) -> Any:
        """Begin new episodes where `mask` is True, and return the observations of all lanes."""
        begun = self._jax.numpy.from_dlpack(mask)
        observation, self._episode, run = self._reset_lanes(begun, self._keys, self._episode)
        self._run = run if self._run is None else self._select(begun, run, self._run)
        return self._to_torch(observation)

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Step every lane, and return observation, reward, terminated and truncated."""
        given = self._jax.numpy.from_dlpack(action.to(self._action_dtype).contiguous())
        observation, self._run, *rest = self._step_lanes(self._keys, self._episode, self._run, given)
        reward, terminated, truncated = map(from_dlpack, rest)
        return self._to_torch(observation), reward, terminated, truncated

    def get_state(self) -> list[tuple[str, list[int], Tensor]]:
        """Return keys, episode numbers and env states of all lanes, each array as its dtype, shape and bytes."""
        found = []
        for leaf in self._jax.tree.leaves((self._keys, self._episode, self._run)):
            if self._jax.numpy.issubdtype(leaf.dtype, self._jax.dtypes.prng_key):
                raise CannotResume("this JAX env has typed random keys in its state, which cannot be saved as arrays")
            array = np.ascontiguousarray(leaf)
            data = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
            found.append((array.dtype.name, list(array.shape), data))
        return found

    def set_state(self, state: Sequence[tuple[str, Sequence[int], Tensor]]) -> None:
        """Restore what `get_state` returned."""
        jnp, tree = self._jax.numpy, self._jax.tree
        here, structure = tree.flatten((self._keys, self._episode, self._run))
        looks = [(np.dtype(leaf.dtype).name, list(leaf.shape)) for leaf in here]
        if looks != [(name, list(shape)) for name, shape, _ in state]:
            raise CorruptState("the saved state belongs to another JAX env; nothing was loaded")
        arrays = [
            jnp.asarray(np.frombuffer(data.numpy().tobytes(), leaf.dtype).reshape(leaf.shape))
            for leaf, (_, _, data) in zip(here, state)
        ]
        self._keys, self._episode, self._run = tree.unflatten(structure, arrays)

    def _to_torch(self, observation: list[Any]) -> Any:
        shown: Any = {}
        for (path, leaf), value in zip(self._leaves, observation):
            tensor = from_dlpack(value).to(leaf.dtype)  # jax has no int64 by default
            if not path:
                return tensor
            inner = shown
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = tensor
        return shown


def _gymnax(env: Any, params: Any) -> tuple[Reset, Step, Any]:
    limit = getattr(params, "max_steps_in_episode", None)
    has_truncated = hasattr(env, "is_truncated")
    asks_env = hasattr(env, "is_terminal") and hasattr(params, "replace") and limit is not None and not has_truncated
    unlimited = params.replace(max_steps_in_episode=np.iinfo(np.int32).max) if asks_env else params

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, state, reward, done, _ = env.step_env(key, state, action, params)
        if has_truncated:
            return observation, state, reward, done, env.is_truncated(state, params)
        if limit is None or not hasattr(state, "time"):
            return observation, state, reward, done, False
        at_limit = done & (state.time >= limit)
        over = done & ~at_limit
        if asks_env:
            over = over | at_limit & env.is_terminal(state, unlimited)
        return observation, state, reward, over, at_limit

    return lambda key: env.reset_env(key, params), step, env.action_space(params)


def _brax(env: Any) -> tuple[Reset, Step, Any]:
    layer = env
    while layer is not None:
        name = type(layer).__name__
        if "AutoReset" in name or "Vmap" in name:
            raise UsageError(
                f"{name} resets or vectorises the env, which reap does itself: pass JaxEnv the env without it "
                f"(auto_reset=False)"
            )
        layer = getattr(layer, "env", None)

    def reset(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return state.obs, state

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        state = env.step(state, action)
        done = state.done > 0
        cut = done & (state.info.get("truncation", 0) > 0)
        return state.obs, state, state.reward, done & ~cut, cut

    return reset, step, gym.spaces.Box(-1, 1, (int(env.action_size),), np.float32)


def _action_space(space: Any) -> gym.Space[Any]:
    if hasattr(space, "n"):
        return gym.spaces.Discrete(int(space.n))
    if hasattr(space, "low"):
        dtype = np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high))
        return gym.spaces.Box(low, high, tuple(space.shape), dtype.type)
    raise UsageError(f"a JAX env takes one action array: its space must be Discrete or a Box, not {space}")


def _observation_space(declared: Any, like: Any) -> gym.Space[Any]:
    """Return the space of what the env really returns. From the declared space only a Discrete's `n` is used."""
    if isinstance(like, Mapping):
        parts = getattr(declared, "spaces", None) or {}
        return gym.spaces.Dict({name: _observation_space(parts.get(name), part) for name, part in like.items()})
    if not hasattr(like, "shape"):
        raise UsageError(f"a JAX env's observation must be an array or a dict of arrays, not {type(like).__name__}")
    dtype = np.dtype(like.dtype)
    if hasattr(declared, "n") and dtype.kind in "iu" and like.shape == ():
        return gym.spaces.Discrete(int(declared.n))
    if dtype.kind == "b":
        return gym.spaces.Box(0, 1, like.shape, np.int8)
    info = None if dtype.kind == "f" else np.iinfo(dtype)
    low, high = (-np.inf, np.inf) if info is None else (int(info.min), int(info.max))
    return gym.spaces.Box(low, high, like.shape, dtype.type)


class JaxLanes(TorchLanes):
    """A JaxBatch as lanes: like `TorchLanes`, but each lane has its own seed."""

    env: JaxBatch

    def seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        if seeds is not None:
            self.env.seed(lanes, seeds)

    def open_state(self) -> Any:
        return self.env.get_state()

    def load_open_state(self, state: Any) -> None:
        self.env.set_state(state)


class JaxEnv(EnvBase):
    """N lanes of an env written in JAX for gymnax or brax.

    >>> env, params = gymnax.make("CartPole-v1")
    >>> collector = Collector(JaxEnv(env, params, num_envs=1024, seed=0), policy, frames_per_batch=1024 * 32)

    Args:
        env: a gymnax env, or a brax one that does not reset by itself.
        params: gymnax's env parameters; None: the env's defaults.
        num_envs: how many lanes.
        seed: each lane's key is derived from it, as from `set_seed`; None: a fresh seed.
        categorical_action_encoding: encode discrete spaces as an index (the default here) or one-hot.
    """

    def __init__(
        self,
        env: Any,
        params: Any = None,
        *,
        num_envs: int = 1,
        seed: int | None = None,
        categorical_action_encoding: bool = True,
        device: Any = None,
    ) -> None:
        if not (is_gymnax(env) or is_brax(env)):
            raise WrongArgument(
                f"JaxEnv takes an env with reset_env and step_env (gymnax, without its wrappers) or with "
                f"observation_size, action_size, reset and step (brax), got {type(env).__name__}"
            )
        batch = JaxBatch(env, params, num_envs, seed, categorical=categorical_action_encoding)
        super().__init__(JaxLanes(batch, categorical=categorical_action_encoding), device=device)
