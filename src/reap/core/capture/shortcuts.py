"""Replace torch calls by cheaper ones that give the same bits, when a step is replayed.

    linear(x, W, b) of one row      addmv(b, W, x)                       3.5 → 1.9 µs
    multinomial(p, 1)               argmax(p / exponential)              14.7 → 5 µs   checked after the rollout
    normal(mean, std)               normal_(0, 1) · std + mean           7.1 → 3.5 µs
    tanh(linear(…))                 tanh_(linear(…))                     1.1 → 0.7 µs
    one_hot(argmax(…), 2)           rows of a table                      4 → 1 µs      for indices known to be in range

These are the calls torch makes inside, without what it does around them. What `multinomial` would reject at each step
is checked at the end of the rollout. `Halves.agrees` proves on probes that bits and random numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from reap.core.capture.exact import rows_of
from reap.core.capture.recorder import Call, Decision, Register, name_of

_IN_PLACE = {"tanh": torch.tanh_, "relu": torch.relu_}
_SAME_NUMBERS = {"reshape", "view", "squeeze", "unsqueeze", "flatten", "expand", "T", "clone", "contiguous", "long"}
_FRESH = {"linear", "addmv"}  # nobody else holds what they return


class Shortened:
    """The calls of a step, some of them replaced by cheaper ones.

    Attributes:
        calls: the calls to make.
        checked: further calls, which test whether the original calls would have accepted their arguments.
        checks: the values that those calls must give.
        tensors: a tensor of the shape and dtype of each register, with new registers at the end.
    """

    def __init__(self, calls: Sequence[Call], tensors: Sequence[Tensor], wanted: Collection[int]) -> None:
        self.tensors = list(tensors)
        self.calls: list[Call] = []
        self.checked: list[Call] = []
        self.checks: list[Decision] = []
        self._upper_bounds: dict[int, int] = {}  # registers of indices that are at least 0, and below this number
        for call in calls:
            name = name_of(call.func)
            if name == "linear" and self._is_one_row(call):
                x, weight, bias = call.args
                self._add(torch.addmv, (bias, weight, x), call.results)
            elif name == "multinomial" and self._is_one_sample(call):
                self._add_multinomial(call)
            elif name == "normal" and self._has_tensor_arguments(call):
                self._add_normal(call)
            elif name == "one_hot" and self._is_in_range(call):
                table = torch.eye(call.args[1], dtype=torch.int64).numpy()
                self._add(rows_of, (table, call.args[0]), call.results)
            else:
                self.calls.append(call)
            self._note_upper_bound(name, call)
        self._work_in_place(wanted)

    def _new(self, like: Tensor) -> Register:
        self.tensors.append(like)
        return Register(len(self.tensors) - 1)

    def _add(
        self,
        func: Any,
        args: tuple[Any, ...],
        into: Register,
        *,
        check: bool = False,
        changes: bool = False,
        **kwargs: Any,
    ) -> Register:
        reads = tuple(a.at for a in args if isinstance(a, Register))
        call = Call(func, args, kwargs, into, reads, (into.at,), (into.at,) if changes else (), changes)
        (self.checked if check else self.calls).append(call)
        return into

    def _is_one_row(self, call: Call) -> bool:
        if len(call.args) != 3 or call.kwargs or not all(isinstance(a, Register) for a in call.args):
            return False
        x, weight, bias = (self.tensors[a.at] for a in call.args)
        return bool(x.ndim == 1 and weight.ndim == 2 and bias.ndim == 1 and weight.is_contiguous())

    def _is_one_sample(self, call: Call) -> bool:
        p, *rest = call.args
        return bool(rest[:1] == [1]) and len(rest) <= 2 and not call.kwargs and isinstance(p, Register)

    def _add_multinomial(self, call: Call) -> None:
        p = call.args[0]
        like = self.tensors[p.at]
        drawn = self._add(torch.empty_like, (p,), self._new(like))
        self._add(Tensor.exponential_, (drawn,), drawn, changes=True)
        share = self._add(torch.div, (p, drawn), self._new(like))
        self._add(torch.argmax, (share,), call.results, dim=-1, keepdim=True)
        flags = torch.empty(like.shape, dtype=torch.bool, device="meta")
        least = self._add(torch.ge, (p, 0), self._new(flags), check=True)
        most = self._add(torch.lt, (p, math.inf), self._new(flags), check=True)
        total = self._add(torch.sum, (p, -1, True), self._new(like[..., :1]), check=True)
        some = self._add(torch.gt, (total, 0), self._new(flags[..., :1]), check=True)
        both = self._add(torch.logical_and, (least, most), self._new(flags), check=True)
        right = self._add(torch.logical_and, (both, some), self._new(flags), check=True)
        all_valid = self._add(torch.all, (right,), self._new(flags.new_empty(())), check=True)
        self.checks.append(Decision(bool, all_valid.at, True, True))

    def _note_upper_bound(self, name: str, call: Call) -> None:
        """Note an upper bound of the indices that a call returns, if one is known."""
        made = call.results if isinstance(call.results, Register) or not call.results else call.results[-1]
        if not isinstance(made, Register) or call.changes:
            return
        first = call.args[0] if call.args else None
        dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
        if isinstance(first, Register) and name in ("argmax", "max") and type(dim) is int:
            self._upper_bounds[made.at] = self.tensors[first.at].shape[dim]
        elif isinstance(first, Register) and name == "multinomial":
            self._upper_bounds[made.at] = self.tensors[first.at].shape[-1]
        elif name == "randint" and type(first) is int:
            low, high = (first, call.args[1]) if type(call.args[1]) is int else (0, first)
            if low >= 0:
                self._upper_bounds[made.at] = high
        elif isinstance(first, Register) and first.at in self._upper_bounds and name in _SAME_NUMBERS:
            self._upper_bounds[made.at] = self._upper_bounds[first.at]

    def _is_in_range(self, call: Call) -> bool:
        index, *rest = call.args
        known = isinstance(index, Register) and index.at in self._upper_bounds and len(rest) == 1 and not call.kwargs
        return known and type(rest[0]) is int and self._upper_bounds[index.at] <= rest[0]

    def _has_tensor_arguments(self, call: Call) -> bool:
        mean, std = (call.kwargs.get(name) for name in ("mean", "std"))
        if call.args or len(call.kwargs) != 2 or not isinstance(mean, Register) or not isinstance(std, Register):
            return False
        return bool(self.tensors[mean.at].shape == self.tensors[std.at].shape)

    def _add_normal(self, call: Call) -> None:
        mean, std = call.kwargs["mean"], call.kwargs["std"]
        like = self.tensors[mean.at]
        flags = torch.empty(like.shape, dtype=torch.bool, device="meta")
        least = self._add(torch.ge, (std, 0), self._new(flags), check=True)
        all_valid = self._add(torch.all, (least,), self._new(flags.new_empty(())), check=True)
        self.checks.append(Decision(bool, all_valid.at, True, True))
        drawn = self._add(torch.empty_like, (mean,), self._new(like))
        self._add(Tensor.normal_, (drawn,), drawn, changes=True)
        scaled = self._add(torch.mul, (drawn, std), self._new(like))
        self._add(torch.add, (scaled, mean), call.results)

    def _work_in_place(self, wanted: Collection[int]) -> None:
        """Let an activation overwrite the result of the layer before it, if nothing else reads that."""
        made = {call.writes[0]: name_of(call.func) for call in self.calls if len(call.writes) == 1}
        readers: dict[int, int] = {}
        for call in (*self.calls, *self.checked):
            for at in call.reads:
                readers[at] = readers.get(at, 0) + 1
        for i, call in enumerate(self.calls):
            func = _IN_PLACE.get(name_of(call.func))
            first = call.args[0] if call.args else None
            if func is None or not isinstance(first, Register) or call.kwargs.get("inplace") or len(call.reads) != 1:
                continue
            at = call.reads[0]
            alone = readers[at] == 1 and at not in wanted and made.get(at) in _FRESH
            if alone:
                self.calls[i] = call._replace(func=func, args=(first,), kwargs={})
