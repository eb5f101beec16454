"""Shift stacks of frames in place: what CatFrames does to its buffer, without a second buffer.

    recorded                              replayed
    y = roll(x, shifts=-1, dims=-3)       move_up(x, 1, -3)
    x.copy_(y)
    v = x[:, -1:]; v.copy_(frame)         v = x[:, -1:]; v.copy_(frame)
    x[:, -1:] = v

This only copies, so the bits are the same for every dtype and value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reap.core.capture.recorder import Call, Register, name_of


def move_up(stack: Tensor, by: int, dim: int) -> Tensor:
    """Do `stack.copy_(stack.roll(-by, dim))` part by part; `by` must divide the size of that dimension."""
    first, *rest = torch.split(stack, by, dim)
    kept, place = first.clone(), first
    for part in rest:
        place.copy_(part)
        place = part
    place.copy_(kept)
    return stack


def moved_in_place(
    calls: Sequence[Call], tensors: Sequence[Tensor], memory: Mapping[int, int], kept: Collection[int]
) -> list[Call]:
    """Return the calls with rolls of a stack made in place, and without writes of a view onto itself.

    `kept` are registers that are read after the calls, `memory` has a number for the memory each register lies in.
    """
    read = Counter(at for call in calls for at in call.reads)
    read.update(kept)
    parts: dict[int, Call] = {}  # by register: the call that indexed another register to make it
    made: list[Call] = []
    for call in calls:
        name = name_of(call.func)
        if name == "__getitem__" and isinstance(call.results, Register):
            parts[call.results.at] = call
        if name == "__setitem__" and _writes_itself(call, parts, memory):
            continue
        rolled = _in_place(made[-1], call, tensors) if name == "copy_" and made else None
        if rolled is not None and read[made[-1].writes[0]] == 1:
            made[-1] = rolled
        else:
            made.append(call)
    return made


def _writes_itself(call: Call, parts: Mapping[int, Call], memory: Mapping[int, int]) -> bool:
    """Return whether a call writes `x[i]`, which is a view, to `x[i]`."""
    if len(call.args) != 3 or not all(isinstance(a, Register) for a in (call.args[0], call.args[2])):
        return False
    whole, index, value = call.args
    cut = parts.get(value.at)
    if cut is None or cut.args[0] != whole or not _is_static(index) or repr(cut.args[1]) != repr(index):
        return False
    return value.at in memory and memory[value.at] == memory.get(whole.at)


def _is_static(index: Any) -> bool:
    """Return whether an index consists only of integers, slices of integers and Ellipsis."""
    if isinstance(index, slice):
        return all(n is None or type(n) is int for n in (index.start, index.stop, index.step))
    if type(index) is tuple:
        return all(map(_is_static, index))
    return index is Ellipsis or type(index) is int


def _in_place(roll: Call, copy: Call, tensors: Sequence[Tensor]) -> Call | None:
    """Return both calls as one, if the first rolls a tensor and the second copies the result back into it."""
    if name_of(roll.func) != "roll" or len(roll.args) != 1 or {*roll.kwargs} != {"shifts", "dims"}:
        return None
    stack, shift, dim = roll.args[0], roll.kwargs["shifts"], roll.kwargs["dims"]
    if copy.args != (stack, roll.results) or copy.kwargs.get("non_blocking"):
        return None
    if type(shift) is not int or type(dim) is not int or shift >= 0 or tensors[stack.at].shape[dim] % -shift:
        return None
    return copy._replace(func=move_up, args=(stack, -shift, dim), kwargs={}, reads=(stack.at,))
