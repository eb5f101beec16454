"""InlineTransport: runs workers in this process, one at a time, for debugging them: `workers="inline"`.

    fill, call ──► queue of a worker ──► wait: the next worker with work runs in the waiting thread ──► inbox

Each worker has its own copies of its arguments, its own random generators and as many torch threads as in a process, so
it collects the same data. Nothing runs in parallel: `breakpoint()`, a debugger and `print` see one worker at a time.
Ctrl-C aborts the current rollout, as in a collector without workers; the rollout is collected again.
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
from reap._system.messages.pickling import dumps, pack
from reap._system.messages.remote_errors import Raised
from reap._system.processes import DEADLINE
from reap._system.silence import Silence
from reap._system.threads import stack_of
from reap.backends.base import Halted, WorkerConnection, halt_when
from reap.backends.local.local_transport import LocalTransport
from reap.backends.local.process_worker import LocalWorkerServer, WorkerFiles
from reap.backends.worker_handle import WorkerHandle
from reap.backends.worker_server import Job, what_it_did
from reap.core.resume import generators, set_generators
from reap.errors import ReapError, WorkerDied, WorkerSilent, as_raised
from reap.seeding import seed_process

_IDLE_SLEEP = 0.05  # seconds to sleep when no worker has work


class InlineTransport(LocalTransport):
    """Runs workers in this process. One thread at a time is in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: dict[int, InlineConnection] = {}
        self._last = -1  # the worker that ran last
        self._inside = threading.Lock()
        self._leaving = False

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        super().open(workers, interrupts, silence)
        self._interrupts = interrupts
        silence.watched = False  # a worker that waits for its turn, or at a debugger's prompt, is not stuck

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            if worker.job is not None:
                connection = InlineConnection(worker.job, self._files[worker.index], self._is_cancelled)
                worker.connection = self._connections[worker.index] = connection

    def _is_cancelled(self) -> bool:
        return self._leaving or self._interrupts.woken

    def wait(self, seconds: float | None) -> list[int]:
        if speakers := [index for index, connection in self._connections.items() if connection.has_messages]:
            return speakers  # Ctrl-C came before these messages were read
        busy = [index for index in sorted(self._connections) if self._connections[index].busy]
        if not busy:
            time.sleep(_IDLE_SLEEP if seconds is None else min(seconds, _IDLE_SLEEP))
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
        """Close all workers. A thread that is in one of them does so itself, after its current step."""
        self._leaving = True
        if self._inside.acquire(timeout=0 if self._is_inside() else DEADLINE):
            try:
                self._end()
            finally:
                self._inside.release()

    def _is_inside(self) -> bool:
        """Return whether the calling thread is in a worker: its env or a signal handler closes the collector."""
        return any(connection.thread == threading.get_ident() for connection in self._connections.values())

    def _end(self) -> None:
        for connection in self._connections.values():
            connection.end()
        self._connections.clear()
        self.close_files()


