"""Fingerprint: remember everything a recording of modules relies on, and tell whether it is still the same."""

from __future__ import annotations

import collections
import contextlib
import inspect
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict
from torch import nn

from reap._foreign import torch_internals
from reap.core.capture.provable import CodeReader, codes_of


class Fingerprint:
    """Holds what modules rely on at construction: attributes, hooks, parameters, and the variables their code reads.

    `holds` tells whether all of it is still the same. The variables are those named in methods of the user's own
    classes, and in the user's own functions and distributions that a step calls.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [part for module in modules for part in module.modules()]
        self._types = [type(m) for m in self._modules]
        self._forwards = [kind.forward for kind in self._types]
        self._containers: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._cells: list[tuple[Any, Any]] = []  # variables of enclosing functions
        self._globals: list[tuple[dict[str, Any], str, Any]] = []  # global variables
        for hooks in torch_internals.GLOBAL_HOOKS:
            self._keep(hooks, 0)
        for module in self._modules:
            self._keep(vars(module), 3)
        read = CodeReader(modules)
        for cls in {cls: None for kind in self._types for cls in _own_classes(kind)} | read.classes:
            self._keep(vars(cls), 1)
        for function in {f: None for kind in dict.fromkeys(self._types) for f in _methods(kind)} | read.functions:
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    self._cells.append((cell, cell.cell_contents))
                    self._keep_if_container(cell.cell_contents)
            for name in dict.fromkeys(name for code in codes_of(function.__code__) for name in code.co_names):
                if name in function.__globals__:
                    self._globals.append((function.__globals__, name, function.__globals__[name]))
                    self._keep_if_container(function.__globals__[name])

    def _keep(self, container: Any, depth: int) -> None:
        """Note the objects in a container, and `depth` levels deep in those inside, to find out if one is replaced."""
        keys = tuple(container) if isinstance(container, Mapping) else ()
        values = tuple(container.values() if isinstance(container, Mapping) else container)
        self._containers.append((container, keys, values))
        for value in values if depth else ():
            if isinstance(value, (list, dict, tuple)):
                self._keep(value, depth - 1)
            else:
                self._keep_parts(value)

    def _keep_parts(self, value: Any) -> None:
        """Note what a TorchRL spec, its space or a TensorDict holds: their parts can be replaced one by one."""
        if type(value) is TensorDict:
            contents = _Contents(value)
            self._keep(contents, 0)
            inside = list(contents.values())
        elif _is_spec(value):
            self._keep(vars(value), 0)
            inside = [vars(value).get("space")]
            for held in vars(value).values():  # those of a Composite are in a dict
                if isinstance(held, dict) and held and all(map(_is_spec, held.values())):
                    self._keep(held, 0)
                    inside += held.values()
        else:
            return
        for part in inside:
            self._keep_parts(part)

    def _keep_if_container(self, value: Any) -> None:
        if type(value) in (list, dict, set, collections.deque, collections.defaultdict, collections.Counter):
            self._keep(value, 0)

    def holds(self) -> bool:
        """Return whether every variable and every container still holds the very same objects."""
        for module, kind, forward in zip(self._modules, self._types, self._forwards):
            if type(module) is not kind or kind.forward is not forward:
                return False
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                return False
        for names, name, value in self._globals:
            if names.get(name) is not value:
                return False
        for container, keys, values in self._containers:
            if len(container) != len(values):
                return False
            if values:
                now = container.values() if isinstance(container, Mapping) else container
                if not all(map(operator.is_, now, values)) or (keys and keys != tuple(container)):
                    return False
        return True


def _is_spec(value: Any) -> bool:
    """Return whether this is a spec of TorchRL's, or the space of one."""
    return type(value).__module__ == "torchrl.data.tensor_specs"


class _Contents(Mapping[Any, Any]):
    """A TensorDict as a mapping whose length is the number of entries; a TensorDict's own is its batch size."""

    def __init__(self, held: TensorDict) -> None:
        self._containers = held

    def __getitem__(self, key: Any) -> Any:
        return self._containers.get(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._containers.keys())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _methods(kind: type) -> Iterator[types.FunctionType]:
    """Yield every function in the user's own classes among a class and its parents."""
    for cls in _own_classes(kind):
        for value in vars(cls).values():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            value = inspect.unwrap(value) if callable(value) else value
            if isinstance(value, types.FunctionType):
                yield value


def _own_classes(kind: type) -> list[type]:
    """Return the user's own classes among a class and its parents."""
    libraries = ("torch", "tensordict", "torchrl", "builtins", "abc", "typing")
    return [cls for cls in kind.__mro__ if cls.__module__.partition(".")[0] not in libraries]
