"""The parent's end of the fork server: starts it when first needed, requests children, ends it at exit."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker

from reap._system.fork_server.child import GRACE
from reap._system.fork_server.server import REQUEST, serve
from reap._system.threads import wait_for_shutdowns
from reap.errors import WorkerDied

_PRELOAD = ("torch", "tensordict.nn", "gymnasium", "reap.collectors", "reap.envs")  # or each worker would import them
_PRELOAD_TOO = ("torchrl.envs",)  # slow to import; preloaded if this program has, as its envs go to workers

_NO_ROOM = {
    errno.EAGAIN: "the limit of processes is reached (ulimit -u, or pids.max of the cgroup)",
    errno.ENOMEM: "there is no memory for another process",
    errno.EMFILE: "the limit of open files is reached (ulimit -n)",
    errno.ENFILE: "the machine's limit of open files is reached",
}


def why_not_started(number: int | None) -> str:
    """Return in words why a process could not be started, from an errno."""
    return f"could not be started: {_NO_ROOM.get(number or 0) or os.strerror(number or 0)}"


@contextlib.contextmanager
def limits_as_worker_died(who: str) -> Iterator[None]:
    """Within the block, turn an error about a limit of the system into `WorkerDied`: `who` could not be started."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise WorkerDied(f"{who} {why_not_started(error.errno)}") from error


class ForkServer:
    """The parent's end of the process that forks children."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.name = secrets.token_hex(8)
        path = [p for p in sys.path if isinstance(p, str)]
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        ours, theirs = socket.socketpair()
        arguments = theirs.fileno(), os.getpid(), self.name, tuple(preload)
        code = f"import sys; sys.path[:] = {path!r}; from {serve.__module__} import serve; serve(*{arguments!r})"
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *flags, "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # signals to our process group must not reach it
                )
        except BaseException:
            ours.close()
            raise
        self._socket = ours
        self.owner = os.getpid()

    def fork(self, fds: Sequence[int]) -> None:
        """Request a child that gets these descriptors, and our resource tracker if there is one."""
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


_common: ForkServer | None = None
_lock = threading.Lock()


def common_fork_server() -> ForkServer:
    """Return the process-wide fork server, started when first needed; it ends with the process."""
    global _common
    with _lock:
        if _common is None or not _common.alive:
            if _common is None:
                atexit.register(_end_common)
            _common = ForkServer((*_PRELOAD, *(name for name in _PRELOAD_TOO if name in sys.modules)))
        return _common


def get_ready() -> None:
    """Start the fork server early, so that it imports what children need while the caller goes on."""
    common_fork_server()


def _end_common() -> None:
    wait_for_shutdowns()
    if _common is not None:
        _common.close()


def kept_fork_server() -> tuple[int, int] | None:
    """Return the pid of the fork server kept for later children, and our descriptor to it; None if there is none."""
    return None if _common is None or not _common.alive else (_common.process.pid, _common.fileno())
