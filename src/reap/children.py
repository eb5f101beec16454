"""Children: processes that start fast, set themselves up, and never outlive the one that asked for them.

    this process ══ request ══► seedbed (torch imported, nothing run) ── fork ──► child
         ▲ ▲                        │                                               │
         │ └──── status pipe ◄──────┘ pid, then exit code or signal                 │
         └────── line ◄═════════════════════════════════════════════════════════════┘

Every way this can end, and what follows:
- the child returns or raises: the seedbed reaps it, its exit code comes through the status pipe;
- the child is killed, runs out of memory, segfaults: the same, the code is a negative signal number, and what
  faulthandler could say lies in the child's `stack`;
- this process closes the child: `close` → SIGTERM, which unwinds the child's stack → SIGKILL, by one deadline;
- this process ends, however it ends: the request socket closes, or, where a fork of this process keeps it open, the
  kernel tells the seedbed (PR_SET_PDEATHSIG); it terminates its children, then kills them;
- what a child has started itself and left behind is killed with it: a child is a process group;
- the seedbed is killed: the kernel kills its children (PR_SET_PDEATHSIG), their status pipes close without a code.

Nothing of the parent is imported again in a child: targets travel by cloudpickle, so scripts need no main guard, and
lambdas, closures and notebooks work. The parent's start method, threads, signals and environment are left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import math
import os
import pickle
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NoReturn

import cloudpickle

from reap.errors import ReapError, UsageError, WorkerDied, WorkerRaised, WorkerSilent

StartMethod = Literal["forkserver", "spawn"]

_WORD = struct.Struct("q")
_FORK = b"fork"
BOOT = 60.0  # seconds more than the user's deadline until a child's first word: importing torch is not the user's code
_GRACE = 1.0  # seconds a child has to clean up once its parent is gone
_SOON = 0.5  # and one that was silent, once it is told to end
MOST_FDS = 200  # a child may be given; what it is started with comes to these
_PIECE = 1 << 20  # bytes read at once
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")  # of a message, as `Connection` writes it
_PRELOAD = ("torch", "tensordict.nn", "gymnasium", "reap.collectors", "reap.envs")  # else every worker would


def dumps(thing: Any, what: str) -> bytes:
    """`thing` as bytes for another process; an error that names it if that cannot be."""
    try:
        return bytes(cloudpickle.dumps(thing))
    except Exception as cause:
        raise UsageError(f"{what} cannot be sent to another process: {cause}") from cause


def send(connection: Connection, thing: Any) -> None:
    """Send anything, read by `Line.hear`. Not `connection.send`: that would share tensors, not send them."""
    connection.send_bytes(cloudpickle.dumps(thing))


class Line:
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
    def of(cls, error: Exception, doing: str = "") -> Raised:
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
        data = cloudpickle.dumps(error)
        cloudpickle.loads(data)  # some exceptions can be written but not read
    except Exception:
        if isinstance(error, ReapError):
            plain = WorkerRaised(str(error.args[0] if error.args else error)).at(lane=error.lane, step=error.step)
            return bytes(cloudpickle.dumps(plain))
        return bytes(cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))
    return bytes(data)


# ---- the parent's side --------------------------------------------------------------------------------------------


class _Seedbed:
    """The parent's end of the process that forks children."""

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        path = [p for p in sys.path if isinstance(p, str)]
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            f"from reap.children import _seedbed; _seedbed({theirs.fileno()}, {os.getpid()}, {tuple(preload)!r})"
        )
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._socket = ours
        self.owner = os.getpid()

    def fork(self, fds: Sequence[int]) -> None:
        socket.send_fds(self._socket, [_FORK], list(fds))

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        self._socket.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(2 * _GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_common: _Seedbed | None = None
_lock = threading.Lock()


def _common_seedbed() -> _Seedbed:
    """One for the whole process, started when first needed; it ends with the process."""
    global _common
    with _lock:
        if _common is None or not _common.alive:
            if _common is None:
                atexit.register(_end)
            _common = _Seedbed(_PRELOAD)
        return _common


def get_ready() -> None:
    """Children will be started: have what they need imported meanwhile."""
    _common_seedbed()


def _end() -> None:
    if _common is not None:
        _common.close()


def kept_seedbed() -> tuple[int, int] | None:
    """Pid of the helper process that is kept for the next children, and our descriptor to it; if there is one."""
    return None if _common is None or not _common.alive else (_common.process.pid, _common.fileno())


class Child:
    """A process that runs `target(connection, fds)`.

    `line` talks to it, `sentinel` becomes readable when it is gone (and once before: its pid comes that way).
    """

    def __init__(
        self,
        target: bytes,
        *,
        fds: Sequence[int] = (),
        start: StartMethod = "forkserver",
        name: str = "child",
    ) -> None:
        if start not in ("forkserver", "spawn"):
            raise UsageError(f"start method must be 'forkserver' or 'spawn', got {start!r}")
        self.name = name
        self.exitcode: int | None = None
        self._pid: int | None = None
        self.silent = False  # whether it was found to be: `end` is quick with it
        self._word_lock = threading.RLock()  # two threads may ask at once; again in one, from a finalizer
        self._own = _Seedbed(()) if start == "spawn" else None
        seedbed = self._own or _common_seedbed()
        ours, theirs = socket.socketpair()
        self.line = Line(ours)
        self.sentinel, tell = os.pipe()
        self._stack = anonymous_file("reap-stack")
        try:
            seedbed.fork([theirs.fileno(), tell, self._stack, *fds])
        except OSError:  # it has just been killed: `tell` closes without a word, and so this child is gone
            pass
        finally:
            theirs.close()
            os.close(tell)
        self.line.say(pickle.dumps((sys.path, os.getcwd(), name)))
        self.line.say(target)

    @property
    def pid(self) -> int:
        """Its number; 0 if it never lived. Waits until the seedbed has forked it."""
        with self._word_lock:
            if self._pid is None:
                self._pid = self._word() or 0
            return self._pid

    def _word(self) -> int | None:
        data = os.read(self.sentinel, _WORD.size)
        return None if len(data) < _WORD.size else int(_WORD.unpack(data)[0])

    def gone(self, timeout: float = 0.0) -> bool:
        """Whether it has ended, waiting up to `timeout` seconds for it."""
        with self._word_lock:
            if self.sentinel < 0 or self.exitcode is not None:
                return True
            if self._pid is None:
                if not wait([self.sentinel], timeout):
                    return False
                self._pid = self._word() or 0
            if not wait([self.sentinel], timeout):
                return False
            code = self._word()
            self.exitcode = -signal.SIGKILL if code is None else code  # no code: the seedbed went, and took it along
            return True

    def how_it_ended(self) -> str:
        """The exit code or signal in words, with what is likely behind it."""
        code = self.exitcode
        if code is None:
            return "is still running"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = {"SIGKILL": " (out of memory, or killed by somebody)", "SIGSEGV": " (a crash in native code)"}
        return f"was killed by {name}{hint.get(name, '')}"

    def stack(self, since: int = 0) -> str:
        """What faulthandler wrote, from that byte on: after a crash, or after `ask_stack`."""
        size = os.fstat(self._stack).st_size - since
        return os.pread(self._stack, size, since).decode(errors="replace").strip() if size else ""

    def death(self) -> WorkerDied:
        """The error for one that is gone: how it ended, and its last stack if there is one."""
        stack = self.stack()
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


def end(children: Iterable[Child], *, patience: float, deadline: float) -> None:
    """End them, who were told: SIGTERM after `patience` seconds, SIGKILL before `deadline`; the silent sooner."""
    children = list(children)
    silent = [child for child in children if child.silent]
    steps = [(patience, signal.SIGTERM, children), (0.8 * deadline, signal.SIGKILL, children), (deadline, 0, [])]
    steps += [(0.0, signal.SIGTERM, silent), (_SOON, signal.SIGKILL, silent)]
    began = time.monotonic()
    for until, number, whom in sorted(steps, key=lambda step: step[0]):
        while (left := [c for c in children if not c.gone()]) and time.monotonic() - began < until:
            wait([c.sentinel for c in left], max(0.0, until - (time.monotonic() - began)))
        for child in left:
            if child in whom:
                child.signal(number)
    for child in children:
        child.release()


# ---- the other side -----------------------------------------------------------------------------------------------


class Goodbye(BaseException):
    """Raised in a child by SIGTERM, so that it unwinds and cleans up."""


def _seedbed(request_fd: int, parent: int, preload: Sequence[str]) -> NoReturn:
    """The life of a seedbed: fork when asked, report ends, end when the asking side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    requests = socket.socket(fileno=request_fd)
    for name in preload:
        with contextlib.suppress(ImportError):
            __import__(name)
    if preload:
        _warm_up()
    settle()  # or a collection in a child writes to, and so copies, all pages it shares with us
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    # A parent that forked: somebody else holds our socket open after its death. So the kernel wakes us; where it
    # cannot, we look. (It also does when only the thread that started us has ended: hence we ask who our parent is.)
    pause = None if _prctl(_PDEATHSIG, signal.SIGCHLD) else 0.5
    status: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while os.getppid() == parent:
            ready = {key.fileobj for key, _ in selector.select(pause)}
            if wake in ready:
                wake.recv(4096)
                _reap(status)
            if requests in ready:
                data, fds, _, _ = socket.recv_fds(requests, len(_FORK), MOST_FDS + 3)
                if not data:
                    break
                for fd in fds:
                    os.set_inheritable(fd, False)  # programs that an env starts have no business with them
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for inherited in (requests, wake, waker):
                        inherited.close()
                    for fd in (*status.values(), fds[1]):
                        os.close(fd)
                    _child(fds[0], fds[2], fds[3:])
                with contextlib.suppress(OSError):  # the parent may be gone meanwhile
                    os.write(fds[1], _WORD.pack(pid))
                status[pid] = fds[1]
                for fd in (fds[0], *fds[2:]):
                    os.close(fd)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE
        while status and time.monotonic() < deadline:
            _reap(status)
            time.sleep(0.01)
    os._exit(0)


def settle() -> None:
    """What is there now will stay: the garbage collector of this process need not look through it again and again."""
    gc.collect()
    gc.freeze()


def _warm_up() -> None:
    """What every child would do first: torch sets itself up here, once, on one thread, so that forking stays safe."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad():
        torch.tanh(layer(torch.zeros(2, 4))).sum().item()
    torch.set_num_threads(threads)


def _reap(status: dict[int, int]) -> None:
    while status:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        with contextlib.suppress(OSError):  # before it is reaped: until then nobody else can have its number
            os.killpg(ended.si_pid, signal.SIGKILL)
        fd = status.pop(ended.si_pid, None)
        if fd is not None:  # before it is reaped: whoever sees that it is gone finds its code
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):
                os.write(fd, _WORD.pack(code))
            os.close(fd)
        os.waitpid(ended.si_pid, 0)


