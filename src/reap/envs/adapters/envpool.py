"""EnvPool: its C++ envs as lanes.

EnvPool resets an ended env on its next step. A synchronous pool can also reset or step any subset of its envs, so the
loop's resets are passed on and no step is spent on them. An asynchronous pool (`batch_size < num_envs`) returns the
envs that are ready: there the step that resets an env is masked, and core/lanes/ready.py removes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap.core.columns.batch_columns import check_names
from reap.core.env import Env, Rows
from reap.core.resume import CannotResume
from reap.core.slot import Row
from reap.envs.base import EnvBase
from reap.envs.info import InfoKeys, info_entry, info_leaves
from reap.envs.spaces import Actions, Observations, fit
from reap.errors import UsageError, WrongArgument, missing, raised_by, reraise
from reap.seeding import fresh_seed
from reap.spec import LANE_AT, EnvSpec, Key, Leaf, numpy_dtype, show


def is_envpool(thing: Any) -> bool:
    """Whether this was made by `envpool.make`, without importing envpool."""
    return all(hasattr(thing, name) for name in ("recv", "send", "async_reset", "all_env_ids"))


class EnvPoolLanes(Env):
    """A synchronous EnvPool, one lane for each of its envs: all lanes step together."""

    def __init__(self, env: Any, *, categorical: bool = False, info_keys: InfoKeys = ()) -> None:
        self.env = env
        self._count = int(env.spec.config.num_envs)
        self._lane_ids = np.arange(self._count)
        self._observations = Observations(env.observation_space, categorical=categorical)
        self._actions = Actions(env.action_space, categorical=categorical)
        self._info = info_leaves(info_keys, self._observations.leaves)
        self._decode: Callable[..., Any] = self._actions.decoder(self._actions.leaves, batch=True)
        self.spec = EnvSpec(
            observation={**self._observations.leaves, **self._info},
            action=self._actions.leaves,
            lanes=self._count,
            batched=True,
            side=frozenset(self._info),
        )

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._decode = self._actions.decoder(action, batch=True)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        if seeds is not None:
            self._seed(seeds)
        chosen = np.asarray(lanes, np.int32)
        try:
            observation, info = self.env.reset(chosen)
        except Exception as cause:
            raise raised_by("env.reset raised", cause) from cause
        self._write(observation, info, into)

    def open_state(self) -> Any:
        raise CannotResume("EnvPool's C++ envs cannot save the state of an open episode")

    def _seed(self, seeds: Sequence[int]) -> None:
        """Replace the pool by a new one with these seeds: a pool is seeded when it is made, its `seed` does nothing."""
        spec, config = type(self.env.spec), self.env.spec.config._asdict()
        if "env_seed" not in config:
            raise UsageError("this EnvPool takes its seed when it is made: envpool.make(…, seed=…)")
        config["env_seed"] = [int(seed) % 2**31 for seed in seeds]
        old, self.env = self.env, type(self.env)(spec(spec.gen_config(**config)))
        old.close()

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        actions = self._decode(*row.action)
        try:
            if len(lanes) == self._count:
                observation, reward, terminated, truncated, info = self.env.step(actions)
            else:
                chosen = np.asarray(lanes, np.int32)
                observation, reward, terminated, truncated, info = self.env.step(actions[chosen], chosen)
            at = self._write(observation, info, row.next)
            row.reward[at] = reward
        except Exception as cause:
            reraise("env.step", cause)
        done = terminated | truncated
        if not done.any():
            return []
        row.terminated[at], row.truncated[at], row.done[at] = terminated, truncated, done
        return sorted(self._lane_ids[at][done].tolist())

    def _write(self, observation: Any, info: Mapping[str, Any], arrays: Rows) -> Any:
        """Write the pool's answer, and return the lanes it holds: a slice if these are all lanes in order."""
        ids = info["env_id"]
        whole = len(ids) == self._count and bool((ids == self._lane_ids).all())
        at: Any = slice(None) if whole else ids
        self._write_rows(observation, info, arrays, at, len(ids))
        return at

    def _write_rows(self, observation: Any, info: Mapping[str, Any], arrays: Rows, at: Any, count: int) -> None:
        self._observations.write_batch(observation, arrays, at, count)
        first = len(self._observations.leaves)
        for array, (key, leaf) in zip(arrays[first:], self._info.items()):
            value = info_entry(info, key)
            wanted = (count, *leaf.shape)
            array[at] = 0 if value is None else fit(value, wanted, numpy_dtype(leaf.dtype), f"info {show(key)}")

    def close(self) -> None:
        self.env.close()


