"""The worker's side of the shared-memory transport: what runs in a worker's process.

    free pipe ──► slot number ──► pre-collect hook ──► refresh weights ──► fill
    fill ──┬──────────► `RolloutReady` ──► connection
           └► writer ─► `RolloutReady` ──► connection    (a replay buffer)
    connection ──► call (seed, reset, state …), answered between two rollouts

The worker waits for a free slot or a call, and answers calls before it fills slots. It ends when the parent closes
either pipe, or at SIGTERM. With a writer it can also run free: then it waits for no slot, and reports the frames it has
collected in the shared counters.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch

from reap._system.conversation import live
from reap._system.fork_server.child import freeze_objects, leave_at
from reap._system.messages.framed import send
from reap._system.messages.pickling import dumps
from reap._system.messages.remote_errors import Raised
from reap.backends.local.pauses import AGAIN
from reap.backends.local.shared_counters import BETWEEN, NOWHERE, SharedCounters
from reap.backends.worker_server import HELLO, EnvRebuilt, Job, WorkerServer, what_it_did
from reap.core.device.cudagraph_policy import pin
from reap.core.measuring.episode_log import UnreportedEpisodes
from reap.core.rollout import RolloutLoop
from reap.core.shared_slots import SharedFile, SharedSlots
from reap.core.slot import Layout, Slot
from reap.failures import RemoteRebuilds
from reap.seeding import seed_process
from reap.weights.shared import Packing, SharedWeights

_REPORT_POLL = 50  # milliseconds between checks for room to report episodes to the parent
_BUFFER_POLL = 2  # milliseconds between checks of a buffer that wants no more rows for now


class WorkerFiles(NamedTuple):
    """The memory a worker shares with its parent."""

    common: SharedFile  # slots common to all workers, of which it fills its lanes
    own: SharedFile  # slots of its own
    weights: SharedFile  # the policy's weights, for all workers
    counters: SharedFile
    packed: SharedFile  # weights for this worker alone


@dataclass(frozen=True)
class WorkerMemory:
    """The memory of a worker: `count` slots of `layout`, in which it fills its lanes from `first_lane` on."""

    layout: Layout
    count: int
    first_lane: int = 0
    common: bool = False  # whether the slots lie in the file common to all workers, or in its own
    packing: Packing | None = None


def run_worker(connection: Connection, fds: Sequence[int], job: Job) -> None:
    """Run a worker process from start to end."""
    send(connection, HELLO)
    torch.set_num_threads(job.threads)
    seed_process(job.entropy)
    free, *given = fds
    count = len(WorkerFiles._fields)
    files = WorkerFiles(*(SharedFile(fd=fd) for fd in given[:count]))

    def serve(server: LocalWorkerServer) -> None:
        leave_at(
            RolloutLoop.fill, WorkerServer._collect, LocalWorkerServer.serve, asked=lambda: bool(server.counters.leave)
        )
        send(connection, server.info)
        server.serve(connection, free)

    def tell(raised: Raised) -> None:
        with contextlib.suppress(OSError):
            send(connection, raised)

    live(
        lambda: LocalWorkerServer(job, files, partial(send, connection), buffer=given[count:]),
        serve,
        tell=tell,
        doing=what_it_did,
        close=lambda server: server.worker.close(),
    )


class _Interruptor:
    """Stops the rollouts of the remaining workers when enough workers are done."""

    def __init__(self, counters: SharedCounters) -> None:
        self.counters = counters

    def collection_stopped(self) -> bool:
        """Return whether rollouts should end now; the loop calls this after every step."""
        return bool(self.counters.stop)

    def start_collection(self) -> None:
        """Let rollouts run to their end."""
        self.counters.stop = False

    def stop_collection(self) -> None:
        """Make rollouts end after the current step."""
        self.counters.stop = True

    def __reduce__(self) -> Any:
        """Pickle as a snapshot of the current value."""
        return _InterruptorSnapshot, (self.collection_stopped(),)


class _InterruptorSnapshot:
    """The value of an interruptor at the time it was pickled."""

    def __init__(self, stopped: bool) -> None:
        self._stopped = stopped

    def collection_stopped(self) -> bool:
        """Return whether collection was stopped at that time."""
        return self._stopped


class LocalWorkerServer(WorkerServer):
    """A worker server that shares memory with its collector. `notify` sends messages that answer no call."""

    freeze_objects: Callable[[], None] = staticmethod(freeze_objects)  # called when all long-lived objects exist

    def __init__(self, job: Job, files: WorkerFiles, notify: Callable[[Any], None], *, buffer: Sequence[int]) -> None:
        self._job, self._files = job, files
        self.counters = SharedCounters(files.counters, job.workers)
        self._position = self.counters.step[job.index : job.index + 1]
        self._runs_free = False  # whether it runs free, without slots
        self.rebuilds = RemoteRebuilds(lambda error, seconds: notify(EnvRebuilt(Raised.of(error, "the env"), seconds)))
        self._unreported = UnreportedEpisodes()  # episodes for which the shared counters had no room yet
        if job.init is not None:
            job.init()
        plan = job.plan
        if job.preempted:
            self.interruptor = _Interruptor(self.counters)
            plan = replace(plan, stop=self.interruptor.collection_stopped)
        super().__init__(job, plan, job.writer and partial(job.writer, buffer, job.index))
        self.worker.loop.at = self._position  # the parent can read our position, whatever happens to this process
        self.worker.env.report_lane(memoryview(self.counters.lane[job.index : job.index + 1]))  # type: ignore[arg-type]
        self._slots: dict[int, Slot] = {}
        self._shared: SharedWeights | None = None

    def serve(self, connection: Connection, free: int) -> None:
        """Answer calls and fill free slots, calls first, until the parent is gone."""
        calls = connection.fileno()
        both, only_calls = select.poll(), select.poll()
        both.register(free, select.POLLIN)
        for poll in (both, only_calls):
            poll.register(calls, select.POLLIN)
        while True:
            poll = only_calls if self._runs_free else both
            ready = {fd for fd, _ in poll.poll(self._poll_timeout() if self._runs_free else None)}
            if calls in ready:
                call, name, arguments = connection.recv()
                send(connection, self.answer(call, name, arguments))
            elif self._runs_free:
                self._run_free()
            else:
                data = os.read(free, 1)
                if not data:
                    return
                connection.send_bytes(self.fill(data[0]))
                self._handed_over()
                self._position[0] = NOWHERE

    def fill(self, index: int) -> bytes:
        """Fill a slot, and return the pickled message about it. Claimed frames decide whether actions are random."""
        slot = self._slots[index]
        claimed = self.counters.claim(self._job.index, slot.layout.frames, most=self.counters.random)
        message = self._ready_message(slot.index, slot, self._collect(slot, random=claimed is not None))
        return dumps(message, "an observation") if message.loose else pickle.dumps(message)

    def _rollout(self, slot: Slot, *, random: bool) -> int:
        frames = super()._rollout(slot, random=random)
        self._position[0] = BETWEEN
        return frames

    def _poll_timeout(self) -> int:
        """Return the milliseconds to wait for a call before checking again whether to collect."""
        if self.counters.rest:
            return int(1000 * AGAIN)
        if self.counters.claimed.sum() >= self.counters.total:  # until a worker that fails releases its frames
            return _REPORT_POLL if self._unreported else int(1000 * AGAIN)
        return 0 if self.writer is not None and self.writer.wanted else _BUFFER_POLL

    def _run_free(self) -> None:
        counters, index = self.counters, self._job.index
        if self._unreported:
            counters.report_ended(index, self._unreported)
        if counters.rest or self.writer is None or not self.writer.wanted:
            return
        self._position[0] = BETWEEN  # first: hooks and writes may hang from here on, which the parent must notice
        slot = self._slots[0]
        before = counters.claim(index, slot.layout.frames, most=counters.total)
        if before is not None:
            frames = self._collect(slot, random=before < counters.random)
            self._unreported.add(self.worker.take_episodes())
            counters.finish(index, frames, slot.layout.frames, self.counts(), self._unreported)
            self._handed_over()
        self._position[0] = NOWHERE

    def _refresh(self) -> None:
        if self._shared is not None and (version := self._shared.refresh(self.tensors)) is not None:
            self.worker.version = version

    # ---- calls ----------------------------------------------------------------------------------------------------

    def do_begin(self, memory: WorkerMemory) -> None:
        """Map the memory that the parent has allocated."""
        whole = SharedSlots(self._files.common if memory.common else self._files.own, memory.layout, memory.count)
        pin(whole.block, self.worker.plan.policy_device)
        self._slots = {i: whole.window(i, self.worker.layout, memory.first_lane) for i in range(memory.count)}
        if memory.packing is not None:
            self._shared = SharedWeights(self._files.weights, memory.packing)
        self.freeze_objects()  # what lives as long as the worker is not scanned for garbage again and again

    def do_run(self) -> None:
        """Run free from now on: collect rollouts into the first slot without waiting for its number."""
        self._runs_free = True

    def do_look(self) -> None:
        """Do nothing: a worker that answers is between two rollouts, and reads the counters before the next one."""

    def _count_on(self, taken: int, *, loaded: bool = False) -> None:
        if loaded or self.writer is None:  # frames in a buffer stay there, wanted or not
            self.counters.claimed[self._job.index] = taken

    def do_load_weights(self, size: int, version: int) -> None:
        """Load weights for this worker alone: the first `size` bytes of their shared file."""
        self._load(cloudpickle.loads(self._files.packed.map(size)), version)
