"""The only place that uses private names of TorchRL, with a fallback for each name that is gone.

Where a name is gone, TorchRL itself does what reap would have done faster: it steps its envs, and starts its workers.
`_step` and `_reset` do not count as private here: everybody who writes an env for TorchRL overrides them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from reap.errors import UsageError

# ---- envs -----------------------------------------------------------------------------------------------------------

# The methods that move an env, or read its results; a user who has replaced one in an env wants it to be called.
MOVES = frozenset(
    {
        *("step", "_step", "step_and_maybe_reset", "_compiled_step_and_maybe_reset", "maybe_reset", "reset", "_reset"),
        *("read_action", "read_done", "read_obs", "read_reward"),
    }
)


def serial_envs(env: Any) -> list[Any]:
    """Return the envs a SerialEnv has made; none for other envs, or where it stores them elsewhere."""
    return list(vars(env).get("_envs") or ())  # not getattr: the env forwards unknown attributes to its parts


def first_values(env: Any, keys: Sequence[Any]) -> list[Tensor]:
    """Return the memory in which a SerialEnv keeps what the last reset of each lane returned; none for other envs."""
    held = vars(env).get("shared_tensordict_parent")
    if type(held) is not TensorDict or not serial_envs(env):
        return []
    found = [held.get(key, None) for key in keys]
    return found if all(isinstance(value, Tensor) and value.is_contiguous() for value in found) else []


def gymnasium_env(env: Any) -> Any:
    """Return the env inside TorchRL's wrapper of another library's env; None where the wrapper does not say."""
    return vars(env).get("_env")


def takes_categories(env: Any) -> bool | None:
    """Return whether TorchRL's wrapper of a Gymnasium env takes actions as numbers, not one-hot; None if unknown."""
    told = vars(env).get("_categorical_action_encoding")
    return None if told is None else bool(told)


def converts_actions(env: Any) -> bool:
    """Return whether TorchRL's wrapper of a Gymnasium env hands it arrays, not tensors."""
    return bool(vars(env).get("_convert_actions_to_numpy", False))


def is_seeded_by_reset(env: Any) -> bool:
    """Return whether `set_seed` has reset the inner env with the seed, as it does with Gymnasium's."""
    if any(cls.__name__ == "GymWrapper" for cls in type(env).__mro__):
        return bool(vars(env).get("_seed_calls_reset", isinstance(gymnasium_env(env), gym.Env)))
    return False


def has_dynamic_specs(env: Any) -> bool:
    """Return whether some dimension of what an env reports has no fixed size."""
    told = getattr(env, "_has_dynamic_specs", None)
    return any(-1 in spec.shape for spec in env.specs.values(True, True)) if told is None else bool(told)


def next_root(env: Any, stepped: TensorDictBase) -> TensorDictBase:
    """Return the root the policy sees after a step."""
    move = getattr(env, "_step_mdp", None)
    if move is None:
        from torchrl.envs.utils import step_mdp

        keys = {"reward_keys": env.reward_keys, "done_keys": env.done_keys, "action_keys": env.action_keys}
        move = functools.partial(step_mdp, exclude_action=False, **keys)
    root: TensorDictBase = move(stepped)
    return root


def hooks_after_step(env: Any) -> Callable[..., Any] | None:
    """Return the hook that transforms run on a step and the root after it, if any; raise if TorchRL does not say."""
    hooks: Callable[..., Any] | None = env._post_step_mdp_hooks
    return hooks


def shares_state(creator: Any) -> bool:
    """Return whether an `EnvCreator` keeps the state that all its envs share in shared memory."""
    return bool(getattr(creator, "_share_memory", True))


def lacks_spec(module: Any) -> bool:
    """Return whether an exploration module was made without a spec, and waits for the env's."""
    if not hasattr(type(module), "spec"):
        return False
    return (module._spec if hasattr(module, "_spec") else getattr(module, "spec", module)) is None


# ---- transforms and modules -----------------------------------------------------------------------------------------

READS = ("in_keys", "_in_keys")  # attributes in which a transform names the keys it reads


def lives_of(transform: Any) -> Any:
    """Return how many lives an EndOfLifeTransform finds."""
    return type(transform)._get_lives(transform)


@contextlib.contextmanager
def answering_lives(transforms: Sequence[Any], answer: Callable[[Any], Any]) -> Iterator[None]:
    """Make EndOfLifeTransforms call `answer` for the number of lives left; raise if they find it in another way."""
    for one in transforms:
        if not hasattr(type(one), "_get_lives"):
            raise AttributeError(f"{type(one).__name__} finds the lives in another way")
        vars(one)["_get_lives"] = functools.partial(answer, one)
    try:
        yield
    finally:
        for one in transforms:
            vars(one).pop("_get_lives", None)


def is_a_sequence(mlp: Any) -> bool:
    """Return whether TorchRL's MLP only calls its layers: it has one input and one output dimension."""
    return not getattr(mlp, "_reshape_out", True)


# ---- weights --------------------------------------------------------------------------------------------------------


