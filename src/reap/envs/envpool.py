"""EnvPool: its C++ envs as lanes.

EnvPool resets an ended env on its next step, and can reset or step any subset of its envs when used synchronously. So
the loop's resets are passed on, and no step is spent on them. Asynchronous pools (`batch_size < num_envs`) answer
whoever is ready and are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reap.core.env import Env, Rows
from reap.core.slot import Row
from reap.envs.base import EnvBase
from reap.envs.info import InfoKeys, info_leaves
from reap.envs.spaces import Actions, Observations, fit
from reap.errors import ReapError, UsageError, WorkerRaised, missing
from reap.spec import EnvSpec, Key, Leaf, numpy_dtype


def is_envpool(thing: Any) -> bool:
    """An env made by `envpool.make`, without importing envpool to find out."""
    return all(hasattr(thing, name) for name in ("recv", "send", "async_reset", "all_env_ids"))


class EnvPoolLanes(Env):
    """A synchronous EnvPool env, one lane for each of its envs."""

    def __init__(self, env: Any, *, categorical: bool = False, info_keys: InfoKeys = ()) -> None:
        self.env = env
        config = env.spec.config
        self._count = int(config.num_envs)
        if int(config.batch_size) not in (0, self._count):
            raise UsageError(
                f"EnvPool answers {config.batch_size} of {self._count} envs at a time; leave batch_size out"
            )
        self._every = np.arange(self._count)
        self._observations = Observations(env.observation_space, categorical=categorical)
        self._actions = Actions(env.action_space, categorical=categorical)
        self._info = info_leaves(info_keys, self._observations.leaves)
        self._decode: Callable[..., Any] = self._actions.batch_decoder(self._actions.leaves)
        self.spec = EnvSpec(
            observation={**self._observations.leaves, **self._info},
            action=self._actions.leaves,
            lanes=self._count,
            batched=True,
            side=frozenset(self._info),
        )

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        self._decode = self._actions.batch_decoder(action)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        if seeds is not None:
            self._seed(seeds)
        chosen = np.asarray(lanes, np.int32)
        try:
            observation, info = self.env.reset(chosen)
        except Exception as cause:
            raise WorkerRaised(f"env.reset raised {cause!r}") from cause
        self._write(observation, info, into)

    def _seed(self, seeds: Sequence[int]) -> None:
        if not hasattr(self.env, "seed"):
            raise UsageError("this EnvPool takes its seed when it is made: envpool.make(…, seed=…)")
        self.env.seed([int(seed) % 2**31 for seed in seeds])

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
        except ReapError:
            raise
        except Exception as cause:
            raise WorkerRaised(f"env.step raised {cause!r}") from cause
        done = terminated | truncated
        if not done.any():
            return []
        row.terminated[at], row.truncated[at], row.done[at] = terminated, truncated, done
        return sorted(self._every[at][done].tolist())

    def _write(self, observation: Any, info: Mapping[str, Any], arrays: Rows) -> Any:
        """Write what came back; returns which lanes it was: a slice when all of them, in order."""
        ids = info["env_id"]
        whole = len(ids) == self._count and bool((ids == self._every).all())
        at: Any = slice(None) if whole else ids
        self._observations.write_some(observation, arrays, at, len(ids))
        first = len(self._observations.leaves)
        for array, (key, leaf) in zip(arrays[first:], self._info.items()):
            value = info.get(key[0])
            wanted = (len(ids), *leaf.shape)
            array[at] = 0 if value is None else fit(value, wanted, numpy_dtype(leaf.dtype), f"info {key[0]!r}")
        return at

    def close(self) -> None:
        self.env.close()


class EnvPoolEnv(EnvBase):
    """An EnvPool task as lanes, by its id.

    >>> env = EnvPoolEnv("CartPole-v1", num_envs=256)

    Args:
        task: an EnvPool id, or what `envpool.make` returned.
        num_envs: how many lanes.
        categorical_action_encoding: discrete spaces as an index instead of one-hot.
        info_keys: info entries to keep as columns, as for `GymEnv`.
        **make_kwargs: go to `envpool.make`.
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
            task = envpool.make(task, env_type="gymnasium", num_envs=num_envs or 1, **make_kwargs)
        lanes = EnvPoolLanes(task, categorical=categorical_action_encoding, info_keys=info_keys)
        super().__init__(lanes, device=device)
