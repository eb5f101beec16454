"""A policy on a GPU for lanes on the host: its forward and sampling as one CUDA graph, rows pinned.

    row ──► static input ──► replay ──► static output ──► pinned memory ──► row         one wait per step

Rows are pinned once with their slot (`pinned`), so copies need no staging. The first step is made as it is; the second
is recorded, replayed and compared with the same step made as it is. A policy whose tensors move is recorded anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reap.core.policy import TensorPolicy
from reap.core.recording import Recording
from reap.core.slot import Layout, Row, Slot
from reap.errors import UsageError
from reap.spec import Key, Leaf


class GraphedPolicy(TensorPolicy):
    """`policy`, replayed."""

    def __init__(self, policy: TensorPolicy, model: Any, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(f"cudagraph_policy needs the policy on a CUDA device, this one is on {device}")
        if policy.remembers:
            raise UsageError(
                "cudagraph_policy: this policy finds at each step what it wrote at the last one, which a recording "
                "cannot follow; leave cudagraph_policy out"
            )
        super().__init__(policy.inputs, device)
        self._policy, self.outputs = policy, policy.outputs
        self._owners = [model] if isinstance(model, nn.Module) else []
        self._recording: Recording | None = None
        self._inputs: list[Tensor] = []
        self._static: list[Tensor] = []  # where a replay leaves its outputs
        self._host: list[Tensor] = []
        self._shown: tuple[np.ndarray[Any, Any], ...] = ()

    @property
    def written(self) -> Sequence[Key]:
        return self._policy.written

    def begin(self, slot: Slot) -> None:
        self._policy.begin(slot)
        if self._policy.remembers:
            raise UsageError("a hook has appeared on the policy's modules; build the collector after it")
        if self._recording is None:
            self._lay_out(slot)

    def _lay_out(self, slot: Slot) -> None:
        """Memory that keeps its address, and the recording between."""
        columns: dict[Key, Leaf] = slot.layout.columns
        lanes = slot.layout.dims

        def room(keys: Sequence[Key], **where: Any) -> list[Tensor]:
            return [torch.zeros(*lanes, *columns[k].shape, dtype=columns[k].dtype, **where) for k in keys]

        self._inputs = room(self.inputs, device=self.device)
        self._static = room(self.written, device=self.device)
        self._host = room(self.written, pin_memory=True)
        self._shown = tuple(t.numpy() for t in self._host)
        self._recording = Recording(self._step, self._static, [], self._owners)

    def _step(self) -> None:
        for static, value in zip(self._static, self._policy.forward(tuple(self._inputs))):
            if value.shape != static.shape or value.dtype != static.dtype:
                raise UsageError(f"the policy's output changed: {static.dtype}{list(static.shape)} before")
            static.copy_(value)

    def act(self, row: Row) -> None:
        assert self._recording is not None
        for mine, given in zip(self._inputs, row.inputs):
            mine.copy_(given, non_blocking=True)
        self._recording.play()
        for host, static in zip(self._host, self._static):
            host.copy_(static, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        for column, value in zip(row.outputs, self._shown):
            column[...] = value

    def end(self, slot: Slot, steps: int) -> None:
        self._policy.end(slot, steps)

    def forget(self, lanes: Sequence[int]) -> None:
        self._policy.forget(lanes)


def pinned(make: Callable[[Layout, int], Slot]) -> Callable[[Layout, int], Slot]:
    """Slots whose memory the GPU reads and writes without a copy between."""

    def made(layout: Layout, index: int) -> Slot:
        slot = make(layout, index)
        if slot.block.nbytes:
            _pin(slot.block)
        return slot

    return made


def _pin(block: np.ndarray[Any, Any]) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(block.ctypes.data, block.nbytes, 0)) == 0:  # else it is as it was, only slower
        weakref.finalize(block, runtime.cudaHostUnregister, block.ctypes.data).atexit = False