def _child(connection_fd: int, stack_fd: int, fds: Sequence[int]) -> NoReturn:
    """The life of a child, from fork to exit."""
    code = 1
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL)  # die with the seedbed
        wake_in_time()
        os.setpgid(0, 0)  # whatever is started from here on can be ended with us
        faulthandler.enable(stack_fd, all_threads=True)
        faulthandler.register(signal.SIGUSR1, stack_fd, all_threads=True)
        signal.signal(signal.SIGTERM, functools.partial(_goodbye, os.getpid()))
        sys.unraisablehook = _swallowed
        connection = Connection(connection_fd)
        path, directory, name = pickle.loads(connection.recv_bytes())
        sys.path[:] = path
        with contextlib.suppress(OSError):
            os.chdir(directory)
        _rename(name)
        target: Callable[[Connection, Sequence[int]], None] = cloudpickle.loads(connection.recv_bytes())
        target(connection, fds)
        code = 0
    except (Goodbye, EOFError, ConnectionError):  # told to go, or nobody is there any more
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _goodbye(whose: int, *_: object) -> None:
    if os.getpid() != whose:  # a process that an env forked has nobody to say goodbye to
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: cleaning up is not to be interrupted
    raise Goodbye


def _swallowed(what: Any) -> None:
    """An exception in a finalizer, which Python drops. A goodbye is said again a moment later."""
    if what.exc_type is Goodbye:
        signal.signal(signal.SIGALRM, _goodbye)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(what)


def _rename(name: str) -> None:
    """What `ps` shows (Linux)."""
    _prctl(15, name.encode()[:15])  # PR_SET_NAME


_PDEATHSIG = 1


def wake_in_time() -> None:
    """Let this thread, and those it starts, wake from a sleep when it is over, not up to 50 µs later (Linux)."""
    _prctl(29, 1)  # PR_SET_TIMERSLACK, nanoseconds


def _prctl(what: int, value: int | bytes) -> bool:
    """Whether the kernel did it; only Linux knows it."""
    if sys.platform != "linux":
        return False
    done: int = ctypes.CDLL(None).prctl(what, value if isinstance(value, bytes) else int(value), 0, 0, 0)
    return done == 0
