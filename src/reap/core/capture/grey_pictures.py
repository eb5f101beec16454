"""Convert byte images to grey, a few lanes at a time: the same sums, in memory that stays in the processor's cache.

    recorded, over all lanes at once                          replayed, for as many lanes as fit into the cache
    x = pictures / 255                                        x = bytes as floats; x /= 255
    r, g, b = x.unbind(-3)                                    x *= (0.2989, 0.587, 0.114, 0.2989, …)
    (0.2989 * r + 0.587 * g) + 0.114 * b                      (x[0::3] + x[1::3]) + x[2::3]

Each number is computed by the same operations in the same order, so it has the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from reap.core.capture.recorder import Call, Register, name_of

_NAMES = ("div", "unbind", "mul", "mul", "add", "mul", "add")
_CACHE_BYTES = 1 << 20  # bytes of floats converted at a time
_MIN_NUMBERS = 1 << 14  # fewest numbers for which this pays: with fewer, the time is spent on the calls


class GreyPictures:
    """Converts bytes `[…, 3, H, W]`, in which a pixel's colours lie side by side, to grey floats `[…, H, W]`."""

    def __init__(self, shape: Sequence[int], divisor: float, weights: Sequence[float]) -> None:
        self.__name__ = "grey_pictures"  # for `name_of`, which tells recorded calls apart
        *self._lead, _, self._height, self._width = shape
        self._divisor = divisor
        self._weights = torch.tensor(weights, dtype=torch.float32).repeat(self._width)
        height, width, lanes = self._height, self._width, max(1, torch.Size(self._lead).numel())
        self._lanes = min(lanes, max(1, _CACHE_BYTES // (height * width * 3 * 4)))  # of them at a time
        floats, sums = torch.empty(self._lanes, height, width * 3), torch.empty(self._lanes, height, width)
        sizes = {self._lanes, lanes % self._lanes or self._lanes}
        self._scratch = {
            n: (floats[:n], *(floats[:n, :, c::3] for c in range(3)), sums[:n]) for n in sizes
        }  # scratch memory by number of lanes: all colours, each of them, and the sum of the first two

    def __call__(self, pictures: Tensor) -> Tensor:
        lines = pictures.movedim(-3, -1).reshape(-1, self._height, self._width * 3)
        grey = torch.empty(len(lines), self._height, self._width)
        for some, made in zip(torch.split(lines, self._lanes), torch.split(grey, self._lanes)):
            floats, red, green, blue, sums = self._scratch[len(some)]
            floats.copy_(some)
            torch.div(floats, self._divisor, out=floats)
            torch.mul(floats, self._weights, out=floats)
            torch.add(red, green, out=sums)
            torch.add(sums, blue, out=made)
        return grey.reshape(*self._lead, self._height, self._width)


def with_grey_pictures(calls: Sequence[Call], tensors: Sequence[Tensor], kept: Collection[int]) -> list[Call]:
    """Return the calls, with those that convert byte images to grey as one; registers `kept` are read afterwards."""
    read = Counter(at for call in calls for at in call.reads)
    read.update(kept)
    made: list[Call] = []
    i = 0
    while i < len(calls):
        some = calls[i : i + len(_NAMES)]
        one = _as_one(some, tensors, read) if tuple(name_of(call.func) for call in some) == _NAMES else None
        made.append(calls[i] if one is None else one)
        i += 1 if one is None else len(some)
    return made


def _as_one(calls: Sequence[Call], tensors: Sequence[Tensor], read: Counter[int]) -> Call | None:
    """Return these seven calls as one, if together they convert byte images to grey."""
    divide, unbind, first, second, both, third, last = calls
    if len(divide.args) != 2 or divide.kwargs or type(divide.args[1]) not in (int, float):
        return None
    if unbind.kwargs != {"dim": -3} or unbind.args != (divide.results,) or len(unbind.results) != 3:
        return None
    scaled = (first, second, third)
    for call, colour in zip(scaled, unbind.results):
        if len(call.args) != 2 or call.kwargs or call.args[0] != colour or type(call.args[1]) is not float:
            return None
    if both.args != (first.results, second.results) or last.args != (both.results, third.results):
        return None
    between = [at for call in calls[:-1] for at in call.writes]
    if both.kwargs or last.kwargs or any(read[at] != 1 for at in between) or any(call.changes for call in calls):
        return None
    source = divide.args[0]
    given, made = tensors[source.at], tensors[last.results.at]
    bytes_to_floats = given.dtype is torch.uint8 and made.dtype is torch.float32 and given.device.type == "cpu"
    if not bytes_to_floats or given.numel() < _MIN_NUMBERS or not given.movedim(-3, -1).is_contiguous():
        return None
    make = GreyPictures(tuple(given.shape), divide.args[1], [call.args[1] for call in scaled])
    return Call(make, (Register(source.at),), {}, last.results, (source.at,), last.writes, (), False)
