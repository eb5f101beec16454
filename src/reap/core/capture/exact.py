"""Find NumPy calls that give the very bits of torch's, and take a third of the time on a row of a few numbers.

    torch      mul_(sum, 0.99999)    add_(sum, x)     div(sum, count)   clamp_min(·, eps)    about 1.2–2.3 µs each
    NumPy      multiply(…, out=sum)  add(…, out=sum)  divide(…)         maximum(…)           about 0.35–0.6 µs

Only operations whose every bit IEEE 754 defines are here: sums, products and quotients of two numbers, comparisons,
choices, casts and copies. Functions whose last bit depends on the library (exp, tanh, even torch's sqrt) stay torch's,
as do sums of many numbers, whose order depends on it. `Captured.agrees` compares each replay with torch once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_MAX_NUMBERS = 4096  # most numbers in a tensor: beyond it the time is spent on the numbers, not on the call

_FLOATS = {torch.float32, torch.float64}
_INTEGERS = {torch.int64, torch.int32, torch.uint8}
DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


class Expression(NamedTuple):
    """A NumPy call whose arguments are Operands of the torch call, plain values, or expressions."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    quiet: bool = True  # whether it never warns; NumPy warns of an overflow, for example, and torch does not


class Operand(NamedTuple):
    """A tensor among the arguments of a recorded call: its register, and a tensor of its shape and type."""

    at: int
    like: Tensor


# fmt: off
_ARITHMETIC: dict[str, Any] = {
    "add": np.add, "__add__": np.add, "__radd__": np.add, "add_": np.add, "__iadd__": np.add,
    "sub": np.subtract, "__sub__": np.subtract, "sub_": np.subtract, "__isub__": np.subtract, "subtract": np.subtract,
    "mul": np.multiply, "__mul__": np.multiply, "__rmul__": np.multiply, "mul_": np.multiply,
    "__imul__": np.multiply, "multiply": np.multiply,
    "div": np.divide, "__truediv__": np.divide, "div_": np.divide, "__itruediv__": np.divide, "true_divide": np.divide,
}
_REVERSED = {"__rsub__": np.subtract, "rsub": np.subtract}  # no __rtruediv__: torch multiplies by the inverse
_COMPARED: dict[str, Any] = {
    "gt": np.greater, "__gt__": np.greater, "ge": np.greater_equal, "__ge__": np.greater_equal,
    "lt": np.less, "__lt__": np.less, "le": np.less_equal, "__le__": np.less_equal,
    "eq": np.equal, "__eq__": np.equal, "ne": np.not_equal, "__ne__": np.not_equal,
}
_LOGIC: dict[str, Any] = {
    "logical_or": np.logical_or, "__or__": np.logical_or, "bitwise_or": np.logical_or,
    "logical_and": np.logical_and, "__and__": np.logical_and, "bitwise_and": np.logical_and,
    "logical_xor": np.logical_xor, "__xor__": np.logical_xor,
    "logical_not": np.logical_not, "__invert__": np.logical_not, "bitwise_not": np.logical_not,
}
_CASTS = {"to", "type", "float", "double", "long", "int", "bool", "byte", "type_as"}
_VIEWS = {"reshape", "view", "unsqueeze", "squeeze", "flatten", "view_as"}
# fmt: on


