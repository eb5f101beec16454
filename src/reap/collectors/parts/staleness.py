"""Staleness: warns when a policy is trained here while its copies elsewhere act and never receive its new weights.

    batch taken ─► counters, identities, a few values ─► unchanged? nothing
                                  └─► changed ─► checksum of all values ─► the same? nothing
                                                          └─► different ─► three batches in a row: one warning

Workers that share the learner's memory need no update. reap's workers act with copies, so that no batch mixes two
versions. A script written for shared memory would train on data of the first weights for ever. Training shows in the
parameters: torch counts the writes to each, one value each of a few of them shows writes that torch does not count
(through `parameter.data`), and replaced layers are other objects. A check takes a few microseconds per batch, and none
is made once all workers were sent weights.

In the background it is not known how much is trained between two rollouts, so a first update may come late. There the
warning takes a hundred rollouts, or that the run ends without an update.
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

_WATCHED = 256  # parameters that are watched, spread evenly over all
_READ = 8  # watched parameters of which one value is read at every check
_PATIENCE = 3  # batches in a row with old weights, before the warning
_IN_BACKGROUND = 100  # rollouts with old weights, before the warning in the background
_DEEP = 4  # levels of callables inside callables that are searched for modules
_END = (None,)


class StalenessWatch:
    """Checks a policy's parameters whenever a batch is taken; warns once if they change while its copies do not.

    `workers` is the number of copies. Modules that a function, a method or a partial holds are watched too.
    """

    def __init__(self, policy: Any, *, who: str, remedy: str, workers: int = 1) -> None:
        self._modules = modules_in(policy)
        self._who, self._remedy = who, remedy
        self._never_sent = set(range(workers))  # workers that were never sent weights
        self._workers = workers
        self._patience, self._warned = _PATIENCE, False
        self.rebase()

    @property
    def useful(self) -> bool:
        """Whether the policy has any parameters that could change."""
        return bool(self._parameters)

    def rebase(self) -> None:
        """Start over with the policy's current values: the copies have the same ones now."""
        self._behind = self._possible = 0  # rollouts with old weights: the certain ones, and all possible ones
        self._differs = False  # whether the last checksum differed
        self._index_parameters()
        self._sums = self._checksum()

    def sent(self, workers: Iterable[int] | None) -> bool:
        """Note that weights were sent to these workers, or to all (None); return whether other workers are left."""
        self._never_sent -= self._never_sent if workers is None else set(workers)
        self._patience = max(_PATIENCE, self._workers + 1)  # the learner may update one worker per batch, in turns
        return bool(self._never_sent)

    def _index_parameters(self) -> None:
        """Store which parameters there are, and the dictionaries that hold them, to notice replaced ones later."""
        every = list(self._watchable_parameters())
        self._parameters = every[:: max(1, -(-len(every) // _WATCHED))]
        if not torch_internals.SEES_REPLACED:  # then `changed` compares the checksum each time
            return
        self._read = [p for p in self._parameters if p.numel()][-_READ:]
        parts = [part for module in self._modules for part in module.modules()]
        held = chain.from_iterable(map(torch_internals.holders, parts))
        self._holders = [one for one in held if one]
        self._held = [*chain.from_iterable(map(dict.values, self._holders)), None]
        self._seen = self._sample()

    def _watchable_parameters(self) -> Iterator[nn.Parameter]:
        for module in self._modules:
            for p in module.parameters():
                if not (p.is_inference() or is_lazy(p) or p.is_meta) and p.layout is torch.strided:
                    yield p

    def _sample(self) -> tuple[int, list[float]]:
        return sum(map(torch_internals.version_of, self._parameters)), [_first_value(p) for p in self._read]

    def _checksum(self) -> list[int]:
        """Return one sum of the bits of each parameter: equal values have equal sums, on any device."""
        sums = [_bits(p.detach()).sum(dtype=torch.int64) for p in self._watchable_parameters()]
        if len({one.device for one in sums}) == 1:
            return torch.stack(sums).tolist()  # one transfer from a GPU for all
        return [int(one) for one in sums]

    def changed(self) -> bool:
        """Return whether the policy's values differ from those of its copies."""
        if torch_internals.SEES_REPLACED:
            held = chain(chain.from_iterable(map(dict.values, self._holders)), _END)
            if all(map(operator.is_, held, self._held)) and self._sample() == self._seen:
                return self._differs
        self._index_parameters()
        self._differs = self._checksum() != self._sums
        return self._differs

    def batch_taken(self) -> None:
        """Check after one more batch; warn if three in a row (`_patience`) were collected with old weights."""
        if self._warned:
            return
        self._behind = self._behind + 1 if self.changed() else 0
        if self._behind == self._patience:
            self._warn(f"{self._behind} batches in a row")

    def made_in_background(self, rollouts: int) -> None:
        """Count this many more rollouts of the background; `warn_in_background` decides whether to warn."""
        if not self._warned and rollouts:
            before = self._differs
            if self.changed():
                self._behind += rollouts if before else 0
                self._possible += rollouts

    def warn_in_background(self, *, ended: bool = False) -> None:
        """Warn if there were enough rollouts. `ended`: no weights will be sent any more, so a few rollouts suffice."""
        found, enough = (self._possible, self._patience) if ended else (self._behind, _IN_BACKGROUND)
        if not self._warned and found >= enough:
            self._warn("for everything collected in the background" if ended else f"{found} rollouts in the background")

    def _warn(self, how_long: str) -> None:
        self._warned = True
        who = self._who
        if len(self._never_sent) < self._workers:
            numbers = ", ".join(map(str, sorted(self._never_sent)))
            who = f"worker {numbers} still acts" if len(self._never_sent) == 1 else f"workers {numbers} still act"
        warn(
            f"the policy has changed, but {who} with the weights it had when the collector was made: "
            f"{how_long}. {self._remedy}"
        )


def modules_in(policy: Any) -> list[nn.Module]:
    """Return the modules of a policy: itself, or those that a function, method, partial or callable object uses."""
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
        inside = [thing.__func__, *_attributes_used_by(thing.__func__, thing.__self__)]
    elif isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _has_value(cell)]
        named = [thing.__globals__.get(name) for name in thing.__code__.co_names]
        inside = [*cells, *(thing.__defaults__ or ()), *(one for one in named if _may_hold_modules(one))]
    elif isinstance(thing, (list, tuple)):
        inside = [one for one in thing if isinstance(one, nn.Module)]
    elif isinstance(thing, dict):
        inside = [one for one in thing.values() if isinstance(one, nn.Module)]
    elif isinstance(getattr(type(thing), "__call__", None), types.FunctionType):  # noqa: B004
        inside = [type(thing).__call__, *_attributes_used_by(type(thing).__call__, thing)]
    for one in inside:
        _gather(one, found, seen, depth - 1)


def _attributes_used_by(function: Any, owner: Any) -> list[Any]:
    """Return the attributes of `owner` that a method, and the methods it calls, mention by name."""
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


def _may_hold_modules(thing: Any) -> bool:
    return isinstance(thing, (nn.Module, types.FunctionType, types.MethodType, functools.partial))


def _has_value(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values: Tensor) -> Tensor:
    """Return the bits of numbers as integers, whose sum is exact on any device and in any order."""
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_INTEGERS[values.element_size()])


_KINDS: dict[torch.dtype, type[ctypes.c_float] | type[ctypes.c_double]] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
}


def _first_value(parameter: Tensor) -> float:
    """Return a parameter's first value, read from its memory in a tenth of the time torch takes; 0.0 off the CPU."""
    kind = _KINDS.get(parameter.dtype)
    if kind is None or not parameter.is_cpu:
        return 0.0
    return kind.from_address(parameter.data_ptr()).value
