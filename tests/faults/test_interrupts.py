"""Ctrl-C at any moment: whoever goes on iterating has lost no frame, and gets none twice."""

from __future__ import annotations

import select
import signal
import threading
import time

import pytest

from reap._system.interrupts import Interrupts
from reap.testing import CountingWorld, assert_same, no_leaks
from tests.worlds.faults import BOUND, KINDS, Handler, Pest, all_gone, collect, healthy, pids, within

LENGTHS = [(3, 1, 5)]


def interrupted(kind, batches, seed, **options):
    """So many batches under constant interruption, each compared with the world it must come from."""
    c = collect(kind, [healthy(0), healthy(1)], **options)
    worlds = [CountingWorld(LENGTHS, first_lane=w, worker=w, workers=2) for w in (0, 1)]
    caught, got, pest = 0, [], Pest(seed)
    with Handler() as handler:
        pest.start()
        iterator = iter(c)
        pest.on.set()
        while len(got) < batches:
            try:
                while len(got) < batches:
                    handler.armed = True
                    batch = next(iterator) if seed % 2 else c.next()
                    got.append(batch)
                handler.armed = False
            except KeyboardInterrupt:
                caught += 1
                iterator = iter(c)
        pest.stop()
    for batch in got:
        if kind is KINDS[0]:
            for w in (0, 1):
                assert_same(batch[w], worlds[w].batch(4))
        else:
            assert_same(batch, worlds[batch.origin.worker].batch(8))
    c.shutdown()
    return caught


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_frame_is_lost(kind, seed):
    with no_leaks():
        assert interrupted(kind, 400, seed) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2, 8))
def test_no_frame_is_lost_for_long(kind, seed):
    assert interrupted(kind, 5000, seed, postproc=lambda td: td) > 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", ["state_dict", "set_seed", "reset"])
def test_an_interrupted_call_does_not_answer_the_next(kind, use):
    def slow():
        from reap.testing import CountingEnv

        class Slow(CountingEnv):
            def reset(self, **options):
                time.sleep(0.2)
                return super().reset(**options)

        return Slow((50,), 0)

    with collect(kind, [slow], timeout=2) as c:
        c.next()
        timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                getattr(c, use)(*(1,) if use == "set_seed" else ())
        timer.join()
        for _ in range(3):
            assert set(c.state_dict()) >= {"worker0", "frames"}
            assert isinstance(c.set_seed(4), int)
            assert c.next()["observation"].reshape(-1, 3)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3])
def test_while_building_and_closing(kind, delay):
    def slow():
        time.sleep(0.3)
        return healthy()()

    with no_leaks():
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            collect(kind, [slow, slow])
            timer.join()  # it was built before
        timer.join()
        c = collect(kind, [healthy(), healthy(1)])
        workers = pids(c)
        timer = threading.Timer(delay / 10, signal.raise_signal, [signal.SIGINT])
        with within(BOUND):
            with pytest.raises(KeyboardInterrupt):
                timer.start()  # it may come in here already
                c.next()
                c.shutdown()
                timer.join()  # it was closed before
            c.shutdown()
        assert all_gone(workers, 0)
        timer.join()
        del c


def test_the_callers_handler_is_used_and_kept():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        mine = signal.getsignal(signal.SIGINT)
        interrupts = Interrupts().open()
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            assert not seen
            with interrupts.held():
                assert select.select([interrupts], [], [], 0)[0]
                interrupts.let_in()
                assert len(seen) == 1
                assert not select.select([interrupts], [], [], 0)[0]
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 1
        assert len(seen) == 2
        assert signal.getsignal(signal.SIGINT) is mine
        interrupts.close()

    finally:
        signal.signal(signal.SIGINT, before)


def test_one_that_comes_while_the_callers_handler_is_put_back(monkeypatch):
    interrupts, real = Interrupts(), signal.signal

    def restore_generator(number, handler):
        real(number, handler)
        if handler is not interrupts._arrive and getattr(handler, "__self__", None) is not interrupts:
            signal.raise_signal(number)  # as if it came now

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", restore_generator)
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            pass
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        signal.raise_signal(signal.SIGINT)
        held = True  # it waits until the end
    assert held
    with interrupts.held():
        interrupts.let_in()  # none is left over


def test_none_falls_into_a_finalizer():
    class Thing:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)  # as if it came now

    interrupts = Interrupts()
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        Thing()
        interrupts.let_in()
        raise AssertionError("swallowed")
    interrupts.close()
