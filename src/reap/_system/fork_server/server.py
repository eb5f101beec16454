"""The fork server: a process with torch imported and nothing run, which forks children and reports how they end.

    parent ══ request: descriptors ══► fork server ── fork ──► child ── starts ──► programs of the user's env
       ▲                                  │  ▲ └── resource tracker (Python's own: unlinks shared memory left behind)
       └── status pipe: pid, then code ◄──┘  └──── what outlives its child is reparented to the server, which kills it

- The server runs in a session of its own: signals to the parent's process group (Ctrl-C, `timeout`, a closed terminal)
  do not reach it. It outlives the parent only until its children have closed their envs.
- A failed fork is reported through the status pipe and affects no other child.
- A child is a process group, and marks the environment of the programs it starts (`REAP_CHILD`). The kernel reparents
  orphans to the server (PR_SET_CHILD_SUBREAPER). So programs end with their child even if they are daemons.
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
    freeze_objects,
    ignore,
    prctl,
    run_child,
)
from reap._system.fork_server.orphans import SERVER_NAME, children_of, end_orphans

STATUS = struct.Struct("q")  # through a status pipe: a pid, or minus the errno of a failed fork; then an exit code
REQUEST = struct.Struct("ii")  # how many descriptors come with a request, and whether the last is a resource tracker's
OWN_FDS = 3  # the descriptors every child gets: status pipe, connection, file for stacks
MOST_FDS = 200  # descriptors a child may get beside those
_STRAY = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, *ENDING)  # meant for other processes


def serve(request_fd: int, parent: int, name: str, preload: Sequence[str]) -> NoReturn:
    """Run the server: fork on request, report how children end, and exit when the parent is gone."""
    for number in _STRAY:
        signal.signal(number, ignore)
    prctl(SET_NAME, SERVER_NAME.encode())
    prctl(SUBREAPER, 1)
    requests = socket.socket(fileno=request_fd)
    with contextlib.suppress(OSError):  # otherwise it is started when first needed
        resource_tracker.ensure_running()
    for module in preload:
        with contextlib.suppress(ImportError):
            __import__(module)
    if preload:
        _warm_up()
    freeze_objects()  # otherwise garbage collection in a child would write to, and so copy, all pages it shares with us
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, ignore)
    signal.set_wakeup_fd(waker.fileno())
    # If the parent has forked, its copy keeps our socket open after its death. So the kernel wakes us, or we poll where
    # it cannot. (The kernel also does so when only the thread that started us has ended: hence the check of getppid.)
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
    """Fork one child, and report its pid, or why it could not be forked."""
    wanted, tracked = REQUEST.unpack(data)
    if len(fds) < wanted:  # the kernel drops descriptors for which this process has no room
        pid = -errno.EMFILE
    else:
        for fd in fds:
            os.set_inheritable(fd, False)  # programs that an env starts must not inherit them
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
        with contextlib.suppress(OSError):  # the parent may have ended meanwhile
            os.write(fds[0], STATUS.pack(pid))
        told = pid > 0
        if told:
            status[pid] = fds[0]
    for fd in fds[1:] if told else fds:
        os.close(fd)


def _reap(status: dict[int, int]) -> None:
    """Report each child that has ended, and kill what it left behind."""
    strangers = False
    while (ended := _next_ended()) is not None:
        pid = ended.si_pid
        fd = status.pop(pid, None)
        strangers |= fd is None
        if fd is not None:  # before the child is reaped: until then its pid cannot be reused
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            end_orphans(status)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):  # before it is reaped, too: a process that sees it gone finds its code
                os.write(fd, STATUS.pack(code))
            os.close(fd)
        os.waitpid(pid, 0)
    if strangers:  # one of those may have been a child of another server, with programs of its own
        end_orphans(status)


def _next_ended() -> Any:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None


def _end(status: dict[int, int], wake: socket.socket) -> None:
    """End all children, what they left behind, and the resource tracker: the parent is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        _reap_until(lambda: not status, status, wake)
    _reap_until(lambda: not end_orphans((), all_of_them=True), status, wake)
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:  # once its pipe is closed it unlinks what is left; the server waits for that
        os.close(tracker._fd)
        _reap_until(lambda: tracker._pid not in children_of(os.getpid()), status, wake)


def _reap_until(true: Callable[[], bool], status: dict[int, int], wake: socket.socket) -> None:
    """Reap children until `true()`, for up to `GRACE` seconds."""
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        deadline = time.monotonic() + GRACE
        _reap(status)
        while not true() and (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                wake.recv(4096)
            _reap(status)


def _warm_up() -> None:
    """Let torch set itself up once, before any child is forked, and on one thread, so that forking stays safe."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad():
        torch.tanh(layer(torch.zeros(2, 4))).sum().item()
    torch.set_num_threads(threads)
