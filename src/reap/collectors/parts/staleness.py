"""A policy that is trained here while copies of it act elsewhere, and nobody sends them its weights.

    batch taken ─► counters, identities, a few numbers ─► as they were? nothing
                                  └─► moved ─► checksum of all values ─► the same? nothing
                                                        └─► other ─► three batches in a row: said once

Workers that share the learner's memory need no update; reap's act with copies, so that no batch mixes two versions. A
script written for the former would train on data of the first weights for ever. Who trains is seen in the parameters:
torch counts what is written to each; what is written behind its back (`parameter.data`) shows in a number of each, and
layers that are replaced are other objects. The cost is a few microseconds per batch, and nothing once all workers were
sent weights.

In the background nobody knows how much is trained between two rollouts, so that a first update may come late: there it
takes a hundred rollouts, or that it ends without one.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from reap._foreign import torch_internals
from reap.errors import warn

_WATCHED = 256  # parameters, evenly among all
_READ = 8  # of them a number each
_PATIENCE = 3  # batches in a row
_IN_BACKGROUND = 100  # rollouts
_DEEP = 4  # callables inside of callables
_END = (None,)


class StalenessWatch:
    """Looks at a policy's parameters whenever a batch is taken; warns once if they go on without the copies'.

    `workers` is how many copies there are. Modules that a function, a method or a partial holds are watched, too.
    """

    def __init__(self, policy: Any, *, who: str, remedy: str, workers: int = 1) -> None:
        self._modules = modules_in(policy)
        self._who, self._remedy = who, remedy
        self._left = set(range(workers))  # workers that were not sent any
        self._all = workers
        self._patience, self._told = _PATIENCE, False
        self.rebase()

    @property
    def useful(self) -> bool:
        """Whether there is anything that could change."""
        return bool(self._parameters)

    def rebase(self) -> None:
        """The copies are as the policy is now."""
        self._behind = self._possible = 0  # rollouts that are of old weights, and that may be
        self._other = False  # what the last checksum said
        self._find()
        self._sums = self._checksum()

    def sent(self, workers: Iterable[int] | None) -> bool:
        """Weights were sent to these workers, or to all; whether there are others left to be watched for."""
        self._left -= self._left if workers is None else set(workers)
        self._patience = max(_PATIENCE, self._all + 1)  # they may take turns
        return bool(self._left)

    def _find(self) -> None:
        """Note which parameters there are, and by which steps they are reached: replaced, they are others."""
        every = list(self._every())
        self._parameters = every[:: max(1, -(-len(every) // _WATCHED))]
        if not torch_internals.SEES_REPLACED:  # all values are compared each time
            return
        self._read = [p for p in self._parameters if p.numel()][-_READ:]
        parts = [part for module in self._modules for part in module.modules()]
        held = chain.from_iterable(map(torch_internals.holders, parts))
        self._holders = [one for one in held if one]
        self._held = [*chain.from_iterable(map(dict.values, self._holders)), None]
        self._seen = self._look()

    def _every(self) -> Iterator[nn.Parameter]:
        for module in self._modules:
            for p in module.parameters():
                if not (p.is_inference() or is_lazy(p) or p.is_meta) and p.layout is torch.strided:
                    yield p

    def _look(self) -> tuple[int, list[float]]:
        return sum(map(torch_internals.version_of, self._parameters)), [_number(p) for p in self._read]

    def _checksum(self) -> list[int]:
        """Of every parameter's bits: the same for the same values, wherever they lie."""
        sums = [_bits(p.detach()).sum(dtype=torch.int64) for p in self._every()]
        if len({one.device for one in sums}) == 1:
            return torch.stack(sums).tolist()  # of a GPU all at once
        return [int(one) for one in sums]

    def changed(self) -> bool:
        """Return whether the policy is another than the copies are."""
        if torch_internals.SEES_REPLACED:
            held = chain(chain.from_iterable(map(dict.values, self._holders)), _END)
            if all(map(operator.is_, held, self._held)) and self._look() == self._seen:
                return self._other
        self._find()
        self._other = self._checksum() != self._sums
        return self._other

    def batch_taken(self) -> None:
        """One more batch; what was made by old weights three times in a row is told."""
        if self._told:
            return
        self._behind = self._behind + 1 if self.changed() else 0
        if self._behind == self._patience:
            self._tell(f"{self._behind} batches in a row")

    def made_in_background(self, rollouts: int) -> None:
        """So many more were made since the last time; `tell_background` says what that comes to."""
        if not self._told and rollouts:
            before = self._other
            if self.changed():
                self._behind += rollouts if before else 0
                self._possible += rollouts

    def tell_background(self, *, ended: bool = False) -> None:
        """Say it, if it is time. `ended`: nobody will send weights any more, so that a few rollouts are enough."""
        found, enough = (self._possible, self._patience) if ended else (self._behind, _IN_BACKGROUND)
        if not self._told and found >= enough:
            self._tell("for all that was made in the background" if ended else f"{found} rollouts in the background")

    def _tell(self, how_long: str) -> None:
        self._told = True
        who = self._who
        if len(self._left) < self._all:
            numbers = ", ".join(map(str, sorted(self._left)))
            who = f"worker {numbers} still acts" if len(self._left) == 1 else f"workers {numbers} still act"
        warn(
            f"the policy has changed, but {who} with the weights it had when the collector was made: "
            f"{how_long}. {self._remedy}"
        )


