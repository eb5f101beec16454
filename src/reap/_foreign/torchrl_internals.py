"""Private names of TorchRL: the only place that uses them, and what is done without.

Where one is gone, TorchRL does by itself what reap would have done faster: it steps its envs, and starts its workers.
`_step` and `_reset` are not among them: whoever writes an env for TorchRL writes these.
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

# The methods that move an env, or read what moved; who has replaced one in an env wants it to be called.
MOVES = frozenset(
    {
        *("step", "_step", "step_and_maybe_reset", "_compiled_step_and_maybe_reset", "maybe_reset", "reset", "_reset"),
        *("read_action", "read_done", "read_obs", "read_reward"),
    }
)


def serial_envs(env: Any) -> list[Any]:
    """The envs a SerialEnv has made; none for other envs, and where it keeps them elsewhere."""
    return list(vars(env).get("_envs") or ())  # asked by name its parts would answer, too


def first_values(env: Any, keys: Sequence[Any]) -> list[Tensor]:
    """The memory in which a SerialEnv keeps what the last reset of each lane returned; none for other envs."""
    held = vars(env).get("shared_tensordict_parent")
    if type(held) is not TensorDict or not serial_envs(env):
        return []
    found = [held.get(key, None) for key in keys]
    return found if all(isinstance(value, Tensor) and value.is_contiguous() for value in found) else []


def gymnasium_env(env: Any) -> Any:
    """What TorchRL's wrapper of another library's env has inside; None where it does not say."""
    return vars(env).get("_env")


def takes_categories(env: Any) -> bool | None:
    """Whether TorchRL's wrapper of a Gymnasium env has actions as numbers, not one-hot; None where it does not say."""
    told = vars(env).get("_categorical_action_encoding")
    return None if told is None else bool(told)


def converts_actions(env: Any) -> bool:
    """Whether TorchRL's wrapper of a Gymnasium env hands it arrays, not tensors."""
    return bool(vars(env).get("_convert_actions_to_numpy", False))


def is_seeded_by_reset(env: Any) -> bool:
    """Whether `set_seed` has reset the env inside with the seed, as it does with Gymnasium's."""
    if any(cls.__name__ == "GymWrapper" for cls in type(env).__mro__):
        return bool(vars(env).get("_seed_calls_reset", isinstance(gymnasium_env(env), gym.Env)))
    return False


def has_dynamic_specs(env: Any) -> bool:
    """Whether some dimension of what an env reports is of no fixed size."""
    told = getattr(env, "_has_dynamic_specs", None)
    return any(-1 in spec.shape for spec in env.specs.values(True, True)) if told is None else bool(told)


def next_root(env: Any, stepped: TensorDictBase) -> TensorDictBase:
    """What the policy sees after a step."""
    move = getattr(env, "_step_mdp", None)
    if move is None:
        from torchrl.envs.utils import step_mdp

        keys = {"reward_keys": env.reward_keys, "done_keys": env.done_keys, "action_keys": env.action_keys}
        move = functools.partial(step_mdp, exclude_action=False, **keys)
    root: TensorDictBase = move(stepped)
    return root


def hooks_after_step(env: Any) -> Callable[..., Any] | None:
    """What transforms do to a step and the root after it; raises where it is not known whether there is something."""
    hooks: Callable[..., Any] | None = env._post_step_mdp_hooks
    return hooks


def shares_state(creator: Any) -> bool:
    """Whether an `EnvCreator` has what all its envs are given in shared memory."""
    return bool(getattr(creator, "_share_memory", True))


def lacks_spec(module: Any) -> bool:
    """Whether an exploration module was made without a spec, and waits for the env's."""
    if not hasattr(type(module), "spec"):
        return False
    return (module._spec if hasattr(module, "_spec") else getattr(module, "spec", module)) is None


# ---- transforms and modules -----------------------------------------------------------------------------------------

READS = ("in_keys", "_in_keys")  # attributes in which a transform names what it reads


def lives_of(transform: Any) -> Any:
    """How many lives an EndOfLifeTransform finds."""
    return type(transform)._get_lives(transform)


