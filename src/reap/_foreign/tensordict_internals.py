"""The only place that uses private names of tensordict, with a fallback for each name that is gone.

A module whose private attributes differ from those known here is not run as a flat program: it is called unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    probabilistic,
)
from torch import nn

# Makes a TensorDict without checking its entries, which must be known to fit. The public constructor checks every leaf.
new_tensordict: Callable[..., TensorDict] = getattr(TensorDict, "_new_unsafe", TensorDict)

# ---- the interaction type: one variable for the whole process ------------------------------------------------------

# The object that holds the interaction type, with `get_mode` and `set_mode`; None where tensordict stores the type
# differently. tensordict reads it from whatever object stands under this key of its module variables.
INTERACTION_TYPE = "_interaction_type"
interaction_variables: dict[str, Any] = vars(probabilistic)
shared_interaction_type: Any = interaction_variables.get(INTERACTION_TYPE)


# ---- modules: whether tensordict does nothing but call them and write what they return -----------------------------


def is_plain_module(module: Any) -> bool:
    """Return whether a TensorDictModule calls what it wraps with its `in_keys` in order, and writes all results."""
    try:
        return (
            type(module)._call_module is TensorDictModule._call_module
            and type(module)._write_to_tensordict is TensorDictModule._write_to_tensordict
            and module.inplace is True
            and module._kwargs is None
            and not module.method_kwargs
            and not module._get_kwargs
            and list(module.out_keys) == list(module.out_keys_source)
        )
    except AttributeError:
        return False


def is_plain_sampler(module: Any) -> bool:
    """Return whether a probabilistic module builds its distribution and samples from it as tensordict's class does."""
    try:
        return (
            type(module).get_dist is ProbabilisticTensorDictModule.get_dist
            and type(module)._dist_sample is ProbabilisticTensorDictModule._dist_sample
            and module.num_samples is None
            and module._generator is None
            and module._generator_key is None
            and len(module.dist_sample_keys) == 1
            and isinstance(module.distribution_class, type)
            and module.distribution_class.__name__ != "CompositeDistribution"
        )
    except AttributeError:
        return False


def parts_of(sequence: Any) -> Iterable[nn.Module] | None:
    """Return the parts of a sequence if it only calls them one after another; None if it does anything else."""
    try:
        plain = (
            not sequence._select_before_return
            and sequence.inplace in (True, None)
            and not sequence.partial_tolerant
            and (not isinstance(sequence, ProbabilisticTensorDictSequential) or sequence._requires_sample)
        )
        return sequence._module_iter() if plain else None
    except AttributeError:
        return None


def draw_of(sampler: Any) -> Callable[..., Any]:
    """Return the function by which a module samples from a given distribution; only valid where `is_plain_sampler`."""
    draw: Callable[..., Any] = sampler._dist_sample
    return draw
