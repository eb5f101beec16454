"""Find calls whose result can be written into preallocated memory, so that a step allocates nothing for them.

    recorded                 once per rollout          at each step
    x = add(a, b)            x = empty(8, 1)           add(a, b, out=x)
    y = x.reshape(8)         y = x.reshape(8)
    s = sum(y, 0)            s = empty()               sum(y, 0, out=s)

Such memory has both forms, tensor and array, from the beginning, which saves conversions at 0.8 µs each. If it holds
images, it stays in the processor's cache, where the last step left it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reap.core.capture.recorder import Call, Register, name_of

# fmt: off
_OUT: dict[str, Callable[..., Any]] = {
    "add": torch.add, "__add__": torch.add, "__radd__": torch.add,
    "sub": torch.sub, "__sub__": torch.sub,
    "mul": torch.mul, "__mul__": torch.mul, "__rmul__": torch.mul,
    "div": torch.div, "__truediv__": torch.div,
    "clamp": torch.clamp, "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
    "sqrt": torch.sqrt, "exp": torch.exp, "log": torch.log, "tanh": torch.tanh, "abs": torch.abs, "neg": torch.neg,
    "gt": torch.gt, "__gt__": torch.gt, "ge": torch.ge, "__ge__": torch.ge,
    "lt": torch.lt, "__lt__": torch.lt, "le": torch.le, "__le__": torch.le,
    "eq": torch.eq, "__eq__": torch.eq, "ne": torch.ne, "__ne__": torch.ne,
    "logical_or": torch.logical_or, "logical_and": torch.logical_and, "logical_not": torch.logical_not,
    "sum": torch.sum, "mean": torch.mean, "cat": torch.cat,
}
_REDUCTIONS = ("sum", "mean")  # reductions of a whole tensor take no `out`
# fmt: on


def writer(call: Call) -> Callable[..., Any] | None:
    """Return the torch function that writes this call's result into `out`, or None if there is none."""
    name = name_of(call.func)
    found = _OUT.get(name)
    if found is None or "out" in call.kwargs or (name in _REDUCTIONS and len(call.args) < 2):
        return None
    return found


def is_cast(call: Call, tensors: Sequence[Tensor]) -> bool:
    """Return whether a call divides integers by a Python number and so converts them to floats first, as for images."""
    if name_of(call.func) not in ("div", "__truediv__") or len(call.args) != 2 or call.kwargs:
        return False
    given, made = tensors[call.args[0].at], tensors[call.results.at]
    return not given.dtype.is_floating_point and made.dtype is torch.float32 and type(call.args[1]) in (int, float)


def is_view(call: Call, memory: Mapping[int, int]) -> bool:
    """Return whether all results of a call lie in the memory of its arguments, and nothing is computed."""
    made = [at for at in call.writes if at not in call.reads]
    if not made or call.random or call.foreign or call.changes:
        return False
    given = {memory.get(at) for at in call.reads} - {None}
    return all(memory.get(at) in given for at in made)


def has_room(call: Call, tensors: Sequence[Tensor], memory: Mapping[int, int]) -> bool:
    """Return whether a call has one result, which can be written into memory allocated for it in advance."""
    if not isinstance(call.results, Register) or call.random or call.foreign or call.changes:
        return False
    at = call.results.at
    like = tensors[at]
    given = {memory.get(other, -other - 1) for other in call.reads}
    dense = like.numel() == 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride()))
    return at not in call.reads and memory.get(at, -at - 1) not in given and dense and like.device.type == "meta"
