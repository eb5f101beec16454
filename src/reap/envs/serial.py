"""SerialEnv: several envs as lanes of one, stepped one after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reap.core.env import Env
from reap.envs.accept import as_env
from reap.envs.base import EnvBase
from reap.errors import UsageError, WrongArgument


class SerialEnv(EnvBase):
    """`num_workers` envs as lanes `[N]` of one env, in this process.

    >>> env = SerialEnv(4, lambda: GymEnv("CartPole-v1"))
    >>> env.rollout(10, break_when_any_done=False).batch_size
    torch.Size([4, 10])

    Args:
        num_workers: how many lanes.
        create_env_fn: a factory, an id, or a list of `num_workers` of them.
        create_env_kwargs: keywords for the factories: one mapping, or a list of them.
        device: where tensors used by hand are placed.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: Any = None,
    ) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise WrongArgument(f"num_workers must be a whole number ≥ 1, got {num_workers!r}")
        makers = list(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else [create_env_fn] * num_workers
        if len(makers) != num_workers:
            raise UsageError(f"num_workers is {num_workers} but create_env_fn holds {len(makers)}")
        if num_workers > 1 and any(makers.count(m) > 1 for m in makers if isinstance(m, EnvBase)):
            raise UsageError("create_env_fn is one finished env for several lanes; give a factory")
        if isinstance(create_env_kwargs, Mapping) or create_env_kwargs is None:
            kwargs: list[Mapping[str, Any]] = [create_env_kwargs or {}] * num_workers
        else:
            kwargs = list(create_env_kwargs)
            if not all(isinstance(one, Mapping) for one in kwargs):
                raise WrongArgument(f"create_env_kwargs must be a mapping or a list of them, got {create_env_kwargs!r}")
            if len(kwargs) != num_workers:
                raise UsageError(f"num_workers is {num_workers} but create_env_kwargs holds {len(kwargs)}")
        lanes = [as_env(make, dict(keywords)) for make, keywords in zip(makers, kwargs)]
        super().__init__(_join(lanes), device=device)


def _join(lanes: Sequence[Env]) -> Env:
    first, *rest = lanes
    kinds = {type(env) for env in lanes}
    join: Callable[..., Env] | None = getattr(first, "joined", None)
    names = ", ".join(sorted(k.__name__ for k in kinds))
    if len(kinds) != 1:
        raise UsageError(f"SerialEnv joins envs of one kind, got {names}")
    if join is None:
        raise UsageError(f"SerialEnv joins single envs; {names} has lanes of its own already")
    return join(rest)
