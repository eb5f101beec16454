"""Provable: find out by reading the code of a user's modules whether it is certain to be a function of tensors.

A recording shows what a module did; it cannot show what it would do another time. So the code is read before anything
is recorded. A module of torch's, tensordict's or TorchRL's own is known. One of the user's own is a function of tensors
if its `forward`, and the user's own methods and functions that it calls, decorators and distributions included, do only
this:

- look up names of torch, `math`, constants, registered modules, and attributes that are numbers, tensors or modules;
  not clocks, files, generators, settings or plain objects, which can change unnoticed;
- compute with them: no attribute, item or outer variable is written, nothing is imported, no context is entered.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import itertools
import math
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

_LIBRARIES = ("torch", "tensordict", "torchrl")
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_DUNDERS = {"__call__", "__getattr__", "__getattribute__", "__setattr__", "__torch_function__"}
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
# Names of torch that are not functions of tensors, but settings of the process or more.
_SETTINGS = frozenset(
    {
        "are_deterministic_algorithms_enabled", "backends", "default_generator", "distributed", "futures",
        "get_autocast_dtype", "get_default_device", "get_default_dtype", "get_deterministic_debug_mode",
        "get_float32_matmul_precision", "get_num_interop_threads", "get_num_threads", "get_rng_state", "hub",
        "initial_seed", "is_autocast_enabled", "is_deterministic_algorithms_warn_only_enabled", "manual_seed",
        "multiprocessing", "profiler", "seed"
    }
)
# fmt: on


def why_not(model: nn.Module) -> str | None:
    """Return why a model's code is not certain to be a function of tensors; None if it is."""
    return CodeReader([model]).why