def modules_in(policy: Any) -> list[nn.Module]:
    """The modules a policy consists of: itself, or those that a function, a method, a partial or an object calls."""
    found: dict[int, nn.Module] = {}
    _gather(policy, found, set(), _DEEP)
    return list(found.values())


def _gather(thing: Any, found: dict[int, nn.Module], seen: set[int], depth: int) -> None:
    if isinstance(thing, nn.Module):
        found[id(thing)] = thing
        return
    if depth < 0 or id(thing) in seen:
        return
    seen.add(id(thing))
    inside: list[Any] = []
    if isinstance(thing, functools.partial):
        inside = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, types.MethodType):
        inside = [thing.__func__, *_used_by(thing.__func__, thing.__self__)]
    elif isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
        named = [thing.__globals__.get(name) for name in thing.__code__.co_names]
        inside = [*cells, *(thing.__defaults__ or ()), *(one for one in named if _calls(one))]
    elif isinstance(thing, (list, tuple)):
        inside = [one for one in thing if isinstance(one, nn.Module)]
    elif isinstance(thing, dict):
        inside = [one for one in thing.values() if isinstance(one, nn.Module)]
    elif isinstance(getattr(type(thing), "__call__", None), types.FunctionType):  # noqa: B004
        inside = [type(thing).__call__, *_used_by(type(thing).__call__, thing)]
    for one in inside:
        _gather(one, found, seen, depth - 1)


def _used_by(function: Any, owner: Any) -> list[Any]:
    """Return what a method, and the methods it calls, name of their object."""
    if isinstance(owner, nn.Module):
        return [owner]
    names: set[str] = set()
    waiting = [function]
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        for name in set(() if code is None else code.co_names) - names:
            names.add(name)
            waiting.append(getattr(type(owner), name, None))
    return [value for name, value in getattr(owner, "__dict__", {}).items() if name in names]


def _calls(thing: Any) -> bool:
    return isinstance(thing, (nn.Module, types.FunctionType, types.MethodType, functools.partial))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values: Tensor) -> Tensor:
    """Return the bits of numbers, as whole numbers: their sum is exact, on any device and in any order."""
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_INTEGERS[values.element_size()])


_KINDS: dict[torch.dtype, type[ctypes.c_float] | type[ctypes.c_double]] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
}


def _number(parameter: Tensor) -> float:
    """The first number of a parameter, read where it lies: a tenth of the time of asking torch. Elsewhere, nothing."""
    kind = _KINDS.get(parameter.dtype)
    if kind is None or not parameter.is_cpu:
        return 0.0
    return kind.from_address(parameter.data_ptr()).value