def weights_of_sender(scheme: Any) -> tuple[Mapping[str, Any], Mapping[int, Any] | None]:
    """Return the device map given to a scheme's `init_on_sender`, and the weights of each worker, if it has them.

    Raise a `UsageError` where this version of TorchRL stores them elsewhere: starting with other weights would produce
    other data, and nobody would notice.
    """
    transport = getattr(scheme, "_shared_transport", None)
    theirs = type(scheme).__name__
    wanted = {"_shared_transport", *(["_device_mapping_info"] if theirs == "MultiProcessWeightSyncScheme" else [])}
    by_worker = not hasattr(transport, "unique_weights") or hasattr(transport, "_params_map")
    if not by_worker or not _names_in_class(type(scheme)) >= wanted:
        raise UsageError(
            f"this version of TorchRL does not show the weights that {theirs}.init_on_sender was given; "
            f"leave that call out, and give them to the collector's update_policy_weights_"
        )
    told = getattr(scheme, "_device_mapping_info", None) or {}
    return told, told.get("params_map") or getattr(transport, "_params_map", None)


# ---- the workers of a ParallelEnv: reap's processes take their place ------------------------------------------------

SHUT_DOWN, WAIT = "_shutdown_workers", "_wait_for_workers"  # methods of the env that reap replaces
SELF = "_self"  # stands for the worker's env in commands
_WHILE_RUNNING = (  # attributes an env has only while its workers run
    *("parent_channels", "_workers", "shared_tensordicts", "shared_tensordict_parent"),
    *("_shared_tensordict_parent_next", "_shared_tensordict_parent_root"),
)
_TAKEN_OVER = (
    *("_start_workers", "_create_td", "_events", "_timeout", "_seeds", "_use_buffers", "_owns_workers"),
    *("_env_tensordict", "_sync_m2w_value", "_mp_start_method", "_selected_reset_keys", "event"),
)
PARALLEL = (SHUT_DOWN, WAIT, *_WHILE_RUNNING, *_TAKEN_OVER)
MOVES_OF_PARALLEL = (
    *("step", "_step", "reset", "_reset", "step_and_maybe_reset", "maybe_reset", "set_seed", "close", "rand_action"),
    *("_start_workers", "_create_td", "state_dict", "load_state_dict"),
)


def is_known_parallel(kind: type) -> bool:
    """Return whether the code of TorchRL's ParallelEnv mentions every attribute that is read or replaced below."""
    return _names_in_class(kind).issuperset(PARALLEL)


def _names_in_class(kind: type) -> set[str]:
    """Return the names and strings in the code of a TorchRL class: attributes that are not among them do not exist."""
    said: set[str] = set()
    for cls in kind.__mro__:
        for value in vars(cls).values() if cls.__module__.startswith("torchrl.") else ():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if callable(function):
                said.update(_names_in_code(getattr(inspect.unwrap(function), "__code__", None)))
    return said


def _names_in_code(code: types.CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, str):
                yield constant
            elif isinstance(constant, types.CodeType):
                yield from _names_in_code(constant)


def owns_workers(env: Any) -> bool:
    """Return whether a ParallelEnv owns its workers; one that is a view of another ParallelEnv's workers does not."""
    return bool(vars(env)["_owns_workers"])


def has_fixed_memory(env: Any) -> bool:
    """Return whether all workers' results have one fixed place in memory, for all workers together."""
    return bool(vars(env)["_use_buffers"]) and not vars(env).get("share_individual_td")


def is_unmoved(env: Any) -> bool:
    """Return whether running workers have made no step and no reset: the first of them decides how to sync devices."""
    first = env._env_tensordict
    return vars(env).get("_sync_m2w_value") is None and all(
        torch.equal(value, first.get(key)) for key, value in env.shared_tensordict_parent.items(True, True)
    )


def seeds_of(env: Any) -> list[int | None]:
    """Return the seeds its workers were given."""
    return [None] * env.num_workers if env._seeds is None else list(env._seeds)


def is_spawned(env: Any) -> bool:
    """Return whether it starts its workers by `spawn`."""
    return bool(env._mp_start_method == "spawn")


def reset_keys(env: Any) -> list[Any]:
    """Return the keys a worker's reset writes."""
    return list(env._selected_reset_keys)


def give_workers(
    env: Any, channels: list[Any], workers: list[Any], events: list[Any], methods: Mapping[str, Callable[..., None]]
) -> None:
    """Make a ParallelEnv use these pipes, processes and events, and replace two of its methods by these."""
    env._create_td()
    env.parent_channels, env._workers, env._events = channels, workers, events
    env.event, env._timeout = None, env.shutdown_timeout
    vars(env).update(methods)
    env.is_closed = False
    env.set_spec_lock_()


def take_workers(env: Any) -> None:
    """Undo `give_workers`: the env is TorchRL's own again, and closed."""
    for name in (SHUT_DOWN, WAIT, *_WHILE_RUNNING):
        vars(env).pop(name, None)
    env._events = None
    env.is_closed = True
