"""Every way a worker can fail, at every moment of its life: noticed soon, told in full, everything closed."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import time

import pytest
import torch

from reap.backends.delivery import OWN_SLOTS
from reap.collectors import AsyncBatchedCollector, Collector
from reap.envs import ParallelEnv, SerialEnv
from reap.errors import SpecMismatch, UsageError, WorkerDied, WorkerError, WorkerRaised, WorkerSilent, WrongState
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same, inject, no_leaks
from tests.worlds.faults import BOUND, KINDS, SOON, alive, all_gone, collect, faulty, healthy, pids, within
from tests.worlds.waiting import until

EXPECTED = {
    "raise": (WorkerRaised, "an injected fault"),
    "exit": (WorkerDied, "exited with code 3"),
    "kill": (WorkerDied, "killed by SIGKILL"),
    "segfault": (WorkerDied, r"killed by SIGSEGV[\s\S]*faults.py.*in inject"),
    "hang": (WorkerSilent, r"sent nothing for[\s\S]*faults.py.*in inject"),
    "deaf": (WorkerSilent, "does not answer signals"),
    "stop": (WorkerSilent, "does not answer signals"),
    "oom": (WorkerRaised, "MemoryError|Unable to allocate"),
}
PATIENCE = 2.0  # a healthy worker on a busy machine is not silent for so long
SLOW = pytest.mark.slow


def mostly_slow(*quick):
    """All faults; but for some, only in the long run."""
    return [pytest.param(fault, marks=() if fault in quick else SLOW) for fault in EXPECTED]


def options_for(fault):
    return {"timeout": PATIENCE} if EXPECTED[fault][0] is WorkerSilent else {}


@pytest.mark.parametrize("fault", EXPECTED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [pytest.param(0, marks=SLOW), 2, pytest.param(21, marks=SLOW)])
def test_in_a_step(kind, fault, at):
    """In the first batch at once, in its middle, in a later one."""
    error, words = EXPECTED[fault]
    with no_leaks():
        c = collect(kind, [healthy(), faulty(fault, at)], **options_for(fault))
        workers = pids(c)
        began = last = time.monotonic()
        with pytest.raises(error, match=words) as caught:
            while time.monotonic() - began < 10:
                last = time.monotonic()
                c.next()
        took = time.monotonic() - last
        assert took < SOON + BOUND, f"next() took {took:.1f} s ({time.monotonic() - began:.1f} s in all)"
        assert caught.value.worker == f"1 (pid {workers[1]})"
        assert caught.value.step == at % (4 if kind is KINDS[0] else 8)
        if error is WorkerRaised:
            assert caught.value.lane == 0
            assert "faults.py" in str(caught.value.__cause__.__cause__), "the child's traceback is missing"
        assert all_gone(workers, 0.5)
        with pytest.raises(WrongState, match="closed: it failed"):
            c.next()
        c.shutdown()
        del c, caught


@pytest.mark.parametrize("fault", ["kill", "hang", "segfault"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_several_lanes_is_named(kind, fault):
    error, words = EXPECTED[fault]

    def lanes():
        return SerialEnv(3, [healthy(0), healthy(1), faulty(fault, 5)])

    c = collect(kind, [lanes], frames_per_batch=12, **options_for(fault))
    with pytest.raises(error, match=words) as caught:
        for _ in range(4):
            c.next()
    assert caught.value.lane == 2
    assert caught.value.step == 5 % 4


@pytest.mark.parametrize("fault", mostly_slow("raise", "kill", "hang"))
@pytest.mark.parametrize("where", ["factory", *(pytest.param(w, marks=SLOW) for w in ("reset", "init", "policy"))])
def test_while_building(fault, where):
    error, words = EXPECTED[fault]

    def breaking():
        inject(fault)

    makers = [healthy(), faulty(fault, where="reset") if where == "reset" else healthy()]
    if where == "factory":
        makers[1] = breaking
    more = {"init_fn": breaking} if where == "init" else {}
    if where == "policy":
        more = {"policy_factory": breaking}
    with no_leaks(), within(SOON + BOUND + PATIENCE):
        with pytest.raises(error, match=words) as caught:
            KINDS[0](makers, frames_per_batch=8, **more, **{**options_for(fault)})
        assert re.match(r"\d \(pid \d+\)", caught.value.worker)
        del caught


def test_what_cannot_be_built():
    import sys
    import types

    gone = types.ModuleType("only_here")
    exec("class Env:\n    pass", gone.__dict__)
    sys.modules["only_here"] = gone
    env, lock = gone.Env, __import__("threading").Lock()
    try:
        with no_leaks():
            for kind in KINDS:
                with pytest.raises(UsageError, match="create_env_fn cannot be sent to another process"):
                    collect(kind, [lambda: (lock, CountingEnv())])
                with pytest.raises(WorkerError, match="only_here"):
                    collect(kind, [lambda: env()])
                with pytest.raises(WorkerError, match="nowhere_at_all"):
                    collect(kind, [lambda: __import__("nowhere_at_all")])
                with pytest.raises(UsageError, match="must be an env, a Gymnasium id or a factory"):
                    collect(kind, [lambda: 5])
    finally:
        del sys.modules["only_here"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", ["next", "set_seed", "state_dict", "update_policy_weights_", "reset", "iterate"])
def test_between_batches(kind, use):
    """Killed while idle: the next call of any kind says so, and everything is closed.

    What had arrived before the death is delivered first: as many batches as the workers have slots, twice at most
    (those that were heard of, and those that came while they were taken).
    """
    with no_leaks():
        c = collect(kind, [healthy(), healthy(1)])
        c.next()
        workers = pids(c)
        os.kill(workers[1], signal.SIGKILL)
        assert c._backend.workers[1].child.gone(1)
        arguments = (1,) if use == "set_seed" else ()
        with within(SOON), pytest.raises(WorkerDied, match="SIGKILL") as caught:
            for _ in range(1 + 2 * OWN_SLOTS * len(workers)):
                list(c) if use == "iterate" else getattr(c, use)(*arguments)
        assert caught.value.worker == f"1 (pid {workers[1]})"
        assert c.closed
        assert all_gone(workers, 0.5)
        del c, caught


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_tells_what_the_worker_said_before_it_ended(kind):
    """Its exception lies unread in the connection; the exit code of its process says nothing."""
    c = collect(kind, [faulty("raise", at=9)])
    c.next()
    supervisor = c._backend.supervisor
    if c._sync:
        with supervisor.listen_lock:  # as `take` orders a batch, before Ctrl-C ends the wait for it
            c._backend.delivery._order(0, random=False)
    assert c._backend.workers[0].child.gone(SOON)
    with pytest.raises(WorkerRaised, match="an injected fault"):
        c.update_policy_weights_()
    assert c.closed


class Widens:
    """Writes another shape from some call on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, observation):
        self.calls += 1
        return EchoPolicy()(observation), torch.zeros(*observation.shape[:-1], 1 + (self.calls > 40))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", ["next", "rollout"])