class InlineConnection(WorkerConnection):
    """A worker in this process, and the work it does when it is its turn."""

    def __init__(self, job: Job, files: WorkerFiles, is_cancelled: Callable[[], bool]) -> None:
        # Copies, as in a process, except for the writer: it writes to the collector's own buffer.
        copied: Job = pack(replace(job, writer=None), f"what worker {job.index} needs").unpack()
        self._job = replace(copied, writer=job.writer)
        self._files, self._is_cancelled = files, is_cancelled
        self._calls: deque[bytes] = deque()
        self._slots: deque[int] = deque()
        self._inbox: list[Any] = []
        self._server: LocalWorkerServer | None = None
        self._generators: Any = None  # states of its random generators; None: not seeded yet
        self.thread: int | None = None  # the thread that is in it
        self.over = False
        self.child = InlineLiveness(self)

    @property
    def busy(self) -> bool:
        """Whether it has work."""
        return not self.over and (self._server is None or bool(self._calls) or bool(self._slots))

    @property
    def has_messages(self) -> bool:
        """Whether it has sent messages that were not read yet."""
        return bool(self._inbox)

    def call(self, data: bytes) -> None:
        self._calls.append(data)

    def fill(self, slot: int, *, random: bool) -> None:
        """Queue a slot. The worker decides itself whether its actions are random, from the shared count of frames."""
        self._slots.append(slot)

    def receive(self) -> tuple[list[Any], bool]:
        messages = list(self._inbox)
        self._inbox.clear()
        return messages, self.over

    def work(self, interrupts: Interrupts) -> None:
        """Do one piece of work: build the worker, answer a call or fill a slot. If interrupted, it is repeated later.

        Ctrl-C is raised in the worker's code and waits elsewhere, so that results are stored and generators restored.
        """
        try:
            with self._as_worker():
                self._do_one(interrupts)
        except (KeyboardInterrupt, Halted):
            raise
        except BaseException as error:
            self._inbox.append(InlineRaised.of(error, what_it_did(self._server)))
            self.over = True  # first: Ctrl-C may interrupt the closing of the env, which is the user's code
            with interrupts.admitted():
                self.end()

    def _do_one(self, interrupts: Interrupts) -> None:
        if self._server is None:
            with interrupts.admitted():
                server = _InlineWorkerServer(self._job, self._files, self._is_cancelled, self._inbox.append)
            self._server = server
            self._inbox.append(server.info)
        elif self._calls:
            with interrupts.admitted():
                call, name, arguments = pickle.loads(self._calls[0])
                answer = self._server.answer(call, name, arguments)
            self._calls.popleft()
            # Pickled, so that the answer shares no tensors with the worker, for example its weights.
            self._inbox.append(pickle.loads(dumps(answer, f"the answer to {name}")))
        else:
            try:
                with interrupts.admitted():
                    message = self._server.fill(self._slots[0])
            except BaseException:
                self._server.worker.reset_all_next()
                raise
            self._slots.popleft()
            self._inbox.append(pickle.loads(message))

    @contextlib.contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Return a context in which the random generators and the number of torch threads are this worker's."""
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
    """A worker that runs in the collector's own process."""

    freeze_objects = staticmethod(lambda: None)  # this process's garbage collector is not ours to change

    def __init__(
        self, job: Job, files: WorkerFiles, is_cancelled: Callable[[], bool], notify: Callable[[Any], None]
    ) -> None:
        super().__init__(job, files, notify, buffer=())
        halt_when(is_cancelled, self.worker)

    def fill(self, index: int) -> bytes:
        message = super().fill(index)
        self._handed_over()
        return message


class InlineLiveness:
    """Whether a worker in this process is alive."""

    label = " (in this process)"

    def __init__(self, connection: InlineConnection) -> None:
        self._connection = connection

    @property
    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def gone(self) -> bool:
        """Return whether it was closed."""
        return self._connection.over

    def death(self) -> WorkerDied:
        """Return the error for a closed worker."""
        return WorkerDied("was closed")

    def ask_stack(self) -> str:
        """Return the stack of the thread that is in it."""
        thread = self._connection.thread
        return "(not running: it waits for its turn)" if thread is None else stack_of(thread)

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        """Return the error for a worker that took `seconds`; it is not used, as inline workers are not watched."""
        return WorkerSilent(f"took {seconds:.1f} s (timeout={timeout}); its stack:\n{self.ask_stack()}")


@dataclass(frozen=True)
class InlineRaised(Raised):
    """An error of an inline worker, with its own traceback, so that `pdb.pm()` shows the env's frames."""

    itself: ReapError | None = None

    @classmethod
    def of(cls, error: BaseException, doing: str = "") -> InlineRaised:
        """Return the message for an error that was just caught."""
        return cls(b"", b"", "", as_raised(f"{doing} raised", error))

    def unpack(self) -> ReapError:
        """Return the error itself."""
        assert self.itself is not None
        return self.itself
