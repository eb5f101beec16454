"""InlineTransport: workers in this process, one after another, for looking into them: `workers="inline"`.

    fill, call ──► orders of a worker ──► wait: the next who has one does it here, in the thread that waits ──► inbox

Each has its own copies of what it was given, its own random generators and as many torch threads as in a process, so it
makes the same data. Nothing runs beside anything else: `breakpoint()`, a debugger and `print` see one worker at a time.
Ctrl-C breaks off the rollout that is being made, as in a collector without workers; it is made anew.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reap._system.interrupts import Interrupts
from reap._system.pickling import dumps, pack
from reap._system.processes import DEADLINE
from reap._system.remote_errors import Raised, as_reap_error
from reap._system.silence import Silence
from reap._system.threads import stack_of
from reap.backends.base import Halted, WorkerConnection, break_off_when
from reap.backends.local.local_transport import LocalTransport
from reap.backends.local.process_worker import LocalWorkerServer, WorkerFiles
from reap.backends.worker_handle import WorkerHandle
from reap.backends.worker_server import Job, what_it_did
from reap.core.resume import generators, set_generators
from reap.errors import ReapError, WorkerDied, WorkerSilent
from reap.seeding import seed_process

_REST = 0.05  # seconds; nobody has anything to do, and somebody waits


class InlineTransport(LocalTransport):
    """Reaches workers in this process. One thread at a time is in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: dict[int, InlineConnection] = {}
        self._last = -1  # whose turn it was
        self._inside = threading.Lock()
        self._leaving = False

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        super().open(workers, interrupts, silence)
        self._interrupts = interrupts
        silence.watched = False  # who waits for its turn, or for somebody at a debugger's prompt, is not stuck

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            if worker.job is not None:
                connection = InlineConnection(worker.job, self._files[worker.index], self._broken_off)
                worker.connection = self._connections[worker.index] = connection

    def _broken_off(self) -> bool:
        return self._leaving or self._interrupts.woken

    def wait(self, seconds: float | None) -> list[int]:
        if unheard := [index for index, connection in self._connections.items() if connection.unheard]:
            return unheard  # Ctrl-C came between a worker and whoever listens to it
        busy = [index for index in sorted(self._connections) if self._connections[index].busy]
        if not busy:
            time.sleep(_REST if seconds is None else min(seconds, _REST))
            return []
        self._last = next((index for index in busy if index > self._last), busy[0])
        with self._inside:
            try:
                self._connections[self._last].work(self._interrupts)
            finally:
                if self._leaving:
                    self._end()
        return [self._last]

    def retire(self, worker: WorkerHandle) -> None:
        connection = self._connections.pop(worker.index, None)
        if connection is not None:
            connection.end()
        self.clear_position(worker)

    def close(self, workers: Sequence[WorkerHandle]) -> None:
        """A thread that is in a worker closes them itself, when it comes out: after the step it is in."""
        self._leaving = True
        if self._inside.acquire(timeout=0 if self._mine() else DEADLINE):
            try:
                self._end()
            finally:
                self._inside.release()

    def _mine(self) -> bool:
        """Return whether this very thread is in a worker: its env, or a signal handler, closes the collector."""
        return any(connection.thread == threading.get_ident() for connection in self._connections.values())

    def _end(self) -> None:
        for connection in self._connections.values():
            connection.end()
        self._connections.clear()
        self.close_files()


