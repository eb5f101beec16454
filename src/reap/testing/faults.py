"""Faults: what can happen to a worker, caused on purpose. For tests of your own setup: does it notice, and clean up?

raise     an exception                     stop   SIGSTOP: alive, but frozen
exit      os._exit(3)                      hang   waits for ever; signals still reach it
kill      SIGKILL, as the kernel's         deaf   waits for ever, like native code: no signal but SIGKILL helps
          out-of-memory killer sends it    oom    an allocation beyond the process's limit: MemoryError
segfault  reads address 0                  disk   a file that may not grow: OSError, as from a full disk
                                           descriptors  closes all but the standard ones; the worker goes on until it
                                                        needs one
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np

from reap.errors import UsageError

Fault = Literal["raise", "exit", "kill", "segfault", "hang", "deaf", "stop", "oom", "disk", "descriptors"]
_ROOM = 1 << 26  # bytes of memory that `oom` leaves to the process; it requests sixteen times as much


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium env that fails at its `at`-th step (or reset, or close), counted from 0 over all episodes.

    >>> collector = MultiSyncCollector([lambda: FaultyEnv(gym.make("CartPole-v1"), at=7, fault="kill")], …)

    Args:
        env: the env to step until then.
        at: the number of the call that fails.
        fault: how it fails; see the module.
        where: the method whose calls count: "step", "reset" or "close".
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        *,
        at: int,
        fault: Fault,
        where: Literal["step", "reset", "close"] = "step",
    ) -> None:
        super().__init__(env)
        if fault not in get_args(Fault):
            raise UsageError(f"fault must be one of {', '.join(get_args(Fault))}, got {fault!r}")
        self._left, self._fault, self._where = at, fault, where

    def _count(self, method: str) -> None:
        if method == self._where:
            self._left -= 1
            if self._left < 0:
                inject(self._fault)

    def step(self, action: Any) -> Any:
        """Step, or fail."""
        self._count("step")
        return self.env.step(action)

    def reset(self, **options: Any) -> Any:
        """Reset, or fail."""
        self._count("reset")
        return self.env.reset(**options)

    def close(self) -> None:
        """Close, or fail."""
        self._count("close")
        self.env.close()


def inject(fault: Fault) -> None:
    """Cause the fault in this process, now."""
    if fault == "raise":
        raise RuntimeError("an injected fault")
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        ctypes.string_at(0)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "oom":
        _run_out_of_memory()
    if fault == "disk":
        _fill_the_disk()
    if fault == "descriptors":
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return
    if fault == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Event().wait()


@contextlib.contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """Within the block, no file of this process grows beyond `room` bytes: writing more fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fill_the_disk() -> None:
    with full_disk(), tempfile.TemporaryFile(buffering=0) as file:
        file.write(b"one byte too many")


def _run_out_of_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, hard))
    try:
        np.ones(16 * _ROOM, np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
