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
import errno
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import resource_tracker
from typing import Any, NoReturn

from reap._system.fork_server.child import (
    ENDING,
    GRACE,
    PDEATHSIG,
    SET_NAME,
    SUBREAPER,
    ignore,
    prctl,
    run_child,
    settle,
)
from reap._system.fork_server.orphans import SERVER_NAME, children_of, end_orphans

WORD = struct.Struct("q")  # through a status pipe: a pid, or minus the errno of a fork that failed; then an exit code
REQUEST = struct.Struct("ii")  # how many descriptors come with it, and whether the last is a resource tracker's
OWN_FDS = 3  # of those, the ones every child has: status pipe, connection, file for stacks
MOST_FDS = 200  # a child may be given on top of them
_STRAY = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, *ENDING)  # meant for others, if the server gets one


def serve(request_fd: int, parent: int, name: str, preload: Sequence[str]) -> NoReturn:
    """The life of the server: fork when asked, report ends, end when the asking side is gone."""
    for number in _STRAY:
        signal.signal(number, ignore)
    prctl(SET_NAME, SERVER_NAME.encode())
    prctl(SUBREAPER, 1)
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
    signal.signal(signal.SIGCHLD, ignore)
    signal.set_wakeup_fd(waker.fileno())
    # A parent that forked: somebody else holds our socket open after its death. So the kernel wakes us; where it
    # cannot, we look. (It also does when only the thread that started us has ended: hence we ask who our parent is.)
    pause = None if prctl(PDEATHSIG, signal.SIGCHLD) else 0.5
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
        for number in (signal.SIGCHLD, signal.SIGUSR2, *ENDING):
            signal.signal(number, signal.SIG_DFL)
        for thing in inherited:
            thing.close()
        for fd in (*status.values(), fds[0]):
            os.close(fd)
        run_child(fds[1], fds[2], fds[OWN_FDS : wanted - tracked], fds[-1] if tracked else None, name)
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
        _reap_until(lambda: tracker._pid not in children_of(os.getpid()), status, wake)


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


def _warm_up() -> None:
    """What every child would do first: torch sets itself up here, once, on one thread, so that forking stays safe."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad():
        torch.tanh(layer(torch.zeros(2, 4))).sum().item()
    torch.set_num_threads(threads)