def test_a_policy_that_writes_another_shape(kind, use):
    """Told as a SpecMismatch, which ends the worker and closes the collector like any other failure."""
    c = collect(kind, [healthy(), healthy(1)], Widens())
    workers = pids(c)
    with pytest.raises(SpecMismatch, match="changed"):
        for _ in range(40):
            getattr(c, use)()
    assert c.closed
    assert all_gone(workers, SOON)


class Stateful(CountingEnv):
    """Fails in what `set_seed` and `state_dict` call in the worker."""

    fault = "kill"

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            inject(self.fault)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("fault", mostly_slow("raise", "kill"))
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_call(kind, fault):
    """The worker fails while it answers."""

    class Env(Stateful):
        pass

    Env.fault = fault
    error, words = EXPECTED[fault]
    with no_leaks():
        c = collect(kind, [healthy(), lambda: Env((3,), 1)], **options_for(fault))
        c.next()
        workers = pids(c)
        with within(SOON + BOUND), pytest.raises(error, match=words) as caught:
            c.set_seed(3)
        assert caught.value.worker == f"1 (pid {workers[1]})"
        assert c.closed
        assert all_gone(workers, 0.5)
        del c, caught


@pytest.mark.parametrize("fault", mostly_slow("raise", "deaf"))
@pytest.mark.parametrize("kind", KINDS)
def test_in_close(kind, fault):
    """An env that fails when it is closed cannot hold up the others, nor the parent."""
    with no_leaks(), within(BOUND + SOON):
        c = collect(kind, [healthy(), faulty(fault, where="close")])
        c.next()
        workers = pids(c)
        with within(BOUND):
            c.shutdown()
        assert all_gone(workers, 0)
        c.shutdown()
        del c


@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_shutdown(kind):
    with no_leaks():
        c = collect(kind, [healthy(), healthy(1), faulty("deaf", where="close")])
        c.next()
        workers = pids(c)
        if os.fork() == 0:
            try:
                until(lambda: not all(map(alive, workers)))  # the healthy ones have closed
                for pid in filter(alive, workers):
                    os.kill(pid, signal.SIGKILL)
            finally:
                os._exit(0)
        with within(3.5):  # one that does not hear is killed after four, if nobody does it before
            c.shutdown()
        os.wait()
        assert all_gone(workers, 0)
        del c


