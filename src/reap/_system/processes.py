"""Child processes that start fast, set themselves up, and never outlive the one that asked for them.

    this process ══ request ══► fork server (torch imported, nothing run) ── fork ──► child
         ▲ ▲                        │                                                   │
         │ └──── status pipe ◄──────┘ pid, then exit code or signal                     │
         └────── line ◄═════════════════════════════════════════════════════════════════┘

Every way this can end, and what follows:
- there is no room for another process, or no memory: the server says so in place of the pid, and lives on;
- the child returns or raises: the server reaps it, its exit code comes through the status pipe;
- the child is killed, runs out of memory, segfaults: the same, the code is a negative signal number, and what
  faulthandler could say lies in the child's `stack`;
- this process closes the child: `close` → SIGTERM, which unwinds the child's stack (a worker's once its env has ended
  the step it is in, or at the second one) → SIGKILL, by one deadline;
- this process ends, however it ends: the request socket closes, or, where a fork of this process keeps it open, the
  kernel tells the server (PR_SET_PDEATHSIG); it terminates its children, then kills them;
- signals to this process's group (`timeout`, a closed terminal) end this process, and so the line above follows;
- what a child has started itself and left behind is killed with it (see fork_server.py);
- the server is killed: the kernel kills its children (PR_SET_PDEATHSIG), their status pipes close without a code, and
  whoever sees that here kills what they had started.

Nothing of the parent is imported again in a child: targets travel by cloudpickle (pickling.py), so scripts need no main
guard, and lambdas, closures and notebooks work. The parent's start method, threads, signals and environment are left
alone; a child has its environment as it is then (process_state.py).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import math
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from reap._system.fork_server import GRACE, NOT_OPENED, REQUEST, WORD, end_programs_of
from reap._system.forks import guard
from reap._system.pickling import OwnedFd, Parcel, dumps, send_fds
from reap._system.process_state import state_for_child
from reap.errors import ReapError, UsageError, WorkerDied, WorkerRaised, WorkerSilent

StartMethod = Literal["forkserver", "spawn"]

DEADLINE = 5.0  # seconds within which whatever is closed has ended
LAST_STEP = 1.0  # seconds of those that a child has for the step of an env it is in
GOODBYE = 0.3  # seconds after which a worker that was told to go home is in a rollout nobody wants any more
LEAVE = 2.0  # seconds a thread that waits has to leave, when what it waits for is closed
BOOT = 60.0  # seconds more than the user's deadline until a child's first word: importing torch is not the user's code
SOON = 0.5  # seconds that one which was silent has, once it is told to end
_PIECE = 1 << 20  # bytes read at once
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")  # of a message, as `Connection` writes it
_PRELOAD = ("torch", "tensordict.nn", "gymnasium", "reap.collectors", "reap.envs")  # else every worker would
_PRELOAD_TOO = ("torchrl.envs",)  # where our program has imported it: workers are sent its envs, and it is slow


def send(connection: Connection, thing: Any) -> None:
    """Send anything, read by `MessageSocket.hear`. Not `connection.send`: that would share tensors, not send them."""
    connection.send_bytes(dumps(thing, "what a child says"))


class MessageSocket:
    """The parent's end of a child's connection. Waits for nobody, but in `finish`: no reader, no half message."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket = own
        self._heard, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def say(self, data: bytes) -> None:
        """Send a message as far as it goes; `flush` sends the rest."""
        long = len(data) > 0x7FFFFFFF
        self._unsent += _LENGTH.pack(-1) + _LONG_LENGTH.pack(len(data)) if long else _LENGTH.pack(len(data))
        self._unsent += data
        self.flush()

    def flush(self) -> bool:
        """Send what is left, as far as it goes; whether all has been sent, or nobody is there to read it."""
        try:
            while self._unsent:
                with memoryview(self._unsent)[:_PIECE] as piece:
                    sent = self._socket.send(piece)
                del self._unsent[:sent]
        except BlockingIOError:
            return False
        except OSError:  # one that is gone says so through its sentinel
            self._unsent.clear()
        return True

    def finish(self) -> None:
        """Send what is left, waiting for the reader: for whoever has nothing else to do meanwhile."""
        while not self.flush():
            until_ready([], [self.fileno()])

    def hear(self) -> list[bytes]:
        """The messages that have come, whole ones only."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while piece := self._socket.recv(_PIECE):
                self._heard += piece
        found = []
        while (ends := self._first()) is not None:
            start, end = ends
            found.append(bytes(memoryview(self._heard)[start:end]))
            del self._heard[:end]
        return found

    def _first(self) -> tuple[int, int] | None:
        """Where the first message begins and ends, if it is there."""
        start = _LENGTH.size
        if len(self._heard) < start:
            return None
        (size,) = _LENGTH.unpack_from(self._heard)
        if size < 0:
            start += _LONG_LENGTH.size
            if len(self._heard) < start:
                return None
            (size,) = _LONG_LENGTH.unpack_from(self._heard, _LENGTH.size)
        return (start, start + size) if len(self._heard) >= start + size else None

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def until_ready(reading: Iterable[int], writing: Iterable[int] = (), within: float | None = None) -> bool:
    """Wait for one of these descriptors, for so many seconds at most; whether there was one.

    Not `select.select`: that refuses numbers from 1024 on, which a program with many envs or files has.
    """
    poll, asked = select.poll(), dict.fromkeys(reading, select.POLLIN)
    for fd in writing:
        asked[fd] = asked.get(fd, 0) | select.POLLOUT
    for fd, events in asked.items():
        poll.register(fd, events)
    return bool(poll.poll(None if within is None else math.ceil(max(0.0, within) * 1000)))


def anonymous_file(name: str) -> int:
    """A descriptor of memory without a name in any file system: nothing to leak."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error on its way from a child: itself and its cause as bytes, as far as they can be, the traceback as text."""

    error: bytes
    cause: bytes
    text: str

    @classmethod
    def of(cls, error: BaseException, doing: str = "") -> Raised:
        """The message for what was just caught; foreign errors are told as raised by `doing`."""
        if not isinstance(error, ReapError):
            foreign, error = error, WorkerRaised(f"{doing} raised {error!r}")
            error.__cause__ = foreign
        text = "".join(traceback.format_exception(error.__cause__ or error))
        return cls(_error_bytes(error), _error_bytes(error.__cause__), text)

    def unpack(self) -> ReapError:
        """The error to raise here: what it was, caused by what caused it, with the remote traceback at the end."""
        try:
            raised, cause = pickle.loads(self.error), pickle.loads(self.cause)
        except Exception:  # of a kind that only the child can import
            raised, cause = WorkerRaised(self.text.strip().rsplit("\n", 1)[-1]), None
        error: ReapError = raised if isinstance(raised, ReapError) else WorkerRaised(repr(raised))
        if cause is not None:
            cause.__cause__ = RemoteTraceback(self.text)
        error.__cause__ = cause if cause is not None else RemoteTraceback(self.text)
        return error


