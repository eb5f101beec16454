"""Faults at random moments, in random company: never a hang, never a leak, always an error that says what happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from reap.errors import WorkerDied, WorkerError, WorkerRaised, WorkerSilent
from reap.testing import CountingEnv, CountingWorld, FaultyEnv, assert_same, no_leaks
from tests.worlds.faults import BOUND, KINDS, SOON, alive, all_gone, collect, pids

LENGTHS = (3, 1, 5)
TIMEOUT = 3.0
ERRORS = {
    "raise": WorkerRaised,
    "oom": WorkerRaised,
    "exit": WorkerDied,
    "kill": WorkerDied,
    "segfault": WorkerDied,
    "hang": WorkerSilent,
    "deaf": WorkerSilent,
    "stop": WorkerSilent,
}
USES = ["set_seed", "state_dict", "update_policy_weights_", "reset", "next", "next", "next"]


def use(c, rng, worlds):
    """One call of any kind. Batches are checked as long as nothing has begun anew."""
    what = rng.choice(USES) if worlds is None else "next"
    if what != "next":
        getattr(c, what)(*(1,) if what == "set_seed" else ())
        return
    batch = c.next()
    if worlds is not None and c._sync:
        for got, world in zip(batch, worlds):
            assert_same(got, world.batch(4))
    elif worlds is not None:
        assert_same(batch, worlds[batch.origin.worker].batch(8))


def check(error, right, what):
    if not right:
        raise AssertionError(f"{what}, but was told: {error!r}") from error


def one(rng):
    """One injection; returns what it was and how long the call that told of it took."""
    kind, workers = rng.choice(KINDS), rng.choice([1, 2, 3])
    victim, fault = rng.randrange(workers), rng.choice(list(ERRORS))
    inside = rng.random() < 0.6  # the env itself, at a step; else somebody else, at a time
    where = rng.choice(["step", "step", "step", "reset"])
    at = rng.choice([0, 1, 7, rng.randrange(100)]) if where == "step" else rng.randrange(1, 20)
    if not inside:
        fault = rng.choice(["kill", "stop"])

    def maker(w):
        def make():
            env = CountingEnv(LENGTHS, w)
            return FaultyEnv(env, at=at, fault=fault, where=where) if inside and w == victim else env

        return make

    seed = rng.random()
    what = f"{kind.__name__} of {workers}, worker {victim}: {fault} {f'at {where} {at}' if inside else f'after {seed}'}"
    timer = None
    last = time.monotonic()
    try:
        c = collect(kind, [maker(w) for w in range(workers)], frames_per_batch=4 * workers if kind._sync else 8,
                    timeout=TIMEOUT)  # fmt: skip
    except WorkerError as error:
        check(error, inside and isinstance(error, ERRORS[fault]), what)
        return what, time.monotonic() - last
    numbers = pids(c)
    if not inside:
        number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        timer = threading.Timer(seed * 0.1, os.kill, [numbers[victim], number])
        timer.start()
    exact = rng.random() < 0.5
    worlds = [CountingWorld([LENGTHS], first_lane=w, worker=w, workers=workers) for w in range(workers)]
    began = time.monotonic()
    if rng.random() < 0.1:  # in the midst of shutdown, or after it
        time.sleep(rng.random() * 0.1)
        c.shutdown()
        took = time.monotonic() - began
        assert took < BOUND + 0.2, f"{what}: shutdown took {took:.1f} s"
        assert all_gone(numbers, 0.1), what
        if timer is not None:
            timer.cancel()
        return what, took
    try:
        while time.monotonic() - began < 20:
            last = time.monotonic()
            use(c, rng, worlds if exact else None)
    except WorkerError as error:
        took = time.monotonic() - last
        check(error, isinstance(error, ERRORS[fault]), what)
        check(error, error.worker == f"{victim} (pid {numbers[victim]})", what)
        assert took < TIMEOUT + SOON, f"{what}: told after {took:.1f} s"
    else:
        raise AssertionError(f"{what}: never noticed; alive: {[alive(pid) for pid in numbers]}")
    finally:
        if timer is not None:
            timer.join()
    assert c.closed, what
    assert all_gone(numbers, BOUND), what  # an error does not wait for deaf workers to end
    return what, took


def soak(count, seed):
    rng = random.Random(seed)
    with collect(KINDS[0], [CountingEnv]):
        pass  # the helper is there
    with no_leaks():
        return [one(rng) for _ in range(count)]


def test_some_faults():
    soak(8, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_many_faults(seed, capsys):
    times = soak(60, seed)
    slowest = max(times, key=lambda pair: pair[1])
    with capsys.disabled():
        print(f"\n{len(times)} faults, the slowest told after {slowest[1]:.2f} s ({slowest[0]})")
