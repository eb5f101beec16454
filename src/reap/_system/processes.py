"""Child processes that start fast, set themselves up, and never outlive the process that started them.

    this process ══ request ══► fork server (torch imported, nothing run) ── fork ──► child
         ▲ ▲                        │                                                   │
         │ └──── status pipe ◄──────┘ pid, then exit code or signal                     │
         └───── socket ◄════════════════════════════════════════════════════════════════┘

Every way this can end, and what follows:
- the system has no room or no memory for another process: the server reports that in place of the pid, and goes on;
- the child returns or raises: the server reaps it, and its exit code comes through the status pipe;
- the child is killed, runs out of memory, segfaults: the same, with a negative signal number as the code, and the
  child's `stack` holds what faulthandler could write;
- this process closes the child: `end` → SIGTERM, which unwinds the child's stack (a worker's once its env has ended
  the step it is in, or at the second SIGTERM) → SIGKILL, by one deadline;
- this process ends in any way: the request socket closes, or, where a fork of this process keeps it open, the kernel
  notifies the server (PR_SET_PDEATHSIG); the server terminates its children, then kills them;
- signals to this process's group (`timeout`, a closed terminal) end this process, and so the previous line follows;
- a program that a child has started and left behind is killed with it (see fork_server/orphans.py);
- the server is killed: the kernel kills its children (PR_SET_PDEATHSIG), their status pipes close without a code, and
  this process kills the programs they had started once it notices.

A child imports none of the parent's modules again: targets travel by cloudpickle (pickling.py), so scripts need no main
guard, and lambdas, closures and notebooks work. The parent's start method, threads, signals and environment are left
alone; a child gets the environment of the moment it is started (process_state.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import Literal

from reap._system.fork_server.child import NOT_UNPACKED
from reap._system.fork_server.client import ForkServer, common_fork_server, why_not_started
from reap._system.fork_server.orphans import end_programs_of
from reap._system.fork_server.server import STATUS
from reap._system.forks import guard
from reap._system.messages.framed import MessageSocket
from reap._system.messages.pickling import Packed
from reap._system.messages.remote_errors import RemoteTraceback
from reap._system.process_state import state_for_child
from reap._system.shared_objects.descriptors import OwnedFd, send_fds
from reap._system.silence import silent_error
from reap._system.stacks import STACK_FILE, polled_text, process_stacks, processes_below
from reap._system.temporary import anonymous_file
from reap.errors import UsageError, WorkerDied, WorkerSilent

StartMethod = Literal["forkserver", "spawn"]

DEADLINE = 5.0  # seconds within which everything that is closed has ended
LAST_STEP = 1.0  # seconds of those that a child has to finish the step its env is in
GOODBYE = 0.3  # seconds a remote worker that was told to stop has before SIGTERM
LEAVE = 2.0  # seconds a waiting thread has to return, when what it waits for is closed
BOOT = 60.0  # seconds beyond the user's deadline for a child's first message: importing torch is not the user's code
SOON = 0.5  # seconds a child that was found silent has, once it is told to end
_ENDS = {
    "SIGKILL": "was killed by SIGKILL (out of memory, or killed by another process)",
    "SIGSEGV": "was killed by SIGSEGV (a crash in native code)",
    "SIGTERM": "was ended by SIGTERM (a time limit, a job scheduler, or kill)",
    "SIGHUP": "was ended by SIGHUP (a closed terminal, or kill)",
    "SIGQUIT": "was ended by SIGQUIT (sent by a terminal or another process)",
}


class Child:
    """A process that runs `target(connection, fds)`.

    `socket` exchanges messages with it. `sentinel` becomes readable when it is gone, and once before, because it
    carries the pid.
    """

    def __init__(
        self,
        target: Packed | bytes,
        *,
        fds: Sequence[int] = (),
        start: StartMethod = "forkserver",
        name: str = "child",
    ) -> None:
        if start not in ("forkserver", "spawn"):
            raise UsageError(f"start method must be 'forkserver' or 'spawn', got {start!r}")
        target = Packed(target) if isinstance(target, bytes) else target
        self.name = name
        self.exitcode: int | None = None
        self._pid: int | None = None
        self._fork_errno: int | None = None  # the errno, if it could not be forked
        self._died_with_server = False  # whether it was killed together with its server
        self.silent = False  # whether it was found silent: `end` gives it less time
        self._status_lock = threading.RLock()  # two threads may ask at once; a finalizer may ask again in one of them
        self._in_fork = False  # whether this object is a copy in a fork
        guard(self)
        self._own_server: ForkServer | None = None
        with contextlib.ExitStack() as undo:
            try:
                self._start(start, fds, target.fds, undo)
            except OSError as error:
                raise WorkerDied(f"{name} {why_not_started(error.errno)}") from error
            undo.pop_all()
        self.socket.send(name.encode())
        self.socket.send(state_for_child())
        self.socket.send(target.data)

    def in_fork(self, why: str) -> None:
        """Read and signal nothing from here on: the child's messages are for the parent of this fork."""
        self._in_fork, self._pid = True, self._pid or 0

    def _start(
        self, start: StartMethod, fds: Sequence[int], sent: Sequence[OwnedFd], undo: contextlib.ExitStack
    ) -> None:
        """Open the pipes and sockets to the child, and request it; `undo` closes them, should something fail."""
        ours, theirs = socket.socketpair()
        undo.enter_context(ours)
        with theirs:
            self.sentinel, tell = os.pipe()
            undo.callback(os.close, self.sentinel)
            try:
                self._stack = anonymous_file(STACK_FILE)
                undo.callback(os.close, self._stack)
                if start == "spawn":
                    self._own_server = ForkServer(())
                    undo.callback(self._own_server.close)
                server = self._own_server or common_fork_server()
                self._server = server.name
                # the server may have just been killed: then `tell` closes without a pid, and the child counts as gone
                with contextlib.suppress(ConnectionError):
                    server.fork([tell, theirs.fileno(), self._stack, *fds])
            finally:
                os.close(tell)
        send_fds(ours, sent)  # first: nothing else may be on its way yet
        self.socket = MessageSocket(ours)

    @property
    def pid(self) -> int:
        """The pid, 0 if it never ran; waits until the server has forked it."""
        with self._status_lock:
            if self._pid is None:
                self._read_pid()
            return self._pid or 0

    @property
    def label(self) -> str:
        """The pid as errors show it after a name; empty if the child never ran."""
        return f" (pid {self.pid})" if self.pid else ""

    def _read_pid(self) -> None:
        word = self._read_status() or 0
        self._pid, self._fork_errno = max(word, 0), -word if word < 0 else None

    def _read_status(self) -> int | None:
        data = os.read(self.sentinel, STATUS.size)
        return None if len(data) < STATUS.size else int(STATUS.unpack(data)[0])

    def gone(self, timeout: float = 0.0) -> bool:
        """Return whether it has ended, waiting up to `timeout` seconds for that; in a fork every child is gone."""
        if self._in_fork:
            return True
        with self._status_lock:
            if self.sentinel < 0 or self.exitcode is not None:
                return True
            if self._pid is None:
                if not wait([self.sentinel], timeout):
                    return False
                self._read_pid()
            if not wait([self.sentinel], timeout):
                return False
            code = self._read_status()
            self.exitcode = -signal.SIGKILL if code is None else code
            if code is None and self._pid:  # the server is gone, and the kernel has killed the child with it
                self._died_with_server = True
                end_programs_of(self._pid, self._server)
            return True

    def how_it_ended(self) -> str:
        """Return the exit code or signal in words, with its likely cause."""
        code = self.exitcode
        if code is None:
            return "is still running"
        if self._fork_errno is not None:
            return why_not_started(self._fork_errno)
        if not self._pid:
            return "could not be started: the fork server has ended"
        if self._died_with_server:
            return "was killed by SIGKILL, like the fork server (out of memory, or killed by another process)"
        if code >= 0:
            text = self.stack()
            return text.partition("\n")[0] if text.startswith(NOT_UNPACKED) else f"exited with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return _ENDS.get(name, f"was killed by {name}")

    def stack(self, since: int = 0) -> str:
        """Return what faulthandler has written from byte `since` on: after a crash, or after `ask_stack`."""
        size = os.fstat(self._stack).st_size - since
        return os.pread(self._stack, size, since).decode(errors="replace").strip() if size else ""

    def death(self) -> WorkerDied:
        """Return the error for a child that is gone: how it ended, and its last stack if there is one."""
        stack = self.stack()
        if stack.startswith(NOT_UNPACKED):
            error = WorkerDied(self.how_it_ended())
            error.__cause__ = RemoteTraceback(stack.partition("\n")[2])
            return error
        return WorkerDied(self.how_it_ended() + (f"; its last stack:\n{stack}" if stack else ""))

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        """Return the error for a child that sent nothing for `seconds`, with its stack; kill it if it gives none."""
        return silent_error(self, seconds, timeout)

    def ask_stack(self, patience: float = 1.0) -> str:
        """Return the stack of every thread of the child; empty if it does not even react to signals."""
        told = os.fstat(self._stack).st_size  # skip stacks written before
        self.signal(signal.SIGUSR1)
        return polled_text(lambda: self.stack(told).encode(), patience)

    def ask_stacks(self) -> dict[str, str]:
        """Return the stacks of the processes it has started for its lanes, by name."""
        below = processes_below(self.pid) if self.pid else {}
        return {f"{name} (pid {pid})": process_stacks(pid) for pid, name in below.items()}

    def signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if not self.gone() and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def release(self) -> None:
        """Close the descriptors; the child must be gone."""
        self.socket.close()
        with self._status_lock:  # another thread may be calling `gone`
            fds, self.sentinel, self._stack = (self.sentinel, self._stack), -1, -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)
        if self._own_server is not None:
            self._own_server.close()


def end(children: Iterable[Child], *, patience: float, deadline: float) -> None:
    """End all children, which were told to already: SIGTERM after `patience` seconds, SIGKILL before `deadline`.

    Those that were found silent get both sooner. Stopped ones are continued, so that they receive the signal.
    """
    began, left = time.monotonic(), list(children)
    silent = [child for child in left if child.silent]
    steps = [(patience, signal.SIGTERM, left), (0.8 * deadline, signal.SIGKILL, left), (deadline, 0, [])]
    steps += [(0.0, signal.SIGTERM, silent), (SOON, signal.SIGKILL, silent)]
    for until, number, whom in sorted(steps, key=lambda step: step[0]):
        for child in _still_there(left, began + until):
            if child in whom:
                child.signal(number)
                child.signal(signal.SIGCONT)
    for child in left:
        child.release()


def _still_there(children: Sequence[Child], until: float) -> list[Child]:
    """Wait until all of them have ended, or until this time; return those that have not."""
    while (left := [c for c in children if not c.gone()]) and (seconds := until - time.monotonic()) > 0:
        wait([c.sentinel for c in left], seconds)
    return left