class CodeReader:
    """Reads the code of modules.

    Attributes:
        why: why it is not certain to be a function of tensors; None if it is.
        functions: the user's own functions that were read.
        classes: the user's own classes of which the code makes objects, such as distributions.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parts = [part for module in modules for part in module.modules()]
        self._registered = {id(part) for part in self._parts}
        self._kinds = {cls for part in self._parts for cls in type(part).__mro__}
        self.functions: dict[types.FunctionType, None] = {}
        self.classes: dict[type, None] = {}
        self.why = self._why_not()

    def _why_not(self) -> str | None:
        for part in self._parts:
            reason = self._why_not_module(part)
            if reason is not None:
                return f"its {type(part).__name__} {reason}"
        return None

    def _why_not_module(self, part: nn.Module) -> str | None:
        for value in vars(part).values():
            reason = self._why_not_held(value, 3)
            if reason is not None:
                return f"calls a function that {reason}"
        if _is_known(type(part)):
            method = vars(part).get("method")  # of a TensorDictModule, in place of `forward`
            return self._why_not_function(getattr(part.module, method)) if isinstance(method, str) else None
        if isinstance(part, TensorDictModuleBase):
            return "has its own code for TensorDicts"
        for cls in type(part).__mro__:
            own = _DUNDERS & vars(cls).keys() if not _is_known(cls) and cls is not object else set()
            if own:
                return f"has its own {sorted(own)[0]}"
        return self._why_not_function(type(part).forward)

    def _why_not_held(self, value: Any, depth: int) -> str | None:
        """Return what is wrong with a value that a module holds and may call; None if nothing is."""
        if isinstance(value, (Mapping, list, tuple)):
            inside = value.values() if isinstance(value, Mapping) else value
            return _first(self._why_not_held(v, depth - 1) for v in inside) if depth else None
        if not callable(value) or _is_known(value) or isinstance(value, (nn.Module, Tensor, weakref.ref)):
            return None
        if inspect.isfunction(value) or inspect.ismethod(value):
            return self._why_not_function(value)
        if isinstance(value, functools.partial):
            given = (value.func, *value.args, *value.keywords.values())
            return _first(self._why_not_value(v, "an argument of a functools.partial") for v in given)
        if inspect.isclass(value):
            return None if issubclass(value, nn.Module) else self._why_not_class(value)
        return f"is a {type(value).__name__}"

    def _why_not_class(self, kind: type) -> str | None:
        """Return what is wrong with a class whose objects live for one step (distributions); it may write to them."""
        if kind in self.classes:
            return None
        self.classes[kind] = None
        for cls in kind.__mro__:
            if _is_known(cls) or cls.__module__ == "builtins":
                continue
            self.classes[cls] = None
            if _DUNDERS & vars(cls).keys():
                return f"is a {kind.__name__}, which has its own {sorted(_DUNDERS & vars(cls).keys())[0]}"
            for value in vars(cls).values():
                value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                reason = self._why_not_function(value, of=kind) if inspect.isfunction(value) else None
                if reason is not None:
                    return f"is a {kind.__name__}, which {reason}"
        return None

    def _why_not_function(self, function: Any, of: type | None = None) -> str | None:
        """Return why a function, or a method of the class `of`, is more than a function of tensors; or None."""
        function = _without_known_wrappers(function)
        if not isinstance(function, types.FunctionType):
            return f"is a {type(function).__name__}"
        if function in self.functions:
            return None
        self.functions[function] = None
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not _is_constant(value):
                return f"has a {type(value).__name__} as a default"
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if inspect.isclass(value) and (value in self._kinds or value in self.classes):
                continue  # the variable that `super()` reads
            reason = self._why_not_value(value, "a closure variable")
            if reason is not None:
                return reason
        writes = _WRITES - {"STORE_ATTR"} if of is not None else _WRITES
        for code in codes_of(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname in writes and not (step.opname == "STORE_DEREF" and step.argval in code.co_cellvars):
                    done = f"{step.opname.lower().replace('_', ' ')} {step.argval or ''}".rstrip()
                    return f"does more than compute ({done})"
            for name in code.co_names:
                reason = self._why_not_name(name, function, of)
                if reason is not None:
                    return reason
        return None

    def _why_not_name(self, name: str, function: types.FunctionType, of: type | None) -> str | None:
        """Return what is wrong with a name in the code, which may be a global, an attribute, or a tensor's method.

        An attribute may belong to any of the modules, and a method to any parent of its class (`super`).
        """
        if name in function.__globals__:
            reason = self._why_not_value(function.__globals__[name], name)
            if reason is not None:
                return reason
        elif hasattr(builtins, name) and name not in _BUILTINS and not hasattr(Tensor, name):
            return f"uses {name}"
        if name in _SETTINGS or (name.startswith("set_") and hasattr(torch, name)):
            return f"uses {name}"
        if name == "__class__":
            return "uses __class__"
        if name == "training":
            return None
        held = [] if of is not None else [vars(part)[name] for part in self._parts if name in vars(part)]
        kinds = of.__mro__ if of is not None else self._kinds
        reasons = (self._why_not_value(value, f"its attribute {name}") for value in held)
        found = [vars(cls)[name] for cls in kinds if name in vars(cls) and not _is_known(cls) and cls is not object]
        if any(inspect.isfunction(value) for value in found) and of is not None:
            found = []  # `_why_not_class` reads all methods of the class
        plain = [v.fget if isinstance(v, property) else getattr(v, "__func__", v) for v in found]
        of_classes = (self._why_not_value(value, f"its class's {name}") for value in plain)
        return _first(itertools.chain(reasons, of_classes))

    def _why_not_value(self, value: Any, name: str) -> str | None:
        if _is_constant(value) or isinstance(value, Tensor):
            return None
        if isinstance(value, nn.Module):
            return None if id(value) in self._registered else f"uses {name}, a module that is not registered"
        if value is math or (isinstance(value, types.ModuleType) and _root(value.__name__) == "torch"):
            return None
        if isinstance(value, (torch.Generator, types.ModuleType)):
            return f"uses {name}"
        if isinstance(value, torch.jit.ScriptFunction):
            return f"uses {name}, which TorchScript has compiled"
        if callable(value) and _is_known(value):
            return None
        if inspect.isfunction(value) or inspect.ismethod(value):
            return self._why_not_function(value)
        if isinstance(value, (list, tuple)):
            return _first(self._why_not_value(v, name) for v in value)
        return f"uses {name}, a {type(value).__name__}"


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _without_known_wrappers(function: Any) -> Any:
    """Return the function inside a method, or inside torch's wrappers of a function (`@torch.no_grad()`)."""
    function = getattr(function, "__func__", function)
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__") and _is_library_code(function):
        function = getattr(function.__wrapped__, "__func__", function.__wrapped__)
    return function


def _is_known(thing: Any) -> bool:
    """Return whether something is torch's, tensordict's or TorchRL's own, not just wrapped by one of them."""
    if isinstance(thing, types.FunctionType):
        return _is_library_code(_without_known_wrappers(thing))
    return _root(getattr(thing, "__module__", None) or "") in _LIBRARIES


def _is_library_code(function: Any) -> bool:
    """Return whether a function's code is in these libraries; its own names may be copied from what it wraps."""
    where = function.__globals__.get("__name__") if isinstance(function, types.FunctionType) else function.__module__
    return _root(where or "") in _LIBRARIES


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code object, and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or (isinstance(value, tuple) and all(map(_is_constant, value)))