class EnvPoolReady(EnvPoolLanes):
    """An asynchronous EnvPool, which returns `batch_size` of its envs at a time, as they become ready."""

    def __init__(self, env: Any, *, categorical: bool = False, info_keys: InfoKeys = ()) -> None:
        super().__init__(env, categorical=categorical, info_keys=info_keys)
        self._lanes, self._count = self._count, int(env.spec.config.batch_size)  # a row holds one batch of answers
        own = self.spec
        check_names(own, {LANE_AT})
        self._lane_leaf = len(own.observation)
        self.spec = dataclasses.replace(
            own,
            observation={**own.observation, LANE_AT: Leaf((), torch.int64)},
            lanes=self._count,
            ready_of=self._lanes,
            rows="skipping",
            single_steps=False,
            single_resets=False,
            side=own.side | {LANE_AT},
        )
        self._reset_next = np.zeros(self._lanes, bool)  # lanes whose next answer is that of a reset
        self._in_hand: np.ndarray[Any, Any] = np.arange(self._lanes, dtype=np.int32)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        """Reset all lanes, and write the first batch that is ready to `into`."""
        try:
            if seeds is None:
                self._await_all()
            else:
                self._seed(seeds)
            self.env.async_reset()
            observation, _, _, _, info = self.env.recv()
        except Exception as cause:
            reraise("env.reset", cause)
        self._receive(observation, info, into)
        self._reset_next[:] = True  # the next answer of the other lanes is their reset
        self._reset_next[self._in_hand] = False

    def _await_all(self) -> None:
        """Wait until every lane has answered. If too few are away to fill a batch, step some others again."""
        while away := self._lanes - len(self._in_hand):
            again = max(self._count - away, 0)
            if again:
                action = np.zeros((again, *self.env.action_space.shape), self.env.action_space.dtype)
                self.env.send(action, self._in_hand[:again])
            self._in_hand = np.concatenate([self._in_hand[again:], self.env.recv()[4]["env_id"]])

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        try:
            self.env.send(self._decode(*row.action), self._in_hand)
            observation, reward, terminated, truncated, info = self.env.recv()
            self._receive(observation, info, row.next)
            row.reward[:] = reward
        except Exception as cause:
            reraise("env.step", cause)
        began = self._reset_next[self._in_hand]
        assert row.mask is not None
        row.mask[began] = False
        done = (terminated | truncated) & ~began
        self._reset_next[self._in_hand] = done
        if done.any():
            row.terminated[:], row.truncated[:], row.done[:] = terminated & done, truncated & done, done
        return []  # the loop must reset no lane: the pool does

    def _receive(self, observation: Any, info: Mapping[str, Any], arrays: Rows) -> None:
        self._in_hand = np.array(info["env_id"], np.int32)
        self._write_rows(observation, info, arrays, slice(None), self._count)
        arrays[self._lane_leaf][:] = self._in_hand


class EnvPoolEnv(EnvBase):
    """An EnvPool task as lanes. With `batch_size` below `num_envs`, lanes are stepped as they become ready.

    >>> env = EnvPoolEnv("CartPole-v1", num_envs=256)

    Args:
        task: an EnvPool id, or a pool made by `envpool.make`.
        num_envs: how many lanes.
        categorical_action_encoding: discrete spaces as an index instead of one-hot.
        info_keys: info entries to keep as columns, as for `GymEnv`.
        **make_kwargs: passed to `envpool.make`. Without `seed`, every pool gets a fresh one (EnvPool's own default is
            42 for all). A given `seed` is used unchanged, by every worker that calls the same factory.
    """

    def __init__(
        self,
        task: Any,
        num_envs: int | None = None,
        *,
        categorical_action_encoding: bool = False,
        info_keys: InfoKeys = (),
        device: Any = None,
        **make_kwargs: Any,
    ) -> None:
        if isinstance(task, str):
            try:
                import envpool
            except ImportError:
                raise missing("envpool", "envpool") from None
            make_kwargs.setdefault("seed", fresh_seed() % 2**31)  # EnvPool's default would be the same in every worker
            task = envpool.make(task, env_type="gymnasium", num_envs=num_envs or 1, **make_kwargs)
        elif make_kwargs or num_envs is not None:
            extra = sorted(make_kwargs) or ["num_envs"]
            raise WrongArgument(
                f"{extra} are arguments of envpool.make; they have no effect on a pool that is already made"
            )
        config = task.spec.config
        lanes = EnvPoolReady if int(config.batch_size) not in (0, int(config.num_envs)) else EnvPoolLanes
        super().__init__(lanes(task, categorical=categorical_action_encoding, info_keys=info_keys), device=device)
