"""SharedMemoryTransport: worker processes on this machine, with slots and weights in shared memory.

    free pipe   a slot number ──► worker       permission to fill that slot: one atomic write
    connection  calls ──► worker, answers and `RolloutReady` ◄── worker
    files       slots, weights (one block, read by all), counters

The parent waits on connections *and* sentinels, so it notices a death when it happens. There are no threads here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
from collections.abc import Sequence
from typing import Any

from reap._system.conversation import receive_from
from reap._system.interrupts import Interrupts
from reap._system.messages.pickling import pack
from reap._system.processes import DEADLINE, LAST_STEP, Child, StartMethod, end
from reap._system.silence import Silence
from reap.backends.base import WorkerConnection
from reap.backends.local.local_transport import LocalTransport
from reap.backends.local.process_worker import run_worker
from reap.backends.worker_handle import WorkerHandle

_CLOSE_TIME = 0.2  # seconds that a worker that raised has to close its env


class SharedMemoryTransport(LocalTransport):
    """Runs workers as child processes."""

    def __init__(self, *, start_method: StartMethod = "forkserver", buffer: Sequence[int] = ()) -> None:
        super().__init__(buffer=buffer)
        self._start_method = start_method
        self._selector: selectors.BaseSelector | None = None

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        super().open(workers, interrupts, silence)
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.open(), selectors.EVENT_READ)

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        targets = []
        for worker in workers:
            assert worker.job is not None
            targets.append(pack(functools.partial(run_worker, job=worker.job), f"what worker {worker.index} needs"))
        for worker, target in zip(workers, targets):
            theirs, ours = os.pipe()
            fds = [theirs, *(file.fd for file in self._files[worker.index]), *self._buffer]
            try:
                child = Child(target, fds=fds, start=self._start_method, name=f"reap-worker-{worker.index}")
            except BaseException:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
            assert self._selector is not None
            worker.connection = ProcessConnection(worker.index, child, ours, self._selector)

    def retire(self, worker: WorkerHandle) -> None:
        connection = worker.connection
        if isinstance(connection, ProcessConnection):
            connection.retire()
        self.clear_position(worker)

    def wait(self, seconds: float | None) -> list[int]:
        assert self._selector is not None
        ready = self._selector.select(seconds)
        found = {key.data.index: key.data for key, _ in ready if key.data is not None}
        for connection in found.values():
            connection.flush()
        return list(found)

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self, workers: Sequence[WorkerHandle]) -> None:
        if hasattr(self, "counters"):
            self.counters.leave = True  # before the signal: the worker then exits after its current step
        living = [worker for worker in workers if not worker.dropped]
        connections = [worker.connection for worker in living if isinstance(worker.connection, ProcessConnection)]
        for connection in connections:
            connection.hang_up()
            connection.child.signal(signal.SIGTERM)  # it may be in the middle of a rollout that is no longer wanted
            connection.child.signal(signal.SIGCONT)  # it may be stopped: now it receives SIGTERM
        end([connection.child for connection in connections], patience=LAST_STEP, deadline=DEADLINE)
        if self._selector is not None:
            self._selector.close()
        self.close_files()


class ProcessConnection(WorkerConnection):
    """The parent's connection to a worker process. A fork of the parent cannot give it slots."""

    def __init__(self, index: int, child: Child, free: int, selector: selectors.BaseSelector) -> None:
        self.index, self.child, self._free, self._selector = index, child, free, selector
        self._owner = os.getpid()
        selector.register(child.sentinel, selectors.EVENT_READ, self)
        selector.register(child.socket, selectors.EVENT_READ, self)
        self.flush()

    def call(self, data: bytes) -> None:
        self.child.socket.send(data)
        self.flush()

    def flush(self) -> None:
        """Send buffered data as far as possible; the rest is sent when the socket is writable again."""
        line = self.child.socket
        wanted = selectors.EVENT_READ if line.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(line).events != wanted:
            self._selector.modify(line, wanted, self)

    def fill(self, slot: int, *, random: bool) -> None:
        """Send a slot number. The worker decides itself whether its actions are random, by the claimed frames."""
        if self._free >= 0 and self._owner == os.getpid():
            with contextlib.suppress(BrokenPipeError):  # it is gone, which the next `receive` reports
                os.write(self._free, bytes([slot]))

    def receive(self) -> tuple[list[Any], bool]:
        return receive_from(self.child)

    def retire(self) -> None:
        """End its process at once, whatever it is still doing: it has failed."""
        for part in (self.child.sentinel, self.child.socket):
            with contextlib.suppress(KeyError, ValueError):  # it was retired already
                self._selector.unregister(part)
        self.hang_up()
        if not self.child.gone(_CLOSE_TIME):  # a worker that raised closes its env now
            self.child.signal(signal.SIGKILL)
            self.child.gone(DEADLINE)
        self.child.release()

    def hang_up(self) -> None:
        """Close the free pipe and the connection: no more slots, no more calls."""
        fd, self._free = self._free, -1  # first: the descriptor number may be reused once it is closed
        if fd >= 0:
            os.close(fd)
        self.child.socket.close()
