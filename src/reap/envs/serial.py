"""SerialEnv: several envs joined as the lanes of one env, and stepped one after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reap.arguments import MOST_LANES
from reap.core.device.devices import named_device
from reap.core.env import Env
from reap.envs.accept import as_env, is_env
from reap.envs.adapters.gymnasium import GymLanes
from reap.envs.base import EnvBase
from reap.envs.gym_registry import for_workers
from reap.envs.torchrl.lanes import torchrl_joined
from reap.envs.torchrl.rows import TorchRLEnv
from reap.errors import UsageError, WrongArgument


class SerialEnv(EnvBase):
    """`num_workers` envs in this process, joined as the lanes `[N]` of one env.

    >>> env = SerialEnv(4, lambda: GymEnv("CartPole-v1"))
    >>> env.rollout(10, break_when_any_done=False).batch_size
    torch.Size([4, 10])

    Args:
        num_workers: how many lanes.
        create_env_fn: a factory, an id, or a list of `num_workers` of them.
        create_env_kwargs: keywords for the factories: one mapping, or a list of them.
        device: where to place the tensors that `reset`, `step` and `rollout` return.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: Any = None,
    ) -> None:
        place = named_device("device", device)
        made = one_each("num_workers", num_workers, create_env_fn, create_env_kwargs)
        super().__init__(joined(made), device=place)


def one_each(name: str, count: Any, create_env_fn: Any, create_env_kwargs: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return a factory and its keywords for each lane. Errors call the number of lanes `name`, as its caller does."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_LANES:
        raise WrongArgument(f"{name} must be a whole number ≥ 1 and at most {MOST_LANES:,}, got {count!r}")
    makers = list(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else [create_env_fn] * count
    if len(makers) != count:
        raise UsageError(f"{name} is {count} but create_env_fn holds {len(makers)}")
    if count > 1 and any(makers.count(m) > 1 for m in makers if isinstance(m, EnvBase)):
        raise UsageError("create_env_fn is one env object, which cannot be several lanes; give a factory")
    if isinstance(create_env_kwargs, Mapping) or create_env_kwargs is None:
        kwargs: list[Mapping[str, Any]] = [create_env_kwargs or {}] * count
    else:
        kwargs = list(create_env_kwargs) if isinstance(create_env_kwargs, (list, tuple)) else [create_env_kwargs]
        if not all(isinstance(one, Mapping) for one in kwargs):
            raise WrongArgument(f"create_env_kwargs must be a mapping or a list of them, got {create_env_kwargs!r}")
        if len(kwargs) != count:
            raise UsageError(f"{name} is {count} but create_env_kwargs holds {len(kwargs)}")
    if not all(isinstance(key, str) for one in kwargs for key in one):
        raise WrongArgument(f"the keys of create_env_kwargs must be strings, got {create_env_kwargs!r}")
    return [(for_workers(make), dict(keywords)) for make, keywords in zip(makers, kwargs)]


def joined(makers: Sequence[tuple[Any, Mapping[str, Any]]]) -> Env:
    """Join single envs of one kind as one env with a lane dimension. On failure, close the envs made for it."""
    lanes: list[Env] = []
    try:
        for make, kwargs in makers:
            lanes.append(as_env(make, kwargs))
        env = _joined(*lanes)
        remake: list[Any] = [getattr(lane, "remake", None) for lane in lanes]
        if isinstance(env, GymLanes) and all(remake):
            env.remake = lambda lane: remake[lane](0)
        return env
    except BaseException:
        for (make, _), env in zip(makers, lanes):
            if not is_env(make):  # the caller owns a finished env
                env.close()
        raise


def _joined(first: Env, *rest: Env) -> Env:
    kinds = {type(env) for env in (first, *rest)}
    join: Callable[..., Env] | None = getattr(first, "joined", None)
    if len(kinds) != 1:
        names = ", ".join(sorted({_public_name(env) for env in (first, *rest)}))
        raise UsageError(f"SerialEnv joins envs of one kind, got {names}")
    single = [env for env in (first, *rest) if isinstance(env, TorchRLEnv) and not env.spec.batched]
    if len(single) == 1 + len(rest):
        return torchrl_joined(single)
    if join is None:
        raise UsageError(_why_not_joined(first, 1 + len(rest)))
    return join(rest)


def _why_not_joined(env: Env, count: int) -> str:
    """Return the error text for an env that cannot be joined, with the ways to run several of it."""
    workers = f"MultiSyncCollector([make_env] * {count}, …) runs several, one per worker"
    ways = {
        "AgentLanes": f"{workers}; mode='group' can be joined",
        "EnvPoolLanes": "num_envs= sets the number of lanes",
        "EnvPoolReady": "num_envs= sets the number of lanes",
    }
    processes = "" if env.spec.rows != "whole" else f", ParallelEnv({count}, make_env) one per process"
    way = ways.get(type(env).__name__, workers + processes)
    lanes = f"{_public_name(env)} already has several lanes"
    return f"SerialEnv joins single envs; {lanes}: pass it to a collector directly; {way}"


def _public_name(env: Env) -> str:
    """Return the name by which users know this kind of env."""
    name = type(env).__name__
    return _PUBLIC_NAMES.get(name, name)


_PUBLIC_NAMES = {
    "AgentLanes": "PettingZooEnv(mode='lanes')",
    "EnvPoolLanes": "EnvPoolEnv",
    "EnvPoolReady": "EnvPoolEnv",
    "GroupLanes": "PettingZooEnv",
    "GymLanes": "GymEnv",
    "JaxLanes": "JaxEnv",
    "ProcessLanes": "ParallelEnv",
    "PufferLanes": "PufferLibEnv",
    "TorchLanes": "TorchEnv",
    "TurnLanes": "PettingZooEnv(mode='turns')",
    "VectorLanes": "a Gymnasium VectorEnv",
}