def as_numpy(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> Expression | None:
    """Return the same call in NumPy, or None if its bits could differ. Tensors among `args` are Operands."""
    tensors = [a.like for a in args if isinstance(a, Operand)]
    if not result.ndim or not tensors:
        return None  # NumPy returns scalars, not arrays, for arrays without dimensions
    if any(t.dtype not in DTYPES or t.device.type not in ("cpu", "meta") for t in (*tensors, result)):
        return None
    if any(t.numel() > _MAX_NUMBERS for t in (*tensors, result)):
        # If numbers do not lie side by side, like one colour of an image, NumPy takes half of torch's time.
        apart = result.is_contiguous() and not all(t.is_contiguous() for t in tensors)
        return _arithmetic(name, list(args), kwargs, tensors, result) if apart else None
    for rule in (_arithmetic, _clamped, _compared, _selected, _copied, _indexed):
        found = rule(name, list(args), kwargs, tensors, result)
        if found is not None:
            return found
    return None


def _number(value: Any, dtype: torch.dtype) -> Any:
    """Return a number as an array of this dtype, or None if torch would not compute with it in this dtype."""
    fits = isinstance(value, (int, float)) if dtype in _FLOATS else isinstance(value, int) and dtype is not torch.uint8
    if not fits or isinstance(value, bool) or dtype not in DTYPES:
        return None
    with np.errstate(all="ignore"):
        return np.array(value, DTYPES[dtype])


def _all_of_dtype(args: list[Any], dtype: torch.dtype) -> list[Any] | None:
    """Return the arguments with numbers as arrays, all of this dtype; None if one cannot be."""
    found = []
    for value in args:
        if isinstance(value, Operand):
            if value.like.dtype is not dtype:
                return None
            found.append(value)
        else:
            found.append(_number(value, dtype))
    return None if any(value is None for value in found) else found


def _arithmetic(
    name: str, args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
) -> Expression | None:
    dtype = result.dtype
    if kwargs or dtype not in _FLOATS | {torch.int64, torch.int32}:
        return None
    if name in ("pow", "__pow__", "pow_", "square"):
        squared = name == "square" or (len(args) == 2 and type(args[1]) in (int, float) and args[1] == 2)
        return Expression(np.multiply, (args[0], args[0]), False) if squared and tensors[0].dtype is dtype else None
    if name in ("neg", "__neg__", "abs"):
        func: Any = np.absolute if name == "abs" else np.negative
        good = tensors[0].dtype is dtype and dtype in _FLOATS and len(args) == 1
        return Expression(func, tuple(args)) if good else None
    func = _ARITHMETIC.get(name) or _REVERSED.get(name)
    if func is None or len(args) != 2 or (func is np.divide and dtype not in _FLOATS):
        return None
    same = _all_of_dtype(args[::-1] if name in _REVERSED else args, dtype)
    return None if same is None else Expression(func, tuple(same), False)


def _clamped(
    name: str, args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
) -> Expression | None:
    if name in ("clamp", "clip", "clamp_", "clip_"):
        low, high = [*args[1:], None, None][:2]
        low, high = kwargs.get("min", low), kwargs.get("max", high)
    elif name in ("clamp_min", "clamp_min_", "clamp_max", "clamp_max_") and len(args) == 2 and not kwargs:
        low, high = (args[1], None) if "min" in name else (None, args[1])
    else:
        return None
    if tensors[0].dtype is not result.dtype or result.dtype not in _FLOATS | {torch.int64}:
        return None
    found: Any = args[0]
    for func, bound in ((np.maximum, low), (np.minimum, high)):
        if bound is None:
            continue
        number = None if isinstance(bound, Operand) else _number(bound, result.dtype)  # a tensor's values may change
        # -0.0 and 0.0 are equal, and which of them is returned depends on the library
        if number is None or number == 0:
            return None
        found = Expression(func, (found, number))
    return found if isinstance(found, Expression) else None


def _compared(
    name: str, args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
) -> Expression | None:
    if kwargs:
        return None
    if name in _LOGIC:
        booleans = all(isinstance(a, Operand) and a.like.dtype is torch.bool for a in args)
        return Expression(_LOGIC[name], tuple(args)) if booleans else None
    if name not in _COMPARED or len(args) != 2 or tensors[0].dtype not in _FLOATS | _INTEGERS:
        return None
    same = _all_of_dtype(args, tensors[0].dtype)
    return None if same is None else Expression(_COMPARED[name], tuple(same))


def _selected(
    name: str, args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
) -> Expression | None:
    if kwargs or len(args) != 3:
        return None
    if name == "where":
        which, yes, no = args
    elif name == "masked_fill":
        no, which, yes = args
    else:
        return None
    same = [value if _is_flag(value, result) else _all_of_dtype([value], result.dtype) for value in (yes, no)]
    if None in same or not isinstance(which, Operand) or which.like.dtype is not torch.bool:
        return None
    return Expression(np.where, (which, *(value[0] if isinstance(value, list) else value for value in same)))


def _is_flag(value: Any, result: Tensor) -> bool:
    """Return whether this is a boolean tensor where the result has numbers, so that True becomes one."""
    return isinstance(value, Operand) and value.like.dtype is torch.bool and result.dtype is not torch.bool


def _copied(
    name: str, args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
) -> Expression | None:
    source = tensors[0]
    if name == "copy_" and len(args) == 2 and not kwargs.get("non_blocking") and isinstance(args[1], Operand):
        alike = args[1].like.dtype is result.dtype and args[1].like.shape == result.shape
        return Expression(np.ndarray.copy, (args[1],)) if alike else None
    if name in _CASTS and isinstance(args[0], Operand):
        widens = source.dtype is not result.dtype and not (source.dtype in _FLOATS and result.dtype not in _FLOATS)
        good = widens and source.shape == result.shape and result.is_contiguous() and source.is_contiguous()
        quiet = (source.dtype, result.dtype) != (torch.float64, torch.float32)
        return Expression(np.ndarray.astype, (args[0], np.dtype(DTYPES[result.dtype])), quiet) if good else None
    if name == "clone" and len(args) == 1 and not kwargs and source.is_contiguous():
        return Expression(np.ndarray.copy, (args[0],))
    flat = name in _VIEWS or (name == "T" and source.ndim == 2 and 1 in source.shape)
    if flat and source.is_contiguous() and source.numel() == result.numel():
        return Expression(np.ndarray.reshape, (args[0], tuple(result.shape)))
    return None


def _indexed(
    name: str, args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
) -> Expression | None:
    """Return an argmax or a table look-up; both libraries take the first of several maxima, and the first NaN."""
    if name == "rows_of":
        return Expression(np.ndarray.take, (*args, 0))
    source, last = tensors[0], tensors[0].ndim - 1
    if name != "argmax" or source.ndim < 2 or [*args[1:2], kwargs.get("dim")][0] not in (-1, last):
        return None
    return Expression(np.ndarray.reshape, (Expression(np.ndarray.argmax, (args[0], -1)), tuple(result.shape)))


def rows_of(table: np.ndarray[Any, Any], at: Tensor) -> Tensor:
    """Return the rows of a table at these indices, all of which are known to be in range."""
    return torch.from_numpy(table.take(at.numpy(), 0))
