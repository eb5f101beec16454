"""A policy that is trained here while copies of it act elsewhere, and nobody sends them its weights.

Workers that share the learner's memory need no update; reap's act with copies, so that no batch mixes two versions. A
script written for the former would train on data of the first weights for ever. Who trains is seen in the parameters:
torch counts what is written to each, and what is written behind its back (`parameter.data`) shows in a number of each.
The cost is a few microseconds per batch, and nothing once weights were sent.
"""

from __future__ import annotations

import ctypes
import warnings

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_WATCHED = 8  # parameters: whoever trains writes to nearly all of them
_READ = 2  # of them a number each
_PATIENCE = 3  # batches in a row


class StalenessWatch:
    """Looks at a few parameters of `policy` whenever a batch is taken; warns once if they go on without the copies'."""

    def __init__(self, policy: nn.Module, *, who: str, remedy: str) -> None:
        every = [p for p in policy.parameters() if not p.is_inference() and not is_lazy(p)]
        self._parameters = every[:: max(1, -(-len(every) // _WATCHED))]
        self._read = [p for p in self._parameters if p.numel()][-_READ:]
        self._who, self._remedy = who, remedy
        self.rebase()

    def rebase(self) -> None:
        """The copies are as the policy is now."""
        self._behind = 0
        self._sent = self._look()

    def _look(self) -> tuple[int, list[float]]:
        return sum([p._version for p in self._parameters]), [_number(p) for p in self._read]

    def batch_taken(self) -> None:
        """One more batch; what was made by old weights three times in a row is told."""
        if self._behind > _PATIENCE:
            return
        if self._look() == self._sent:
            self._behind = 0
            return
        self._behind += 1
        if self._behind == _PATIENCE:
            self._behind += 1
            warnings.warn(
                f"the policy has changed, but {self._who} with the weights it had when the collector was made: "
                f"{_PATIENCE} batches in a row. {self._remedy}",
                stacklevel=2,
            )


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
