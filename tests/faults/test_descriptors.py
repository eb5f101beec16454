"""No descriptors left: what cannot be built says so, and leaves none of those it had opened."""

from __future__ import annotations

import contextlib
import gc
import os
import resource

import pytest

from reap._system.threads import wait_for_shutdowns
from reap.collectors import AsyncCollector, Collector, MultiSyncCollector
from reap.envs import AsyncEnvPool, ParallelEnv
from reap.errors import ReapError
from reap.modules import InferenceServer, ProcessInferenceServer
from reap.testing import CountingEnv, EchoPolicy


def opened():
    return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd)}


def is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


@contextlib.contextmanager
def room_for(count):
    """This process may open so many more files, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(min(count, len(fillers))):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fillers:
            os.close(fd)


def served():
    server = InferenceServer(EchoPolicy())
    try:
        server.client("process")
    finally:
        server.shutdown()


WAYS = {
    "workers": lambda: MultiSyncCollector([CountingEnv] * 2, EchoPolicy(), frames_per_batch=8).shutdown(),
    "a worker": lambda: AsyncCollector(CountingEnv, EchoPolicy(), frames_per_batch=8).shutdown(),
    "lanes": lambda: ParallelEnv(2, CountingEnv).close(),
    "lanes in a collector": lambda: Collector(ParallelEnv(2, CountingEnv), EchoPolicy(), frames_per_batch=8).shutdown(),
    "a pool": lambda: AsyncEnvPool([CountingEnv] * 2, backend="multiprocessing").close(),
    "a pool of threads": lambda: AsyncEnvPool(
        [CountingEnv] * 2, backend="multiprocessing", envs_per_worker=2, worker_threads=True
    ).close(),
    "a server": lambda: ProcessInferenceServer(EchoPolicy).shutdown(),
    "a server here": served,
}


QUICK = {"a worker": (14, 15, 16), "lanes": (1, 3, 5), "a server": (1, 4), "a server here": (0,)}
EVERY = range(64)
SLOW = [pytest.param(way, EVERY, id=f"{way}, every", marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize(("way", "rooms"), [*QUICK.items(), *SLOW])
def test_what_cannot_be_built_leaves_no_descriptors(way, rooms):
    """Whichever of them is one too many: with room for none, for some more, until there is enough."""
    make = WAYS[way]
    make()  # with room: imports are done, and the fork server is there
    built = False
    for room in rooms:
        gc.collect()
        before = opened()
        with room_for(room):
            try:
                make()
                built = True
            except ReapError as caught:
                text = str(caught)
            except OSError as caught:
                raise AssertionError(f"room for {room}: bare {caught!r}") from caught
        assert built or "limit of open files" in text, text
        gc.collect()
        wait_for_shutdowns()
        left = {fd: name for fd, name in opened().items() if before.get(fd) != name and not name.endswith("/fd")}
        assert not left, f"room for {room}: left open {left}"
        if built:
            return
    assert rooms is not EVERY, "64 descriptors were not enough"
