"""The fork server: a process with torch imported and nothing run, which forks children and sees to their ends.

    parent ══ request: descriptors ══► fork server ── fork ──► child ── starts ──► programs of the user's env
       ▲                                  │  ▲ └── resource tracker (Python's own: unlinks shared memory left behind)
       └── status pipe: pid, then code ◄──┘  └──── whatever outlives its child is handed to the server, which ends it

- The server is a session of its own: what is sent to the parent's process group (Ctrl-C, `timeout`, a closed terminal)
  does not reach it. It outlives the parent by the moment in which its children close their envs.
- A fork that fails is told through the status pipe, and is nobody else's affair.
- A child is a process group, and marks the environment of what it starts (`REAP_CHILD`). The server is the one to
  whom the kernel hands orphans (PR_SET_CHILD_SUBREAPER). So programs end with their child also if they are daemons.
- All children share one resource tracker, the parent's if it has one, as with `multiprocessing`: with one each, the
  first child to end would unlink what the others still use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

from reap._system.pickling import Parcel, received_fds
from reap._system.process_state import adopt, finish_sharing

WORD = struct.Struct("q")  # through a status pipe: a pid, or minus the errno of a fork that failed; then an exit code
REQUEST = struct.Struct("ii")  # how many descriptors come with it, and whether the last is a resource tracker's
OWN_FDS = 3  # of those, the ones every child has: status pipe, connection, file for stacks
MOST_FDS = 200  # a child may be given on top of them
NOT_OPENED = "could not load what it was given: "  # in the file for stacks, and then why
GRACE = 1.0  # seconds a child has to clean up once its parent is gone
MARK = "REAP_CHILD"  # in the environment of whatever a child starts: the child's number and its server's name
_NAME = "reap-forkserver"
_PDEATHSIG, _SET_NAME, _TIMERSLACK, _SUBREAPER = 1, 15, 29, 36  # of prctl
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # a child closes its env, and goes
_STRAY = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, *_ENDING)  # meant for others, if the server gets one


class Goodbye(BaseException):
    """Raised in a child by a signal that asks it to end, so that it unwinds and cleans up."""


TOLD_TO_GO = (Goodbye, SystemExit)  # whatever else ends a child is an error of what it runs, KeyboardInterrupt included


def _ignore(*_: object) -> None:
    """Do nothing about a signal. Not SIG_IGN: programs that an env starts would inherit that."""


# ---- the server ---------------------------------------------------------------------------------------------------


def serve(request_fd: int, parent: int, name: str, preload: Sequence[str]) -> NoReturn:
    """The life of the server: fork when asked, report ends, end when the asking side is gone."""
    for number in _STRAY:
        signal.signal(number, _ignore)
    _prctl(_SET_NAME, _NAME.encode())
    _prctl(_SUBREAPER, 1)
    requests = socket.socket(fileno=request_fd)
    with contextlib.suppress(OSError):  # it is started when it is needed, otherwise
        resource_tracker.ensure_running()
    for module in preload:
        with contextlib.suppress(ImportError):
            __import__(module)
    if preload:
        _warm_up()
    settle()  # or a collection in a child writes to, and so copies, all pages it shares with us
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, _ignore)
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
                data, fds, _, _ = socket.recv_fds(requests, REQUEST.size, OWN_FDS + MOST_FDS + 1)
                if not data:
                    break
                _fork(data, fds, status, name, inherited=(selector, requests, wake, waker))
    _end(status, wake)
    os._exit(0)


def _fork(data: bytes, fds: Sequence[int], status: dict[int, int], name: str, inherited: Iterable[Any]) -> None:
    """Fork one child; say its number, or why there is none."""
    wanted, tracked = REQUEST.unpack(data)
    if len(fds) < wanted:  # the kernel leaves out those for which there is no room here
        pid = -errno.EMFILE
    else:
        for fd in fds:
            os.set_inheritable(fd, False)  # programs that an env starts have no business with them
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGUSR2, *_ENDING):
            signal.signal(number, signal.SIG_DFL)
        for thing in inherited:
            thing.close()
        for fd in (*status.values(), fds[0]):
            os.close(fd)
        _child(fds[1], fds[2], fds[OWN_FDS : wanted - tracked], fds[-1] if tracked else None, name)
    told = False
    if fds:
        with contextlib.suppress(OSError):  # the parent may be gone meanwhile
            os.write(fds[0], WORD.pack(pid))
        told = pid > 0
        if told:
            status[pid] = fds[0]
    for fd in fds[1:] if told else fds:
        os.close(fd)


def _reap(status: dict[int, int]) -> None:
    """Tell of each child that has ended, and end what it left behind."""
    strangers = False
    while (ended := _next_ended()) is not None:
        pid = ended.si_pid
        fd = status.pop(pid, None)
        strangers |= fd is None
        if fd is not None:  # before it is reaped: until then nobody else can have its number
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            end_orphans(status)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):  # before it is reaped, too: who sees that it is gone finds its code
                os.write(fd, WORD.pack(code))
            os.close(fd)
        os.waitpid(pid, 0)
    if strangers:  # one of those may have been a child of another server, and had programs of its own
        end_orphans(status)


def _next_ended() -> Any:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None


def _end(status: dict[int, int], wake: socket.socket) -> None:
    """Nobody is there any more who could ask: end all children, what they left behind, and the resource tracker."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        _reap_until(lambda: not status, status, wake)
    _reap_until(lambda: not end_orphans((), all_of_them=True), status, wake)
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:  # closed, it unlinks what is left; that is part of our end
        os.close(tracker._fd)
        _reap_until(lambda: tracker._pid not in _children_of(os.getpid()), status, wake)


