"""Deliveries: which rollouts make a batch, and when a slot is given to a worker again.

    InStep      one slot for all: worker w fills lanes [w·B, (w+1)·B); a batch has one version and every worker.
                (Rollouts that differ in length come in a slot of each worker's own, and are copied.)
    AsReady     each worker has slots of its own: the first rollout that is ready is taken first; workers go on
                meanwhile, until their slots are full
    IntoBuffer  workers write their rollouts to a buffer themselves: only the number of frames comes here

                    ┌── a slot number ──► worker 0 ─┐
    take ── wait ───┤                               ├──► `RolloutReady` ──► lend (or copy) ──► consumer
     ▲              └── a slot number ──► worker 1 ─┘                                               │
     └──── the last tensor on the slot is freed: the next take sends its number to a worker ◄───────┘

`take`, and every method that changes pending work, is called with the supervisor's `listen_lock` and Ctrl-C held.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reap.backends.base import Delivery, Rollout
from reap.backends.joint_slot import common_layout, joined_finals
from reap.backends.supervisor import Supervisor
from reap.backends.worker_handle import WorkerHandle
from reap.backends.worker_server import RolloutReady
from reap.core.slot import TRAJ_IDS, Pool, Slot
from reap.spec import Key

NO_LIMIT = 2**62  # frames: stands for no limit
OWN_SLOTS = 4  # of a worker out of step: one being filled, one full, two with the consumer
_COMMON_SLOTS = 3  # of workers in step: two for the consumer, one to copy from while it holds both
_SLOTS_AHEAD = 2  # slots that a worker that writes to a buffer is given at a time


class InRounds(Delivery):
    """Base of deliveries that wait for a round: one rollout of every worker.

    `threshold`: when this share of the workers is done, the rollouts of the others are cut short.
    """

    _supervisor: Supervisor

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold = threshold
        self.unfinished = False

    def _enough(self, workers: int) -> int:
        """Return how many of so many workers have to be done before the others are cut short."""
        return workers if self._threshold is None else min(max(int(workers * self._threshold), 1), workers)

    def preempts(self, workers: int) -> bool:
        return self._enough(workers) < workers

    def _order(self, slot: int, *, random: bool) -> None:
        """Tell every worker to fill this slot."""
        supervisor = self._supervisor
        self.unfinished = True
        supervisor.set_random_frames(NO_LIMIT if random else 0)
        supervisor.transport.cut_short(False)
        for worker in supervisor.living:
            supervisor.fill(worker, slot)

    def _wait(self) -> None:
        """Wait until the rollouts of all workers have arrived, except those of workers that are dropped meanwhile."""
        supervisor = self._supervisor
        while (left := sum(bool(worker.pending_slots) for worker in supervisor.workers)) > 0:
            if len(supervisor.arrived) >= self._enough(len(supervisor.arrived) + left):
                supervisor.transport.cut_short(True)
            supervisor.listen()

    def discard_unfinished(self) -> None:
        if self.unfinished:
            self._wait()
            for worker, ready in self._supervisor.arrived:
                worker.discard_rollout(ready.frames)
            self.discard_arrived()

    def discard_before(self, workers: Sequence[int], call: int) -> None:
        """Do nothing: `discard_unfinished` has left no work pending, and rollouts in a buffer stay there."""

    def discard_arrived(self) -> tuple[int, int]:
        self.unfinished = False
        return _discard_arrived(self._supervisor)


class InStep(InRounds):
    """Delivers a rollout of every worker as one batch. `threshold`: when this share is done, the others stop."""

    in_step = True

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self._pool: Pool | None = None  # None: rollouts differ in length, so workers have slots of their own
        self._filling: Slot | None = None

    def prepare(self, supervisor: Supervisor) -> None:
        self._supervisor, workers = supervisor, supervisor.workers
        layouts = [worker.info.layout for worker in workers]
        if len({layout.steps for layout in layouts}) > 1:
            self._pool = None
            supervisor.transport.own_slots(workers, 1)
            return
        whole = common_layout(layouts)
        make = supervisor.transport.common_slots(workers, whole, _COMMON_SLOTS)
        self._pool = Pool(whole, limit=_COMMON_SLOTS - 1, make=lambda _, index: make(index))

    def take(self, *, random: bool, most: float = NO_LIMIT) -> Rollout:
        supervisor, workers = self._supervisor, self._supervisor.workers
        if not self.unfinished:
            self._filling = None if self._pool is None else self._pool.acquire()
            number = 0 if self._filling is None else self._filling.index % _COMMON_SLOTS
            self._order(number, random=random)
        self._wait()
        full = {worker.index: ready for worker, ready in supervisor.arrived}
        filled, self._filling = self._filling, None
        frames, _ = super().discard_arrived()
        version = next(iter(full.values())).version
        each = [full.get(worker.index) or _placeholder(worker, version) for worker in workers]
        if filled is None or self._pool is None:
            copied = [_copied_rollout(worker, ready) for worker, ready in zip(workers, each)]
            return Rollout({}, workers[0].info.layout, frames, version, parts=copied)
        lanes = [worker.info.layout.lanes for worker in workers]
        for first, worker in zip(itertools.accumulate(lanes, initial=0), workers):
            if worker.index not in full:
                _blank({key: array[:, first : first + lanes[worker.index]] for key, array in filled.arrays.items()})
        arrays = self._pool.lend(filled)
        for key in each[0].loose:
            arrays[key] = np.concatenate([ready.loose[key] for ready in each], 1)
        finals = joined_finals([ready.finals for ready in each], lanes, filled.layout)
        return Rollout(arrays, filled.layout, frames, version, finals=finals)

    def discard_arrived(self) -> tuple[int, int]:
        slot, self._filling = self._filling, None
        if slot is not None and self._pool is not None:
            self._pool.release(slot)
        return super().discard_arrived()


class AsReady(Delivery):
    """Delivers each rollout as a batch. The first `random_frames` of the run have random actions, over all workers."""

    in_step = unfinished = False

    def __init__(self, random_frames: int = 0) -> None:
        self._random_frames = random_frames
        self._started: set[int] = set()  # workers that were given their slots

    def prepare(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        supervisor.set_random_frames(self._random_frames)
        supervisor.transport.own_slots([worker for worker in supervisor.workers if not worker.slots], OWN_SLOTS)

    def take(self, *, random: bool, most: float = NO_LIMIT) -> Rollout:
        supervisor = self._supervisor
        for worker in supervisor.living:
            if worker.index not in self._started:
                self._started.add(worker.index)
                for slot in range(OWN_SLOTS):
                    supervisor.fill(worker, slot)
        self._refill_returned()
        while not supervisor.arrived:
            supervisor.listen(rollouts_first=True)
        worker, ready = supervisor.arrived.popleft()
        arrays = {**self._lend(worker, ready.slot), **ready.loose}
        layout = worker.info.layout
        return Rollout(arrays, layout, ready.frames, ready.version, worker=worker.index, finals=ready.finals)

    def _lend(self, worker: WorkerHandle, index: int) -> dict[Key, np.ndarray[Any, Any]]:
        """Return the columns of a full slot; copied if the consumer holds so many that the worker would wait."""
        slot = worker.slots[index]
        if len(worker.lent) >= OWN_SLOTS - 2:
            arrays = slot.copied()
            self._supervisor.fill(worker, index)
            return arrays
        worker.lent.add(index)
        return slot.lend()

    def _refill_returned(self) -> None:
        """Give workers back the slots whose tensors the consumer has freed."""
        for worker in self._supervisor.living:
            for index in [index for index in worker.lent if worker.slots[index].returned]:
                worker.lent.discard(index)
                self._supervisor.fill(worker, index)

    def discard_unfinished(self) -> None:
        """Do nothing: no batch is ever half collected."""

    def discard_before(self, workers: Sequence[int], call: int) -> None:
        arrived = self._supervisor.arrived
        for _ in range(len(arrived)):
            worker, ready = arrived.popleft()
            if worker.index not in workers or ready.after_call >= call:  # higher: it was restarted meanwhile
                arrived.append((worker, ready))
            else:
                worker.discard_rollout(ready.frames)
                self._supervisor.fill(worker, ready.slot)

    def discard_arrived(self) -> tuple[int, int]:
        return _discard_arrived(self._supervisor)


class IntoBuffer(InRounds):
    """Workers write their rollouts to a buffer. `in_step`: a take counts one rollout of each; else one rollout."""

    def __init__(self, *, in_step: bool, threshold: float | None = None, random_frames: int = 0) -> None:
        super().__init__(threshold)
        self.in_step, self._random_frames = in_step, 0 if in_step else random_frames

    def prepare(self, supervisor: Supervisor) -> None:
        self._supervisor, workers = supervisor, supervisor.workers
        layouts = [worker.info.layout for worker in workers]
        if self.in_step and len({layout.steps for layout in layouts}) == 1:
            common_layout(layouts)  # refuses workers whose rows would not fit together
        supervisor.set_random_frames(self._random_frames)
        supervisor.transport.own_slots(workers, _SLOTS_AHEAD, here=False)

    def take(self, *, random: bool, most: float = NO_LIMIT) -> Rollout:
        supervisor = self._supervisor
        if self.in_step:
            if not self.unfinished:
                self._order(0, random=random)
            self._wait()
            worker, ready = supervisor.arrived[0]
            frames, _ = self.discard_arrived()
        else:
            self._order_more(most)
            while not supervisor.arrived:
                supervisor.listen(rollouts_first=True)
            worker, ready = supervisor.arrived.popleft()
            frames = ready.frames
        return Rollout({}, worker.info.layout, frames, ready.version, worker=worker.index)

    def _order_more(self, most: float) -> None:
        """Order more rollouts, but no more than `most` frames: every rollout is written to the buffer."""
        supervisor = self._supervisor
        ordered = sum(ready.frames for _, ready in supervisor.arrived)
        ordered += sum(len(worker.pending_slots) * worker.size for worker in supervisor.workers)
        for ahead in range(1, _SLOTS_AHEAD + 1):
            for worker in supervisor.living:
                if len(worker.pending_slots) < ahead and ordered < most:
                    free = next(slot for slot in range(_SLOTS_AHEAD) if slot not in worker.pending_slots)
                    supervisor.fill(worker, free)
                    ordered += worker.size


def _copied_rollout(worker: WorkerHandle, ready: RolloutReady) -> Rollout:
    arrays = {**worker.slots[ready.slot].copied(), **ready.loose}
    if worker.dropped and not ready.frames:
        _blank({key: array for key, array in arrays.items() if key not in ready.loose})
    return Rollout(arrays, worker.info.layout, ready.frames, ready.version, worker=worker.index)


def _placeholder(worker: WorkerHandle, version: int) -> RolloutReady:
    """Return a placeholder for the rollout of a dropped worker: its rows are no frames."""
    layout = worker.info.layout
    loose = {key: np.empty((layout.steps, layout.lanes, *leaf.shape), object) for key, leaf in layout.loose.items()}
    return RolloutReady(0, 0, version, worker.stats, loose=loose)


def _blank(arrays: Mapping[Key, np.ndarray[Any, Any]]) -> None:
    """Mark these rows as no frames."""
    for key, array in arrays.items():
        array[...] = -1 if key == TRAJ_IDS else 0


def _discard_arrived(supervisor: Supervisor) -> tuple[int, int]:
    """Discard the rollouts that have arrived; return their frames and their number."""
    found = sum(ready.frames for _, ready in supervisor.arrived), len(supervisor.arrived)
    supervisor.arrived.clear()
    return found
