"""CudaGraphPolicy: run a GPU policy for lanes on the host as one CUDA graph, with rows in pinned memory.

    row ──► static input ──► replay ──► static output ──► pinned memory ──► row         one wait per step

The graph holds forward and sampling. Rows are pinned once with their slot (`pinned`), so copies need no staging. The
first step runs without a graph; the second is recorded, replayed and compared with the same step without a graph. A
policy whose tensors move is recorded again. Rows of another width (core/policies/buckets.py) have a recording of their
own, on the same memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reap.core.device.cudagraph_rollout import CudaGraphRollout
from reap.core.policy import Policy, RandomActions, SubstitutePolicy, TensorPolicy
from reap.core.slot import Layout, Row, Slot
from reap.errors import UsageError
from reap.spec import Key, Leaf


class Buffers:
    """Memory for rows of one width: a replay's inputs and outputs on the GPU, and the outputs' copies on the host."""

    recording: CudaGraphRollout

    def __init__(self, inputs: list[Tensor], static: list[Tensor], host: list[Tensor]) -> None:
        self.inputs, self.static, self.host = inputs, static, host
        self.host_arrays = tuple(t.numpy() for t in host)

    def cut(self, size: int) -> Buffers:
        """Return the first `size` positions of this memory."""
        return Buffers([t[:size] for t in self.inputs], [t[:size] for t in self.static], [t[:size] for t in self.host])


class CudaGraphPolicy(SubstitutePolicy):
    """A policy whose steps are replayed as a CUDA graph."""

    def __init__(self, policy: TensorPolicy, model: Any, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(f"cudagraph_policy needs the policy on a CUDA device, this one is on {device}")
        if policy.remembers:
            raise UsageError(
                "cudagraph_policy: this policy reads at each step what it wrote at the previous one, which a CUDA "
                "graph cannot do; leave cudagraph_policy out"
            )
        super().__init__(policy, policy.inputs, device)
        self.outputs = policy.outputs
        self._owners = [model] if isinstance(model, nn.Module) else []
        self._widths: dict[torch.Size, Buffers] = {}
        self._widest: Buffers | None = None

    @property
    def written(self) -> Sequence[Key]:
        return self._plain.written

    def begin(self, slot: Slot) -> None:
        self._plain.begin(slot)
        if self._plain.remembers:
            raise UsageError(
                "a hook was added to the policy's modules after the collector was built; build the collector afterwards"
            )
        if self._widest is None:
            self._widest = self._allocate(slot)
        for buffers in self._widths.values():
            buffers.recording.look_again()

    def _allocate(self, slot: Slot) -> Buffers:
        """Allocate memory that keeps its address, for rows of the full width and, cut, of any other."""
        columns: dict[Key, Leaf] = slot.layout.columns
        lanes = slot.layout.dims

        def room(keys: Sequence[Key], **where: Any) -> list[Tensor]:
            return [torch.zeros(*lanes, *columns[k].shape, dtype=columns[k].dtype, **where) for k in keys]

        return Buffers(
            room(self.inputs, device=self.device),
            room(self.written, device=self.device),
            room(self.written, pin_memory=self.device is not None and self.device.type == "cuda"),
        )

    def _buffers_for(self, row: Row) -> Buffers:
        """Return the memory for rows as wide as this one, with its recording."""
        assert self._widest is not None
        shape = row.outputs[0].shape
        buffers = self._widths.get(shape)
        if buffers is None:
            whole = shape == self._widest.static[0].shape
            buffers = self._widths[shape] = self._widest if whole else self._widest.cut(shape[0])
            step = functools.partial(self._step, buffers)
            buffers.recording = CudaGraphRollout(step, buffers.static, [], self._owners)
        return buffers

    def _step(self, buffers: Buffers) -> None:
        for static, value in zip(buffers.static, self._plain.forward(tuple(buffers.inputs))):
            if value.shape != static.shape or value.dtype != static.dtype:
                raise UsageError(
                    f"the policy's output changed from {static.dtype}{list(static.shape)} to "
                    f"{value.dtype}{list(value.shape)}, which cudagraph_policy does not allow"
                )
            static.copy_(value)

    def act(self, row: Row) -> None:
        buffers = self._buffers_for(row)
        for own_input, given in zip(buffers.inputs, row.inputs):
            own_input.copy_(given, non_blocking=True)
        buffers.recording.play()
        for host, static in zip(buffers.host, buffers.static):
            host.copy_(static, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        for column, value in zip(row.outputs, buffers.host_arrays):
            column[...] = value

    def end(self, slot: Slot, steps: int) -> None:
        self._plain.end(slot, steps)


def recorded(policy: Policy, model: Any, device: torch.device | None) -> CudaGraphPolicy:
    """Return `policy` replayed as a CUDA graph, or raise a UsageError that says why it cannot be recorded."""
    if isinstance(policy, TensorPolicy):
        return CudaGraphPolicy(policy, model, device or torch.device("cpu"))
    if isinstance(policy, RandomActions):
        raise UsageError("cudagraph_policy records what a policy computes, and random actions are drawn; leave it out")
    raise UsageError(
        "cudagraph_policy: this env gives the policy whole TensorDicts instead of columns of tensors; "
        "leave cudagraph_policy out"
    )


def pinned(make: Callable[[Layout, int], Slot], device: torch.device | None) -> Callable[[Layout, int], Slot]:
    """Return a factory of slots, also in shared memory, that a policy on `device` accesses without staging copies."""

    def made(layout: Layout, index: int) -> Slot:
        slot = make(layout, index)
        pin(slot.block, device)
        return slot

    return made


def pin(block: np.ndarray[Any, Any], device: torch.device | None) -> None:
    """Register memory that a policy on `device` will read with that GPU, in this process, until `block` is freed.

    Other processes that map it are not affected. Without a CUDA `device` this does nothing and makes no CUDA context.
    """
    if device is None or device.type != "cuda" or not block.nbytes:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(block.ctypes.data, block.nbytes, 0)) == 0:  # else it is not pinned: only slower
        weakref.finalize(block, runtime.cudaHostUnregister, block.ctypes.data).atexit = False