@contextlib.contextmanager
def answering_lives(transforms: Sequence[Any], answer: Callable[[Any], Any]) -> Iterator[None]:
    """Let EndOfLifeTransforms ask `answer` how many lives are left; raises where they would ask elsewhere."""
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
    """Whether TorchRL's MLP does nothing but call its layers: it has one input and one output dimension."""
    return not getattr(mlp, "_reshape_out", True)


# ---- weights --------------------------------------------------------------------------------------------------------


def weights_of_sender(scheme: Any) -> tuple[Mapping[str, Any], Mapping[int, Any] | None]:
    """What a scheme was told by `init_on_sender`, and the weights by worker, if it has them.

    Where it keeps them elsewhere it is refused: to begin with other weights would be other data, and nobody would know.
    """
    transport = getattr(scheme, "_shared_transport", None)
    theirs = type(scheme).__name__
    wanted = {"_shared_transport", *(["_device_mapping_info"] if theirs == "MultiProcessWeightSyncScheme" else [])}
    by_worker = not hasattr(transport, "unique_weights") or hasattr(transport, "_params_map")
    if not by_worker or not _names_said(type(scheme)) >= wanted:
        raise UsageError(
            f"this version of TorchRL does not show the weights that {theirs}.init_on_sender was given; "
            f"leave that call out, and give them to the collector's update_policy_weights_"
        )
    told = getattr(scheme, "_device_mapping_info", None) or {}
    return told, told.get("params_map") or getattr(transport, "_params_map", None)


# ---- the workers of a ParallelEnv: reap's processes take their place ------------------------------------------------

SHUT_DOWN, WAIT = "_shutdown_workers", "_wait_for_workers"  # methods of which the env gets our own
SELF = "_self"  # in commands to workers: the env there
_WHILE_RUNNING = (  # what it has while its workers are there
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
    """Whether the code of TorchRL's ParallelEnv speaks of all that is asked of it, or replaced in it, below."""
    return _names_said(kind).issuperset(PARALLEL)


def _names_said(kind: type) -> set[str]:
    """The names and texts in the code of a class of TorchRL's: an attribute it never speaks of is not there."""
    said: set[str] = set()
    for cls in kind.__mro__:
        for value in vars(cls).values() if cls.__module__.startswith("torchrl.") else ():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if callable(function):
                said.update(_said_in(getattr(inspect.unwrap(function), "__code__", None)))
    return said


def _said_in(code: types.CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, str):
                yield constant
            elif isinstance(constant, types.CodeType):
                yield from _said_in(constant)


def owns_workers(env: Any) -> bool:
    """Whether a ParallelEnv is none that looks at some of the workers of another."""
    return bool(vars(env)["_owns_workers"])


def has_fixed_memory(env: Any) -> bool:
    """Whether the workers' results have a fixed place, for all of them together."""
    return bool(vars(env)["_use_buffers"]) and not vars(env).get("share_individual_td")


def is_unmoved(env: Any) -> bool:
    """Whether workers that are running have made no step and no reset: the first finds out how to wait for devices."""
    first = env._env_tensordict
    return vars(env).get("_sync_m2w_value") is None and all(
        torch.equal(value, first.get(key)) for key, value in env.shared_tensordict_parent.items(True, True)
    )


def seeds_of(env: Any) -> list[int | None]:
    """The seeds its workers were given."""
    return [None] * env.num_workers if env._seeds is None else list(env._seeds)


def is_spawned(env: Any) -> bool:
    """Whether its workers are to be started by `spawn`."""
    return bool(env._mp_start_method == "spawn")


def reset_keys(env: Any) -> list[Any]:
    """What a reset of a worker writes."""
    return list(env._selected_reset_keys)


def give_workers(
    env: Any, channels: list[Any], workers: list[Any], events: list[Any], methods: Mapping[str, Callable[..., None]]
) -> None:
    """Have a ParallelEnv take these for its pipes, processes and events, and these for two of its methods."""
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
