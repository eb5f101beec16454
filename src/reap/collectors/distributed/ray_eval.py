"""RayEvalWorker: an env and a policy in a Ray actor, which plays a rollout each time it receives weights.

submit(weights, max_steps) ──► the actor plays, you go on ──► poll() ──► {"reward": …, "frames": … or None}
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn

from reap._system.forks import guard, refuse_use
from reap._system.messages.pickling import dumps
from reap.arguments import count
from reap.backends.remote.ray import import_ray
from reap.errors import WrongState
from reap.spec import AnyKey
from reap.weights.local import load

_log = logging.getLogger("reap")


class _Player:
    """Runs in the actor: owns the env and the policy, and plays rollouts."""

    def __init__(self, makers: bytes) -> None:
        init_fn, env_maker, policy_maker = pickle.loads(makers)
        if init_fn is not None:
            init_fn()
        self._env = env_maker()
        self._policy = policy_maker(self._env)

    def eval(
        self, weights: Any, max_steps: int, reward_keys: AnyKey, deterministic: bool, break_when_any_done: bool
    ) -> dict[str, Any]:
        if weights is not None:
            load(self._policy, weights)
        kind = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
        with torch.no_grad(), set_interaction_type(kind):
            played = self._env.rollout(max_steps, self._policy, break_when_any_done=break_when_any_done)
        frames = played.get("pixels", None)
        return {"reward": _mean_return(played, reward_keys), "frames": None if frames is None else frames.cpu()}

    def shutdown(self) -> None:
        self._env.close()


def _mean_return(played: TensorDictBase, key: AnyKey) -> float:
    """Return the mean return of the episodes that ended; a lane without one counts with its return so far."""
    steps = played.batch_size[-1]
    reward = played.get(key).reshape(*played.batch_size, -1).double().mean(-1).reshape(-1, steps)
    done = played.get(("next", "done")).reshape(*played.batch_size, -1).any(-1).reshape(-1, steps)
    returns: list[float] = []
    for rewards, ends in zip(reward, done):
        borders = (ends.nonzero().flatten() + 1).tolist() or [steps]
        returns += [float(part.sum()) for part in rewards[: borders[-1]].tensor_split(borders[:-1])]
    return sum(returns) / len(returns)


class RayEvalWorker:
    """Plays rollouts in a Ray actor while training continues in this process.

    Args:
        init_fn: called first in the actor; None: no function is called.
        env_maker: makes the env, in the actor.
        policy_maker: makes the policy from the env, in the actor.
        num_gpus: the number of GPUs the actor requests from Ray.
        reward_keys: the key of the reward.
        name: the actor's name, by which other processes find it (`from_name`); it then outlives this process.
        **remote_kwargs: further options of the actor.
    """

    def __init__(
        self,
        init_fn: Callable[[], Any] | None,
        env_maker: Callable[[], Any],
        policy_maker: Callable[[Any], Any],
        *,
        num_gpus: float = 1,
        reward_keys: AnyKey = ("next", "reward"),
        name: str | None = None,
        **remote_kwargs: Any,
    ) -> None:
        ray = self._ray = import_ray()
        named: Mapping[str, Any] = {} if name is None else {"name": name, "lifetime": "detached"}
        kind = ray.remote(num_gpus=num_gpus, **remote_kwargs)(_Player)
        self._actor = kind.options(**named).remote(dumps((init_fn, env_maker, policy_maker), "env_maker"))
        self._reward, self._pending = reward_keys, None
        guard(self)

    def in_fork(self, why: str) -> None:
        """Refuse every further use. Called in a forked process, whose copy does not own the actor."""
        self._actor = None
        refuse_use(self, why)

    @classmethod
    def from_name(cls, name: str, *, reward_keys: AnyKey = ("next", "reward")) -> RayEvalWorker:
        """Return the worker that another process made under this name."""
        found: RayEvalWorker = object.__new__(cls)
        found._ray = import_ray()
        found._actor = found._ray.get_actor(name)
        found._reward, found._pending = reward_keys, None
        guard(found)
        return found

    def submit(
        self, weights: Any, max_steps: int, *, deterministic: bool = True, break_when_any_done: bool = True
    ) -> None:
        """Start a rollout of up to `max_steps` steps with these weights; drop an earlier result not yet polled."""
        if self._actor is None:
            raise WrongState("this RayEvalWorker is shut down; make a new one")
        count("max_steps", max_steps)
        if isinstance(weights, nn.Module):
            weights = {name: value.detach().cpu() for name, value in weights.state_dict().items()}
        elif isinstance(weights, TensorDictBase):
            weights = weights.detach().cpu().clone()
        self._pending = self._actor.eval.remote(weights, max_steps, self._reward, deterministic, break_when_any_done)

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """Return `{"reward": mean return, "frames": "pixels" or None}`; None without a result in `timeout` seconds."""
        if self._pending is None:
            return None
        ready, _ = self._ray.wait([self._pending], timeout=timeout)
        if not ready:
            return None
        pending, self._pending = self._pending, None
        found: dict[str, Any] = self._ray.get(pending)
        return found

    def shutdown(self) -> None:
        """Close the env and end the actor. May be called twice."""
        actor, self._actor, self._pending = self._actor, None, None
        if actor is None:
            return
        try:
            self._ray.get(actor.shutdown.remote(), timeout=5)
        except Exception:
            _log.warning("RayEvalWorker: its env did not close", exc_info=True)
        with contextlib.suppress(Exception):  # Ray itself may have been shut down
            self._ray.kill(actor)