class InlineConnection(WorkerConnection):
    """A worker in this process, and what it was asked, which it does when it is its turn."""

    def __init__(self, job: Job, files: WorkerFiles, broken_off: Callable[[], bool]) -> None:
        # Copies, as a process has. What writes to a buffer stays: it is the collector's own buffer.
        copied: Job = pack(replace(job, writer=None), f"what worker {job.index} needs").unpack()
        self._job = replace(copied, writer=job.writer)
        self._files, self._broken_off = files, broken_off
        self._calls: deque[bytes] = deque()
        self._slots: deque[int] = deque()
        self._inbox: list[Any] = []
        self._server: LocalWorkerServer | None = None
        self._generators: Any = None  # where its random generators are; None: not seeded yet
        self.thread: int | None = None  # that is in it
        self.over = False
        self.child = WorkerHere(self)

    @property
    def busy(self) -> bool:
        """Whether it has something to do."""
        return not self.over and (self._server is None or bool(self._calls) or bool(self._slots))

    @property
    def unheard(self) -> bool:
        """Whether it has said something that nobody has heard."""
        return bool(self._inbox)

    def call(self, data: bytes) -> None:
        self._calls.append(data)

    def fill(self, slot: int, *, random: bool) -> None:
        """The worker itself knows whether its actions are random: it counts frames with the others."""
        self._slots.append(slot)

    def _say(self, message: Any) -> None:
        self._inbox.append(message)

    def hear(self) -> tuple[list[Any], bool]:
        said, self._inbox = self._inbox, []
        return said, self.over

    def work(self, interrupts: Interrupts) -> None:
        """Do one thing: be built, answer a call, fill a slot. What breaks it off leaves it to be done.

        Ctrl-C comes in the worker's code, and waits elsewhere: what was done is said, and generators are given back.
        """
        try:
            with self._as_worker():
                self._do_one(interrupts)
        except (KeyboardInterrupt, Halted):
            raise
        except BaseException as error:
            self._inbox.append(RaisedHere.of(error, what_it_did(self._server)))
            self.over = True  # first: the env that is closed next is the user's code, which Ctrl-C may break off
            with interrupts.admitted():
                self.end()

    def _do_one(self, interrupts: Interrupts) -> None:
        if self._server is None:
            with interrupts.admitted():
                server = _InlineWorkerServer(self._job, self._files, self._broken_off, self._say)
            self._server = server
            self._inbox.append(server.info)
        elif self._calls:
            with interrupts.admitted():
                call, name, arguments = pickle.loads(self._calls[0])
                answer = self._server.answer(call, name, arguments)
            self._calls.popleft()
            # Through bytes: weights, for one, are not to be the worker's own.
            self._inbox.append(pickle.loads(dumps(answer, f"the answer to {name}")))
        else:
            try:
                with interrupts.admitted():
                    told = self._server.fill(self._slots[0])
            except BaseException:
                self._server.worker.begin_anew()
                raise
            self._slots.popleft()
            self._inbox.append(pickle.loads(told))

    @contextlib.contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Inside, what a process has one of is this worker's: random generators, the number of torch's threads."""
        ours, threads = generators(), torch.get_num_threads()
        torch.set_num_threads(self._job.threads)
        if self._generators is None:
            seed_process(self._job.entropy)
        else:
            set_generators(self._generators)
        self.thread = threading.get_ident()
        try:
            yield
        finally:
            self.thread = None
            self._generators = generators()
            torch.set_num_threads(threads)
            set_generators(ours)

    def end(self) -> None:
        """Close its env. May be called twice."""
        self.over, server, self._server = True, self._server, None
        if server is not None:
            server.worker.close()


class _InlineWorkerServer(LocalWorkerServer):
    """A worker whose process is the collector's own."""

    settle = staticmethod(lambda: None)  # what is garbage here is not ours to say

    def __init__(
        self, job: Job, files: WorkerFiles, broken_off: Callable[[], bool], say: Callable[[Any], None]
    ) -> None:
        super().__init__(job, files, say, buffer=())
        break_off_when(broken_off, self.worker)

    def fill(self, index: int) -> bytes:
        told = super().fill(index)
        self._handed_over()
        return told


class WorkerHere:
    """Whether a worker of this process lives."""

    label = " (in this process)"

    def __init__(self, connection: InlineConnection) -> None:
        self._connection = connection

    @property
    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    def gone(self) -> bool:
        """Return whether it was closed."""
        return self._connection.over

    def death(self) -> WorkerDied:
        """Return the error for one that was closed."""
        return WorkerDied("was closed")

    def ask_stack(self) -> str:
        """Return where the thread is that is in it."""
        thread = self._connection.thread
        return "(nobody is in it: it waits for its turn)" if thread is None else stack_of(thread)

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        """Return the error for one that took so long; nobody looks for it."""
        return WorkerSilent(f"took {seconds:.1f} s (timeout={timeout}); its stack:\n{self.ask_stack()}")


@dataclass(frozen=True)
class RaisedHere(Raised):
    """An error of a worker that is here: itself, with its traceback, so that `pdb.pm()` shows the env's own frames."""

    itself: ReapError | None = None

    @classmethod
    def of(cls, error: BaseException, doing: str = "") -> RaisedHere:
        """Return the message for what was just caught."""
        return cls(b"", b"", "", as_reap_error(error, doing))

    def unpack(self) -> ReapError:
        """Return the error itself."""
        assert self.itself is not None
        return self.itself
