"""Storms of Ctrl-C, at any moment of any collector: no hole, nothing twice, nothing swallowed, and it goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from reap.collectors import AsyncCollector
from reap.envs.parallel.env_child import TOKENS
from reap.envs.parallel.env_process import EnvProcess
from reap.envs.parallel.process_workers import ProcessWorkers, ThreadedProcessWorkers
from reap.testing import CountingWorld, assert_same, no_leaks
from tests.worlds.background import KINDS as IN_BACKGROUND
from tests.worlds.background import buffer, check_end, make
from tests.worlds.faults import HERE, KINDS, Handler, Pest, SlowEnv, collect, healthy, whole
from tests.worlds.waiting import until

pytestmark = pytest.mark.timeout(120)
SHORT, LONG = 60, 10_000  # interrupts of one collector


@pytest.fixture(params=[SHORT, pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def interrupts(request):
    return request.param


def storm(act, interrupts, seed=0):
    """Call `act` again and again until it was interrupted so often; after each call that was not, what it returns."""
    caught, swallowed, pest = 0, [], Pest(seed)

    def swallow(what):
        """Keep what it says alone: its frames would keep a pause alive. Hypothesis has a callback of its own there."""
        if not getattr(what.object, "__module__", "").startswith("hypothesis"):
            swallowed.append(repr(what))

    with Handler() as handler:
        sys.unraisablehook = swallow
        pest.start()
        pest.on.set()
        try:
            while caught < interrupts:
                try:
                    handler.armed = True
                    got = act()  # what it returned before is dropped here
                    handler.armed = False
                except KeyboardInterrupt:
                    caught += 1
                else:
                    yield got
        finally:
            handler.armed = False
            pest.stop()
    assert not swallowed, f"{len(swallowed)} were swallowed by finalizers: {swallowed[0]}"


# ---- workers of their own: what is interrupted goes on where it was ------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, AsyncCollector])
def test_workers_lose_nothing(kind, interrupts):
    one = kind is AsyncCollector
    worlds = [CountingWorld([(3, 1, 5)], first_lane=w, worker=w, workers=2 - one) for w in (0, 1)]
    with no_leaks():
        c = collect(kind, healthy(0) if one else [healthy(0), healthy(1)])
        for batch in storm(c.next, interrupts):
            if kind is KINDS[0]:
                for w in (0, 1):
                    assert_same(batch[w], worlds[w].batch(4))
            else:
                assert_same(batch, worlds[batch.origin.worker].batch(8))
        batch = None
        c.next()
        c.next()  # looks who has given back what
        assert sum(len(remote.lent) for remote in c._backend.workers) <= 2, "slots were lost"
        c.shutdown()
        del c, batch


# ---- envs of this process: a rollout that was broken off is forgotten, and every lane begins anew ------------------


@pytest.mark.parametrize("kind", HERE)
def test_envs_of_this_process_deliver_true_frames(kind, interrupts):
    with no_leaks():
        c = HERE[kind]()
        seen = {}
        for batch in storm(c.next, interrupts):
            whole(batch, seen)
        batch = None
        whole(c.next())
        c.shutdown()
        del c, batch


@pytest.mark.parametrize("when", ["before it is sent", "after it is answered"])
def test_a_step_of_which_it_is_not_known_whether_it_was_answered(when, monkeypatch):
    """Lanes in processes: broken off at the two moments that look the same from here, and are not."""
    with HERE["parallel"]() as c:
        whole(c.next())
        process, read, write = c.env.processes[1], os.read, os.write

        def answered(fd, size):
            data = read(fd, size)
            if fd == process.reply:
                raise KeyboardInterrupt
            return data

        def sent(fd, data):
            if fd == process.order_fd:
                raise KeyboardInterrupt
            return write(fd, data)

        if when == "before it is sent":
            monkeypatch.setattr(os, "write", sent)
        else:
            monkeypatch.setattr(os, "read", answered)
        with pytest.raises(KeyboardInterrupt):
            c.next()
        monkeypatch.undo()
        for _ in range(3):
            whole(c.next())


def broken_off(c, handler, wait=(EnvProcess, "wait"), times=1):
    """Interrupt so many calls of `next` in a row where they wait for lanes."""
    place, name = wait
    before = getattr(place, name)

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return before(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, interrupted)
        for _ in range(times):
            handler.armed = True
            with pytest.raises(KeyboardInterrupt):
                c.next()


@pytest.mark.parametrize("kind", ["parallel", "processes", "threads of a process"])
def test_more_interrupts_in_a_row_than_there_are_tokens(kind):
    """Each leaves an answer to a PING unread: none of these may be taken for the answer to a later one."""
    waits = {"processes": (ProcessWorkers, "_answers"), "threads of a process": (ThreadedProcessWorkers, "_answers")}
    wait = waits.get(kind, (EnvProcess, "wait"))
    with HERE[kind](SlowEnv) as c, Handler() as handler:
        whole(c.next())
        broken_off(c, handler, wait, 2 * TOKENS + 50)
        whole(c.next())
        for _ in range(5):
            broken_off(c, handler, wait)
            whole(c.next())


# ---- in the background ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", IN_BACKGROUND)
def test_the_background_goes_on(kind, interrupts):
    memory = buffer()
    collector = make(kind, memory)
    collector.start()
    memory.sample()
    turns = [0]

    def paused():
        with collector.pause():
            return memory.write_count

    def act():
        turns[0] += 1
        return (collector.stats, collector.update_policy_weights_, paused, collector.state_dict)[turns[0] % 4]()

    for _ in storm(act, interrupts):
        pass
    count = memory.write_count
    until(lambda: memory.write_count >= count + 100)  # none of the pauses that were broken off holds
    with collector.pause():
        check_end(memory)
    collector.async_shutdown()


def test_the_handler_is_the_callers_again():
    before = signal.getsignal(signal.SIGINT)
    c = collect(KINDS[1], [healthy()])
    for _ in storm(c.next, 20):
        pass
    c.shutdown()
    assert signal.getsignal(signal.SIGINT) is before
    assert threading.current_thread() is threading.main_thread()