def _error_bytes(error: BaseException | None) -> bytes:
    try:
        data = dumps(error, "an error")
        pickle.loads(data)  # some exceptions can be written but not read
    except Exception:
        if isinstance(error, ReapError):
            plain = WorkerRaised(str(error.args[0] if error.args else error)).at(lane=error.lane, step=error.step)
            return dumps(plain, "an error")
        return dumps(RuntimeError(f"{type(error).__name__}: {error}"), "an error")
    return data


# ---- the parent's side --------------------------------------------------------------------------------------------


_NO_ROOM = {
    errno.EAGAIN: "the limit of processes is reached (ulimit -u, or pids.max of the cgroup)",
    errno.ENOMEM: "there is no memory for another process",
    errno.EMFILE: "the limit of open files is reached (ulimit -n)",
    errno.ENFILE: "the machine's limit of open files is reached",
}


def _no_start(number: int | None) -> str:
    """Why a process could not be started, in words, from an errno."""
    return f"could not be started: {_NO_ROOM.get(number or 0) or os.strerror(number or 0)}"


@contextlib.contextmanager
def enough_room(who: str) -> Iterator[None]:
    """Inside, a limit of the system that is reached is told as what `who` could not be started for."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise WorkerDied(f"{who} {_no_start(error.errno)}") from error


class _ForkServer:
    """The parent's end of the process that forks children."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.name = secrets.token_hex(8)
        path = [p for p in sys.path if isinstance(p, str)]
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        ours, theirs = socket.socketpair()
        arguments = theirs.fileno(), os.getpid(), self.name, tuple(preload)
        code = f"import sys; sys.path[:] = {path!r}; from reap._system.fork_server import serve; serve(*{arguments!r})"
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *flags, "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # what is sent to our process group is not for it
                )
        except BaseException:
            ours.close()
            raise
        self._socket = ours
        self.owner = os.getpid()

    def fork(self, fds: Sequence[int]) -> None:
        """Ask for a child that has these descriptors, and our resource tracker if we have one."""
        tracker: int | None = getattr(resource_tracker._resource_tracker, "_fd", None)
        given = [*fds, *(() if tracker is None else (tracker,))]
        socket.send_fds(self._socket, [REQUEST.pack(len(given), tracker is not None)], given)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        self._socket.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(4 * GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_common: _ForkServer | None = None
_lock = threading.Lock()


def _common_fork_server() -> _ForkServer:
    """One for the whole process, started when first needed; it ends with the process."""
    global _common
    with _lock:
        if _common is None or not _common.alive:
            if _common is None:
                atexit.register(_end_common)
            _common = _ForkServer((*_PRELOAD, *(name for name in _PRELOAD_TOO if name in sys.modules)))
        return _common


def get_ready() -> None:
    """Children will be started: have what they need imported meanwhile."""
    _common_fork_server()


def _end_common() -> None:
    wait_for_ends()
    if _common is not None:
        _common.close()


def kept_fork_server() -> tuple[int, int] | None:
    """Pid of the helper process that is kept for the next children, and our descriptor to it; if there is one."""
    return None if _common is None or not _common.alive else (_common.process.pid, _common.fileno())


_ENDS = {
    "SIGKILL": "was killed by SIGKILL (out of memory, or killed by somebody)",
    "SIGSEGV": "was killed by SIGSEGV (a crash in native code)",
    "SIGTERM": "was ended by SIGTERM (somebody asked it to: a time limit, a job scheduler, or kill)",
    "SIGHUP": "was ended by SIGHUP (somebody asked it to: a terminal that was closed, or kill)",
    "SIGQUIT": "was ended by SIGQUIT (somebody asked it to)",
}


class Child:
    """A process that runs `target(connection, fds)`.

    `line` talks to it, `sentinel` becomes readable when it is gone (and once before: its pid comes that way).
    """

    def __init__(
        self,
        target: Parcel | bytes,
        *,
        fds: Sequence[int] = (),
        start: StartMethod = "forkserver",
        name: str = "child",
    ) -> None:
        if start not in ("forkserver", "spawn"):
            raise UsageError(f"start method must be 'forkserver' or 'spawn', got {start!r}")
        target = Parcel(target) if isinstance(target, bytes) else target
        self.name = name
        self.exitcode: int | None = None
        self._pid: int | None = None
        self._refused: int | None = None  # the errno, if it could not be forked
        self._orphaned = False  # whether it went with its server
        self.silent = False  # whether it was found to be: `end` is quick with it
        self._word_lock = threading.RLock()  # two threads may ask at once; again in one, from a finalizer
        self._elsewhere = False  # this is a copy of it, in a fork
        guard(self)
        self._own: _ForkServer | None = None
        with contextlib.ExitStack() as undo:
            try:
                self._start(start, fds, target.fds, undo)
            except OSError as error:
                raise WorkerDied(f"{name} {_no_start(error.errno)}") from error
            undo.pop_all()
        self.line.say(name.encode())
        self.line.say(state_for_child())
        self.line.say(target.data)

    def in_fork(self, why: str) -> None:
        """Its words are the parent's to hear: nothing is read or signalled from here."""
        self._elsewhere, self._pid = True, self._pid or 0

    def _start(
        self, start: StartMethod, fds: Sequence[int], sent: Sequence[OwnedFd], undo: contextlib.ExitStack
    ) -> None:
        """Open what ties us to it, and ask for it; `undo` closes what was opened, should something fail."""
        ours, theirs = socket.socketpair()
        undo.enter_context(ours)
        with theirs:
            self.sentinel, tell = os.pipe()
            undo.callback(os.close, self.sentinel)
            try:
                self._stack = anonymous_file("reap-stack")
                undo.callback(os.close, self._stack)
                if start == "spawn":
                    self._own = _ForkServer(())
                    undo.callback(self._own.close)
                server = self._own or _common_fork_server()
                self._server = server.name
                with contextlib.suppress(
                    ConnectionError
                ):  # just killed: `tell` closes without a word, the child is gone
                    server.fork([tell, theirs.fileno(), self._stack, *fds])
            finally:
                os.close(tell)
        send_fds(ours, sent)  # first: nothing else is on its way yet
        self.line = MessageSocket(ours)

    @property
    def pid(self) -> int:
        """Its number; 0 if it never lived. Waits until the server has forked it."""
        with self._word_lock:
            if self._pid is None:
                self._hear_pid()
            return self._pid or 0

    @property
    def label(self) -> str:
        """Its number as errors show it, after a name; empty if it never lived."""
        return f" (pid {self.pid})" if self.pid else ""

    def _hear_pid(self) -> None:
        word = self._word() or 0
        self._pid, self._refused = max(word, 0), -word if word < 0 else None

    def _word(self) -> int | None:
        data = os.read(self.sentinel, WORD.size)
        return None if len(data) < WORD.size else int(WORD.unpack(data)[0])

    def gone(self, timeout: float = 0.0) -> bool:
        """Whether it has ended, waiting up to `timeout` seconds for it; to a fork everybody is gone."""
        if self._elsewhere:
            return True
        with self._word_lock:
            if self.sentinel < 0 or self.exitcode is not None:
                return True
            if self._pid is None:
                if not wait([self.sentinel], timeout):
                    return False
                self._hear_pid()
            if not wait([self.sentinel], timeout):
                return False
            code = self._word()
            self.exitcode = -signal.SIGKILL if code is None else code
            if code is None and self._pid:  # the server went, and took it along
                self._orphaned = True
                end_programs_of(self._pid, self._server)
            return True

    def how_it_ended(self) -> str:
        """The exit code or signal in words, with what is likely behind it."""
        code = self.exitcode
        if code is None:
            return "is still running"
        if self._refused is not None:
            return _no_start(self._refused)
        if not self._pid:
            return "could not be started: the fork server has ended"
        if self._orphaned:
            return "was killed by SIGKILL, as the fork server was (out of memory, or killed by somebody)"
        if code >= 0:
            text = self.stack()
            return text.partition("\n")[0] if text.startswith(NOT_OPENED) else f"exited with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return _ENDS.get(name, f"was killed by {name}")

    def stack(self, since: int = 0) -> str:
        """What faulthandler wrote, from that byte on: after a crash, or after `ask_stack`."""
        size = os.fstat(self._stack).st_size - since
        return os.pread(self._stack, size, since).decode(errors="replace").strip() if size else ""

    def death(self) -> WorkerDied:
        """The error for one that is gone: how it ended, and its last stack if there is one."""
        stack = self.stack()
        if stack.startswith(NOT_OPENED):
            error = WorkerDied(self.how_it_ended())
            error.__cause__ = RemoteTraceback(stack.partition("\n")[2])
            return error
        return WorkerDied(self.how_it_ended() + (f"; its last stack:\n{stack}" if stack else ""))

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        """The error for one that sent nothing for so long, with its stack; one that gives none is killed."""
        self.silent, stack = True, self.ask_stack()
        if not stack:
            stack = "(it does not answer signals)"
            self.signal(signal.SIGKILL)  # nor will it a goodbye
        return WorkerSilent(f"sent nothing for {seconds:.1f} s (timeout={timeout}); its stack:\n{stack}")

    def ask_stack(self, patience: float = 1.0) -> str:
        """Where every thread of the child is right now; empty if it does not even answer signals."""
        told = os.fstat(self._stack).st_size  # when it was asked before
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + patience
        text = ""
        while time.monotonic() < deadline:  # a signal handler in another process: there is nothing to wait on
            before, text = text, self.stack(told)
            if text and text == before:
                break
            time.sleep(0.02)
        return text

    def signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        if not self.gone() and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def release(self) -> None:
        """Give back descriptors; the child must be gone."""
        self.line.close()
        for fd in (self.sentinel, self._stack):
            if fd >= 0:
                os.close(fd)
        self.sentinel = self._stack = -1
        if self._own is not None:
            self._own.close()


LINGER = 0.3  # seconds for which an error waits until those that are to be ended have: most do at once
_LONGEST = 15.0  # seconds for which ends in the background are waited for
_endings: set[threading.Thread] = set()


def see_to(ending: Callable[[], None], linger: float | None = None) -> None:
    """End something: call `ending`, which takes a few seconds at most.

    With `linger`, what takes longer than so many seconds goes on in a thread (see `wait_for_ends`): something is to be
    told, and a child that is deaf, or closes its env slowly, shall not hold that up.
    """
    if linger is not None:
        thread = threading.Thread(target=ending, name="reap-ending", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread: we do it ourselves
            thread.start()
            atexit.unregister(wait_for_ends)  # once is enough
            atexit.register(wait_for_ends)  # as late as can be: it comes before others close what is needed for it
            _endings.add(thread)
            thread.join(linger)
            if not thread.is_alive():
                _endings.discard(thread)
            return
    ending()


def wait_for_ends() -> None:
    """Wait for what is being ended while its error was told; a few seconds at most."""
    until = time.monotonic() + _LONGEST
    for thread in list(_endings):
        if thread is not threading.current_thread():  # in a finalizer it may be
            thread.join(max(0.0, until - time.monotonic()))
            if not thread.is_alive():
                _endings.discard(thread)


def end(children: Iterable[Child], *, patience: float, deadline: float) -> None:
    """End all of them: they have been told already; SIGTERM after `patience` seconds, SIGKILL before `deadline`.

    To those that were found silent sooner. One that is stopped is woken: now it hears that.
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
    """Those that have not ended at this time, waited for."""
    while (left := [c for c in children if not c.gone()]) and (seconds := until - time.monotonic()) > 0:
        wait([c.sentinel for c in left], seconds)
    return left