@pytest.mark.parametrize("kind", KINDS)
def test_one_is_silent_while_others_talk(kind):
    """A busy neighbour does not hide who has stopped."""
    c = collect(kind, [healthy(), faulty("hang", 13)], timeout=PATIENCE)
    began = time.monotonic()
    with pytest.raises(WorkerSilent, match=r"faults.py.*in inject"):
        while time.monotonic() - began < 10:
            c.next()
            time.sleep(0.01)


def test_a_slow_consumer_is_not_a_silent_worker():
    """Whoever has nothing to do may be silent; the clock starts when there is work."""

    def slow():
        class Slow(CountingEnv):
            def step(self, action):
                time.sleep(0.02)
                return super().step(action)

        return Slow((9,), 0)

    with collect(KINDS[1], [slow], timeout=PATIENCE) as c:
        for _ in range(2):
            held = [c.next() for _ in range(5)]
            time.sleep(1.3 * PATIENCE)  # all slots are full by now
            while c._backend.supervisor.arrived:
                held.append(c.next())
            held.clear()
            c.next()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_outlive_the_workers(kind):
    c = collect(kind, [healthy(), healthy(1)])
    worlds = [CountingWorld([(3, 1, 5)], first_lane=w, worker=w, workers=2) for w in (0, 1)]
    kept = [c.next() for _ in range(4)]
    os.kill(pids(c)[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        while True:
            c.next()
    del c
    for batch in kept:
        if kind is KINDS[0]:
            for w in (0, 1):
                assert_same(batch[w], worlds[w].batch(4))
        else:
            assert_same(batch, worlds[batch.origin.worker].batch(8))


class Breaking(CountingEnv):
    """Raises something that is no `Exception` at its third step."""

    left = 2

    def __init__(self, error):
        super().__init__((9,), 0)
        self.error = error

    def step(self, action):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().step(action)


LANES_ELSEWHERE = {
    "in step": lambda makers: Collector(ParallelEnv(2, makers), EchoPolicy(), frames_per_batch=24),
    **{
        name: functools.partial(
            AsyncBatchedCollector, policy=EchoPolicy(), frames_per_batch=24, env_backend="multiprocessing", **options
        )
        for name, options in {"ready": {}, "threads": {"worker_threads": True, "envs_per_worker": 2}}.items()
    },
}


@pytest.mark.parametrize("kind", LANES_ELSEWHERE)
def test_what_an_env_elsewhere_raises_may_be_large(kind):
    class Large(CountingEnv):
        def step(self, action):
            raise ValueError("x" * 2_000_000)  # more than goes into a socket at once

    with no_leaks():
        collector = LANES_ELSEWHERE[kind]([Large, healthy(1)])
        with pytest.raises(WorkerRaised) as told:
            while True:  # others may fill a batch before it is heard
                collector.next()
        assert len(str(told.value)) > 2_000_000
        collector.shutdown()
        del collector, told


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError("stopped")])
def test_an_env_that_raises_what_is_no_exception_is_told_as_any_other(error):
    words = re.escape(f"raised {error!r}")
    c = collect(KINDS[0], [healthy(), lambda: Breaking(error)])
    with pytest.raises(WorkerRaised, match=words) as caught:
        c.next()
    assert (caught.value.step, caught.value.lane) == (2, 0)
    assert isinstance(caught.value.__cause__, type(error))
    assert "in step" in str(caught.value.__cause__.__cause__), "the child's traceback is missing"
    lanes = Collector(ParallelEnv(1, lambda: Breaking(error)), EchoPolicy(), frames_per_batch=8)
    with pytest.raises(WorkerRaised, match=words):
        lanes.next()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_worker_that_is_asked_to_end_by_a_signal_is_told_as_that(number):
    with no_leaks():
        c = collect(KINDS[0], [healthy(), healthy(1)])
        os.kill(pids(c)[1], number)
        with pytest.raises(WorkerDied, match=rf"worker 1 .*was ended by {number.name} \("):
            while True:
                c.next()
        del c


def test_lanes_that_are_asked_to_end_by_a_signal_are_told_as_that():
    env = ParallelEnv(2, [healthy(), healthy(1)])
    c = Collector(env, EchoPolicy(), frames_per_batch=8)
    os.kill(env.lanes_env.processes[1].child.pid, signal.SIGTERM)
    with pytest.raises(WorkerDied, match=r"of lane 1 .*was ended by SIGTERM \(a time limit"):
        while True:
            c.next()
