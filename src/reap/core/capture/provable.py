"""Provable: whether the code of a user's modules can be known to be a function of tensors, by reading it.

A recording shows what a module did; it cannot show what it would do another time. So the code is read before anything
is recorded. A module of torch's, tensordict's or TorchRL's own is known. One of the user's own is a function of tensors
if its `forward`, and whatever methods and functions of the user's that calls, do nothing else than this:

- look up names of torch, `math`, constants and modules that are registered, and attributes that are numbers, tensors or
  modules: no clocks, files, generators, settings, plain objects, which change without anybody noticing;
- compute with them: no attribute, item or variable outside is written, nothing is imported, no context is entered.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import types
from collections.abc import Iterator
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

_KNOWN = ("torch", "tensordict", "torchrl")
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_MAGIC = {"__call__", "__getattr__", "__getattribute__", "__setattr__", "__torch_function__"}
# fmt: off
_BUILTINS = frozenset(
    {
        "abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min",
        "range", "reversed", "round", "slice", "sum", "super", "tuple", "zip", "ValueError", "TypeError",
        "RuntimeError", "AssertionError", "NotImplementedError"
    }
)
_WRITES = frozenset(
    {
        "STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_SUBSCR",
        "DELETE_SUBSCR", "STORE_SLICE", "IMPORT_NAME", "BEFORE_WITH", "SETUP_WITH", "BEFORE_ASYNC_WITH",
        "YIELD_VALUE", "LOAD_BUILD_CLASS", "WITH_EXCEPT_START", "SETUP_FINALLY",
        "PUSH_EXC_INFO", "CHECK_EXC_MATCH"
    }
)
# fmt: on


def why_not(model: nn.Module) -> str | None:
    """Why a model's code cannot be known to be a function of tensors; None if it can."""
    parts = list(model.modules())
    for part in parts:
        reason = _part(part, {id(p) for p in parts})
        if reason is not None:
            return f"its {type(part).__name__} {reason}"
    return None


def _part(part: nn.Module, registered: set[int]) -> str | None:
    functions = [value for value in vars(part).values() if inspect.isfunction(value) or inspect.ismethod(value)]
    foreign = [f for f in functions if not _is_known(f)]
    for function in foreign:
        reason = _code(function, part, registered, set())
        if reason is not None:
            return f"calls a function that {reason}"
    if _is_known(type(part)):
        return None
    if isinstance(part, TensorDictModuleBase):
        return "has code of its own on TensorDicts"
    for cls in type(part).__mro__:
        own = _MAGIC & vars(cls).keys() if not _is_known(cls) and cls is not object else set()
        if own:
            return f"has a {sorted(own)[0]} of its own"
    return _code(type(part).forward, part, registered, set())


def _is_known(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] in _KNOWN


def _code(function: Any, part: nn.Module, registered: set[int], seen: set[Any]) -> str | None:
    """Why a function is more than a function of tensors."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType):
        return f"is a {type(function).__name__}"
    if function in seen:
        return None
    seen.add(function)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if not _constant(value):
            return f"has a {type(value).__name__} as a default"
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if value is type(part):
            continue  # `super()`
        reason = _value(value, "a variable around it", part, registered, seen)
        if reason is not None:
            return reason
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in _WRITES and not (step.opname == "STORE_DEREF" and step.argval in code.co_cellvars):
                return f"does more than compute ({step.opname.lower().replace('_', ' ')} {step.argval or ''})".rstrip()
        for name in code.co_names:
            reason = _name(name, function, part, registered, seen)
            if reason is not None:
                return reason
    return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _name(name: str, function: Any, part: nn.Module, registered: set[int], seen: set[Any]) -> str | None:
    """Why a name in the code is a reason: it may be a global, an attribute, or a method of a tensor."""
    if name in function.__globals__:
        reason = _value(function.__globals__[name], name, part, registered, seen)
        if reason is not None:
            return reason
    elif hasattr(builtins, name) and name not in _BUILTINS and not hasattr(Tensor, name):
        return f"uses {name}"
    if name == "__class__" or name == "training":
        return "uses __class__" if name == "__class__" else None
    if name in vars(part):
        return _value(vars(part)[name], f"its attribute {name}", part, registered, seen)
    for cls in type(part).__mro__:
        if name in vars(cls) and not _is_known(cls) and cls is not object:
            found = vars(cls)[name]
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            return _value(found, f"its class's {name}", part, registered, seen)
    return None


def _value(value: Any, name: str, part: nn.Module, registered: set[int], seen: set[Any]) -> str | None:
    if _constant(value) or isinstance(value, Tensor):
        return None
    if isinstance(value, nn.Module):
        return None if id(value) in registered else f"uses {name}, a module that is not registered"
    if value is math or (isinstance(value, types.ModuleType) and _root(value.__name__) == "torch"):
        return None
    if isinstance(value, (torch.Generator, types.ModuleType)):
        return f"uses {name}"
    if callable(value) and _is_known(value):
        return None
    if inspect.isfunction(value) or inspect.ismethod(value):
        return _code(value, part, registered, seen)
    if isinstance(value, (list, tuple)):
        return next((r for v in value if (r := _value(v, name, part, registered, seen)) is not None), None)
    return f"uses {name}, a {type(value).__name__}"


def _root(name: str) -> str:
    return name.partition(".")[0]


def _constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or (isinstance(value, tuple) and all(map(_constant, value)))