def _reap_until(true: Callable[[], bool], status: dict[int, int], wake: socket.socket) -> None:
    """Reap until something is true, for a moment at most."""
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        deadline = time.monotonic() + GRACE
        _reap(status)
        while not true() and (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                wake.recv(4096)
            _reap(status)


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


# ---- what children leave behind -----------------------------------------------------------------------------------


def end_orphans(living: Collection[int], *, all_of_them: bool = False) -> list[int]:
    """Kill what was handed to this process and belongs to no living child; returns whom.

    Resource trackers and fork servers of such a child are left: they end by themselves, when they have cleaned up.
    """
    found = [pid for pid in _children_of(os.getpid()) if pid not in living and not is_resource_tracker(pid)]
    victims = [pid for pid in found if all_of_them or (not _is_fork_server(pid) and _is_orphan(pid, living))]
    for pid in victims:
        _kill_tree(pid)
    return victims


def end_programs_of(pid: int, server: str) -> None:
    """Kill a child whose server was killed, and all it has started: nobody else will."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    for path in Path("/proc").glob("[0-9]*"):
        one = int(path.name)
        if _mark_on(one) == mark_of(pid, server) and not is_resource_tracker(one) and not _is_fork_server(one):
            _kill_tree(one)


def mark_of(pid: int, server: str) -> str:
    """What programs have in their environment that a child of a server has started."""
    return f"{pid}@{server}"  # the server's name is unique: numbers alone are not, between containers


def _is_orphan(pid: int, living: Collection[int]) -> bool:
    """Whether the child that started it is gone. Of one that does not say whose it is: whether all are."""
    owner = _mark_on(pid).partition("@")[0]
    return int(owner) not in living and not _is_running(int(owner)) if owner.isdigit() else not living


def _mark_on(pid: int) -> str:
    """Whose a program is, as its environment says; empty if it does not."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
            if line.startswith(f"{MARK}="):
                return line[len(MARK) + 1 :]
    return ""


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def is_resource_tracker(pid: int) -> bool:
    """Whether a process is one of Python's that unlink what is left of a program's shared memory."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _is_fork_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == _NAME
    return False


def _kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it; resource trackers end by themselves."""
    below = _children_of(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    for one in below:
        if not is_resource_tracker(one):
            _kill_tree(one)


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


# ---- a child ------------------------------------------------------------------------------------------------------


def _child(connection_fd: int, stack_fd: int, fds: Sequence[int], tracker: int | None, server: str) -> NoReturn:
    """The life of a child, from fork to exit."""
    code = 1
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL)  # die with the server
        wake_in_time()
        os.setpgid(0, 0)  # whatever is started from here on can be ended with us
        faulthandler.enable(stack_fd, all_threads=True)
        faulthandler.register(signal.SIGUSR1, stack_fd, all_threads=True)
        signal.signal(signal.SIGINT, _ignore)  # Ctrl-C is the parent's business
        for number in _ENDING:
            signal.signal(number, functools.partial(_goodbye, os.getpid()))
        sys.unraisablehook = _swallowed
        if tracker is not None:
            _take_tracker(tracker)
        parcel = Parcel(b"", received_fds(connection_fd))
        connection = Connection(connection_fd)
        _prctl(_SET_NAME, connection.recv_bytes()[:15])  # what `ps` shows
        adopt(connection.recv_bytes())
        parcel.data = connection.recv_bytes()
        os.environ[MARK] = mark_of(os.getpid(), server)
        target = _opened(parcel)
        del parcel
        target(connection, fds)
        code = 0
    except _NotOpened as told:
        _write(stack_fd, f"{NOT_OPENED}{told}")
    except (EOFError, ConnectionError):  # nobody is there any more
        code = 0
    except Goodbye as told:
        code = -told.args[0]
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
        _write(stack_fd, traceback.format_exc())
    finally:
        no_more_goodbyes()
        with contextlib.suppress(Exception):
            finish_sharing(GRACE)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if code < 0:  # by the signal that ended us: whoever asks how we ended is told
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # in order, after all
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
            os.kill(os.getpid(), -code)
        os._exit(code)


class _NotOpened(Exception):
    """What a child was given could not be made from the bytes it came as: why, and the traceback."""


def _opened(parcel: Parcel) -> Callable[[Connection, Sequence[int]], None]:
    """What a child is to run. Whatever opening it raises is told: imports and `__setstate__` are code of the user's."""
    try:
        target: Callable[[Connection, Sequence[int]], None] = parcel.open()
    except Goodbye:
        raise
    except BaseException as error:
        raise _NotOpened(f"{error!r}\n{traceback.format_exc()}") from None
    return target


def _write(fd: int, text: str) -> None:
    """Where stacks are, for the parent to read when we are gone."""
    with contextlib.suppress(OSError):
        os.write(fd, text.encode(errors="replace"))


def _take_tracker(fd: int) -> None:
    """What is registered from here on is registered with the parent's resource tracker."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd, tracker._pid = fd, None


# Code that calls the user's: a child that is asked to leave does so when it is back there. And whether it is asked,
# in place of being told: by the parent, which tells it a moment later.
_borders: set[CodeType] = set()
_asked: Callable[[], bool] | None = None


def leave_at(*borders: Callable[..., Any], asked: Callable[[], bool]) -> None:
    """Where this child leaves when a signal comes while `asked`: once whatever is called in one of these has returned.

    An env that is in the middle of a step may hold a lock that others wait for. A second signal is not waited for.
    """
    global _asked
    _borders.update(function.__code__ for function in borders)
    _asked = asked


def _leave_later(frame: FrameType | None, number: int) -> bool:
    """Say goodbye at the border this child comes back to, if it is asked to leave and is elsewhere.

    The border is watched as a debugger would, from now on: nobody pays for it before.
    """
    global _asked
    place = frame
    while place is not None and place.f_code not in _borders:
        place = place.f_back
    if _asked is None or place is None or place is frame or not _asked():
        return False
    _asked = None  # once

    def at_border(_: FrameType, event: str, __: Any) -> None:
        if event == "line":
            sys.settrace(None)
            no_more_goodbyes()
            raise Goodbye(number)

    place.f_trace = at_border
    sys.settrace(_ignore)
    return True


def no_more_goodbyes() -> None:
    """What this child does from here on is cleaning up, which is not to be interrupted by being told to go."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if getattr(signal.getsignal(number), "func", None) is _goodbye:  # in no other process than a child
                signal.signal(number, _ignore)


def _goodbye(whose: int, number: int, frame: FrameType | None = None) -> None:
    if os.getpid() != whose:  # a process that an env forked has nobody to say goodbye to
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if not _leave_later(frame, number):
        sys.settrace(None)
        no_more_goodbyes()
        raise Goodbye(number)


def _swallowed(what: Any) -> None:
    """An exception in a finalizer, which Python drops. A goodbye is said again a moment later."""
    if what.exc_type is Goodbye:
        number = what.exc_value.args[0]
        signal.signal(signal.SIGALRM, lambda *_: _goodbye(os.getpid(), number))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(what)


def wake_in_time() -> None:
    """Let this thread, and those it starts, wake from a sleep when it is over, not up to 50 µs later (Linux)."""
    _prctl(_TIMERSLACK, 1)  # nanoseconds


def _prctl(what: int, value: int | bytes) -> bool:
    """Whether the kernel did it; only Linux knows it."""
    if sys.platform != "linux":
        return False
    done: int = ctypes.CDLL(None).prctl(what, value if isinstance(value, bytes) else int(value), 0, 0, 0)
    return done == 0
