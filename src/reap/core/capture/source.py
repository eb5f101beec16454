"""StepSource: generate the source of a Python function from recorded calls.

    def make(r9):                             what is the same for a whole rollout
        n9 = r9.numpy()
        def run(n0, n1):                      the inputs of a step
            with inference(True):
                with quiet(all="ignore"):
                    n5 = add(n0, n1)          NumPy, where it gives the same bits (see exact.py)
                r5 = from_numpy(n5)
                r6 = tanh(r5)                 torch
            return (n5, r6)
        return run

A register is a tensor `r…`, an array `n…` on the same memory, or both: what changes one changes the other.

A torch call takes about 0.7 µs less in inference mode. Functions that are not torch's are called outside of it, because
tensors that a user's code makes in inference mode could never require gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reap._foreign import torch_internals
from reap.core.capture.exact import Expression, Operand, as_numpy
from reap.core.capture.out import has_room, is_cast, is_view, writer
from reap.core.capture.recorder import Call, Register, name_of

_WORTH = 2  # fewest torch calls for which entering inference mode costs less than it saves

_COPIES = ("clone", "empty_like")  # into preallocated memory, the first is a copy and the second nothing

# Costs in microseconds, which decide between NumPy and torch.
_TORCH, _NUMPY, _TO_ARRAY, _TO_TENSOR = 1.3, 0.45, 0.7, 0.5


class Wanted(NamedTuple):
    """A register that a function returns, as tensor or array."""

    at: int
    as_array: bool = False


class CallPlan(NamedTuple):
    """How a call is made: by NumPy's `rule` or as recorded; `persistent`: into memory allocated in advance."""

    call: Call
    rule: Expression | None
    persistent: bool = False


class Line(NamedTuple):
    """A line of a step: whether it calls torch, and whether NumPy could warn in it, as of an overflow."""

    text: str
    torch: bool = False
    warns: bool = False


