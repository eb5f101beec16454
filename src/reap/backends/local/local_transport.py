"""LocalTransport: slots, weights and counters in memory that a collector and its workers on this machine share.

    files    slots (common to all, or of each worker), weights (one block, read by all), counters

Subclasses run the workers that fill them: in processes (shared_memory.py), or in this one (inline_workers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from reap._system.interrupts import Interrupts
from reap._system.silence import Silence
from reap.backends.base import Transport
from reap.backends.local.process_worker import WorkerFiles, WorkerMemory
from reap.backends.local.shared_counters import NOWHERE, SharedCounters
from reap.backends.worker_handle import WorkerHandle
from reap.core.shared_slots import SharedFile, SharedSlots
from reap.core.slot import Layout, Slot
from reap.weight_update import WeightTransport
from reap.weights.shared import Packing, SharedWeights


class LocalTransport(Transport):
    """Base of transports whose workers share memory with the parent. `buffer`: descriptors their writers need."""

    weight_schemes: ClassVar[tuple[WeightTransport, ...]] = ("shared", "per_worker", "none")
    can_add_workers: ClassVar[bool] = False

    def __init__(self, *, buffer: Sequence[int] = ()) -> None:
        self._buffer = tuple(buffer)
        self._opened: list[SharedFile] = []
        self._files: list[WorkerFiles] = []  # by worker
        self._memory: dict[int, WorkerMemory] = {}  # by worker
        self.counters: SharedCounters  # set by `open`

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        common, weights, counters = (self._file(name) for name in ("slots", "weights", "counters"))
        for _ in workers:
            self._files.append(WorkerFiles(common, self._file("slots"), weights, counters, self._file("weights")))
        self.counters = SharedCounters(counters, len(workers))
        self.counters.step[:] = self.counters.lane[:] = NOWHERE

    def _file(self, name: str) -> SharedFile:
        self._opened.append(SharedFile(f"reap-{name}"))
        return self._opened[-1]

    def clear_position(self, worker: WorkerHandle) -> None:
        """Note that a worker is not in a rollout any more."""
        self.counters.step[worker.index] = self.counters.lane[worker.index] = NOWHERE

    def release_claims(self, worker: WorkerHandle) -> None:
        self.counters.claimed[worker.index] = worker.frames

    def position(self, worker: WorkerHandle) -> dict[str, int]:
        step = int(self.counters.step[worker.index])
        if step < 0:
            return {}
        lane = 0 if worker.info.layout.lanes == 1 else int(self.counters.lane[worker.index])
        return {"step": step} if lane == NOWHERE else {"step": step, "lane": lane}

    def set_random_frames(self, frames: int) -> None:
        self.counters.random = frames

    def cut_short(self, stop: bool) -> None:
        self.counters.stop = stop

    # ---- memory ---------------------------------------------------------------------------------------------------

    def common_slots(self, workers: Sequence[WorkerHandle], whole: Layout, count: int) -> Callable[[int], Slot]:
        first = 0
        for worker in workers:
            self._memory[worker.index] = WorkerMemory(whole, count, first, common=True)
            first += worker.info.layout.lanes
        return SharedSlots(self._files[0].common, whole, count).slot

    def own_slots(self, workers: Sequence[WorkerHandle], count: int, *, here: bool = True) -> None:
        for worker in workers:
            own = worker.info.layout
            self._memory[worker.index] = WorkerMemory(own, count)
            shared = SharedSlots(self._files[worker.index].own, own, count)
            worker.slots = {index: shared.slot(index) for index in range(count)} if here else {}

    def begin_arguments(self, worker: WorkerHandle, packing: Packing | None) -> tuple[Any, ...]:
        return (replace(self._memory[worker.index], packing=packing),)

    def weight_channel(self, packing: Packing, needed: Sequence[str]) -> SharedWeights:
        return SharedWeights(self._files[0].weights, packing)

    def pass_weights(self, worker: WorkerHandle, data: bytes) -> int:
        room = self._files[worker.index].packed.map(len(data))  # mapped, because one write() call ends at 2 GiB
        room[:] = np.frombuffer(data, np.uint8)
        return len(data)

    def resend_weights(self, worker: WorkerHandle) -> None:
        """Do nothing: the worker reads them from the shared block."""

    # ---- the end --------------------------------------------------------------------------------------------------

    def close_files(self) -> None:
        """Close the shared files; memory that is still mapped, for example by batches, stays valid."""
        for file in self._opened:
            file.close()