class StepSource:
    """Generates functions from recorded calls.

    Args:
        tensors: a tensor of the shape and dtype of each register.
        outside: the tensors of registers that exist before the step.
        fixed: registers whose values are given once per rollout.
        numpy: whether NumPy may make calls.
        arrays: whether the inputs of a step are arrays. Functions that are not torch's always take and return arrays.
        inference: whether torch calls are made in inference mode, so that a step returns inference tensors.
        memory: a number for the memory each register lies in; None: results are allocated anew at each step.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        outside: Mapping[int, Tensor],
        fixed: Sequence[int],
        *,
        numpy: bool,
        arrays: bool = False,
        inference: bool = False,
        memory: Mapping[int, int] | None = None,
    ) -> None:
        self._memory, self._preallocates = memory or {}, memory is not None
        self._persistent: set[int] = set()  # registers in memory that exists before a step
        self._allocated: set[int] = set()  # those of them in memory that was allocated here
        self._tensors, self._outside, self._fixed = tensors, outside, fixed
        self._numpy, self._arrays = numpy, arrays
        self._names: dict[str, Any] = {f"r{at}": tensor for at, tensor in outside.items()}
        guard = torch_internals.INFERENCE_GUARD
        self._names.update(from_numpy=torch.from_numpy, quiet=np.errstate, inference=guard)
        self._inference = inference and guard is not None
        self._rollout_lines: list[str] = []  # lines that run once, when a rollout begins
        self._lines: list[Line] = []
        self._parts = [self._lines]  # all lines so far; each call that is not torch's is a part of its own
        self._tensor: set[int] = set()
        self._array: set[int] = set()

    def function(
        self, calls: Sequence[Call], inputs: Sequence[int], results: Sequence[Wanted]
    ) -> Callable[..., Callable[..., tuple[Any, ...]]]:
        """Return a function of the `fixed` registers that returns a function of `inputs`, which makes the calls."""
        self._persistent = {*self._fixed, *self._outside}
        self._tensor, self._array = {*self._persistent}, set()
        (self._array if self._arrays else self._tensor).update(inputs)
        for planned in self._plan_calls(calls, inputs, results):
            if planned.persistent:
                self._persistent.update(planned.call.writes)
            if planned.rule is not None:
                self._add_numpy_call(planned.call, planned.rule, planned.persistent)
            elif planned.call.foreign:
                self._add_foreign_call(planned.call)
            else:
                self._add_torch_call(planned.call, planned.persistent)
        returned = "".join(f"{self._name_as(w.at, array=w.as_array)}, " for w in results)
        given = ", ".join(f"{'n' if self._arrays else 'r'}{at}" for at in inputs)
        text = "\n".join(
            [
                f"def make({', '.join(f'r{at}' for at in self._fixed)}):",
                *(f"    {line}" for line in self._rollout_lines),
                f"    def run({given}):",
                *(f"        {line}" for part in self._parts for line in self._with_guards(part)),
                f"        return ({returned})",
                "    return run",
            ]
        )
        exec(compile(text, "<a captured step>", "exec"), self._names)  # a user's strings are only literals in it
        return self._names["make"]  # type: ignore[no-any-return]

    def _with_guards(self, part: Sequence[Line]) -> list[str]:
        """Return the lines, in inference mode if that pays, and with NumPy's warnings off where it could warn."""
        warns = [i for i, line in enumerate(part) if line.warns]
        lines = [line.text for line in part]
        if warns:
            first, last = warns[0], warns[-1] + 1
            lines[first:last] = ['with quiet(all="ignore"):', *(f"    {line}" for line in lines[first:last])]
        if self._inference and sum(line.torch for line in part) >= _WORTH:
            lines = ["with inference(True):", *(f"    {line}" for line in lines)]
        return lines

    def _rule(self, call: Call) -> Expression | None:
        if not self._numpy or call.random or not isinstance(call.results, Register):
            return None
        if call.changes and (call.changes != (call.results.at,) or not isinstance(call.args[0], Register)):
            return None
        if name_of(call.func) == "where" and call.func is not torch.where:
            return None  # Tensor.where takes its arguments in another order
        args = [
            Operand(a.at, self._outside.get(a.at, self._tensors[a.at])) if isinstance(a, Register) else a
            for a in call.args
        ]
        if any(isinstance(a, (tuple, list)) and any(isinstance(x, Register) for x in a) for a in args):
            return None
        if any(isinstance(v, Register) for v in call.kwargs.values()):
            return None
        found = as_numpy(name_of(call.func), args, call.kwargs, self._tensors[call.results.at])
        in_place = call.results.at in call.reads
        if found is None or (in_place and (call.args[0] != call.results or not takes_out(found))):
            return None
        return found

    def _plan_calls(self, calls: Sequence[Call], inputs: Sequence[int], results: Sequence[Wanted]) -> list[CallPlan]:
        """Choose how each call is made: by NumPy where it can and is faster, conversions there and back included."""
        rules = [self._rule(call) for call in calls]
        plans = self._choose(calls, rules, inputs, results)
        warning = [i for i, planned in enumerate(plans) if planned.rule is not None and not planned.rule.quiet]
        if len(warning) != 1:
            return plans
        rules[warning[0]] = None  # turning warnings off takes 1.5 µs, too much for a single call
        return self._choose(calls, rules, inputs, results)

    def _choose(
        self,
        calls: Sequence[Call],
        rules: Sequence[Expression | None],
        inputs: Sequence[int],
        results: Sequence[Wanted],
    ) -> list[CallPlan]:
        for_torch = {w.at for w in results if not w.as_array}
        for_numpy = {w.at for w in results if w.as_array}
        for call, rule in zip(calls, rules):
            (for_torch if rule is None and not call.foreign else for_numpy).update(call.reads)
        seen = {*inputs, *(w.at for w in results)}  # registers seen outside the step, or by the user's code in it
        seen.update(at for call in calls if call.foreign for at in (*call.reads, *call.writes))
        elsewhere = {self._memory_of(at) for at in seen}
        available = {*self._fixed, *self._outside}
        tensor, array = {*self._tensor}, {*self._array, *available}
        plans: list[CallPlan] = []
        for call, rule in zip(calls, rules):
            if self._preallocates and available.issuperset(call.reads) and is_view(call, self._memory):
                planned = CallPlan(call, None, persistent=True)
            else:
                room = self._preallocates and has_room(call, self._tensors, self._memory)
                room = room and self._memory_of(call.writes[0]) not in elsewhere
                kept = room and rule is not None and takes_out(rule)
                planned = CallPlan(call, rule, persistent=kept)
                if rule is not None:
                    made = [at for at in call.writes if at not in call.reads]
                    numpy_cost = _NUMPY + _TO_ARRAY * len({*call.reads} - array)
                    numpy_cost += _TO_TENSOR * (not kept and any(at in for_torch for at in made))
                    torch_cost = _TORCH + _TO_TENSOR * len({*call.reads} - tensor)
                    torch_cost += _TO_ARRAY * (not room and any(at in for_numpy for at in made))
                    planned = planned if numpy_cost < torch_cost else CallPlan(call, None)
                if planned.rule is None:
                    takes_memory = writer(call) is not None or name_of(call.func) in _COPIES
                    planned = CallPlan(call, None, persistent=room and takes_memory)
            (array if planned.rule is not None or call.foreign else tensor).update((*call.reads, *call.writes))
            if planned.persistent:
                available.update(call.writes)
                tensor.update(call.writes)
                array.update(call.writes)
            plans.append(planned)
        return plans

    def _memory_of(self, at: int) -> int:
        return self._memory.get(at, -at - 1)

    def _name_as(self, at: int, *, array: bool) -> str:
        """Return the name of a register as tensor or array; convert it if it does not have that form yet."""
        if array and at not in self._array:
            if at in self._allocated:
                self._names[f"n{at}"] = self._names[f"r{at}"].numpy()
            elif at in self._persistent:
                self._rollout_lines.append(f"n{at} = r{at}.detach().numpy()")
            else:
                self._lines.append(Line(f"n{at} = r{at}.numpy()", torch=True))
            self._array.add(at)
        elif not array and at not in self._tensor:
            self._lines.append(Line(f"r{at} = from_numpy(n{at})", torch=True))
            self._tensor.add(at)
        return f"{'n' if array else 'r'}{at}"

    def _text(self, value: Any, *, array: bool = False) -> str:
        if isinstance(value, (Register, Operand)):
            return self._name_as(value.at, array=array)
        if isinstance(value, Expression):
            inner = ", ".join(self._text(a, array=True) for a in value.args)
            return f"{self._text(value.func)}({inner})"
        if value is None or value is Ellipsis or type(value) in (bool, int, str):
            return repr(value)
        if type(value) in (tuple, list):
            inner = "".join(f"{self._text(v, array=array)}, " for v in value)
            return f"({inner})" if type(value) is tuple else f"[{inner}]"
        if isinstance(value, slice):
            parts = (self._text(v, array=array) for v in (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def _add_numpy_call(self, call: Call, rule: Expression, persistent: bool) -> None:
        at = call.results.at
        if persistent:
            self._allocate(at)
        if not persistent and at not in call.reads:
            text = f"n{at} = {self._text(rule)}"
            self._array.add(at)
            self._tensor.discard(at)
        elif isinstance(rule.func, np.ufunc):
            text = f"{self._text(rule)[:-1]}, out={self._name_as(at, array=True)})"
        else:  # a copy, or a cast, which copies too
            text = f"{self._name_as(at, array=True)}[...] = {self._text(rule.args[0], array=True)}"
        self._lines.append(Line(text, warns=not rule.quiet))

    def _allocate(self, at: int) -> None:
        """Allocate memory for a register, to be used in all steps of all rollouts."""
        like = self._tensors[at]
        self._names[f"r{at}"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self._allocated.add(at)
        self._tensor.add(at)

    def _add_foreign_call(self, call: Call) -> None:
        given = ", ".join(self._name_as(at, array=True) for at in call.reads)
        targets = "".join(f"n{at}, " for at in call.writes)
        self._parts.append([Line(f"({targets}) = {self._text(call.func)}({given})")])
        self._lines = []
        self._parts.append(self._lines)
        self._array.update(call.writes)

    def _add_torch_call(self, call: Call, persistent: bool) -> None:
        arguments = [*map(self._text, call.args), *(f"{k}={self._text(v)}" for k, v in call.kwargs.items())]
        view = persistent and is_view(call, self._memory)
        if persistent and not view:
            self._allocate(call.results.at)
            self._add_into_allocated(call, arguments)
            return
        line = f"{self._target(call.results, call.reads)} = {self._text(call.func)}({', '.join(arguments)})"
        if not view:
            self._lines.append(Line(line, torch=True))
        elif self._allocated.issuperset(call.reads):
            exec(line, self._names)
            self._allocated.update(call.writes)
        else:
            self._rollout_lines.append(line)

    def _add_into_allocated(self, call: Call, arguments: list[str]) -> None:
        at, write = call.results.at, writer(call)
        if write is not None:
            if is_cast(call, self._tensors):  # cast into the result's own memory, instead of a second tensor
                self._lines.append(Line(f"{self._text(Tensor.copy_)}(r{at}, {arguments[0]})", torch=True))
                arguments = [f"r{at}", *arguments[1:]]
            self._lines.append(Line(f"{self._text(write)}({', '.join(arguments)}, out=r{at})", torch=True))
        elif name_of(call.func) == "clone":
            self._lines.append(Line(f"{self._text(Tensor.copy_)}(r{at}, {arguments[0]})", torch=True))

    def _target(self, value: Any, reads: tuple[int, ...]) -> str:
        if isinstance(value, Register):
            if value.at in reads:
                return "_"  # changed in place: it has a name already
            self._tensor.add(value.at)
            self._array.discard(value.at)
            return f"r{value.at}"
        inner = "".join(f"{self._target(v, reads)}, " for v in value) if isinstance(value, (tuple, list)) else ""
        return f"({inner})" if inner else "_"


def takes_out(rule: Expression) -> bool:
    """Return whether a NumPy call can write its result into given memory."""
    return isinstance(rule.func, np.ufunc) or rule.func in (np.ndarray.copy, np.ndarray.astype)
