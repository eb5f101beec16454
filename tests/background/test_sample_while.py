"""`for sample in buffer.sample_while(collector)`: a learner's whole loop ends cleanly, however it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading

import pytest

from reap.collectors import Collector
from reap.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, SamplesPerInsert
from reap.errors import Starved, UsageError, WorkerDied, WorkerRaised, WrongArgument, WrongState
from reap.testing import CountingEnv
from tests.worlds.background import KINDS, buffer, check_rows, make
from tests.worlds.faults import BOUND, pids, within
from tests.worlds.waiting import until


class Boom(CountingEnv):
    """Raises in its episode 30."""

    def step(self, action):
        if self.episode == 30:
            raise OverflowError("boom")
        return super().step(action)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_the_loop_ends_with_the_run(kind, prefetch):
    """The learner is faster and waits for rows, of which the last ones never come: no `Starved`, in any run."""
    for _ in range(5):
        memory = buffer(limiter=SamplesPerInsert(4, tolerance=0, min_size=10, timeout=20), prefetch=prefetch)
        with make(kind, memory, total_frames=80) as collector, within(BOUND):
            collector.start()
            drawn = 0
            for sample in memory.sample_while(collector):
                check_rows(sample, 1.0)
                drawn += len(sample)
            assert memory.write_count == 80
            assert not collector.is_running()
            # The ratio is met, but for the sample that was waited for and those that a thread had made ahead.
            assert 4 * 70 - 16 * (prefetch or 0) <= drawn <= 4 * 70 + 16 * (2 + (prefetch or 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_learner_draws_what_the_ratio_asks_for(kind):
    memory = buffer(limiter=SamplesPerInsert(8, tolerance=10_000, min_size=10))
    with make(kind, memory, total_frames=80) as collector, within(BOUND):
        collector.start()
        loop = memory.sample_while(collector)
        until(lambda: not collector.is_running())  # it has made all frames before the first sample
        drawn = sum(len(sample) for sample in loop)
    assert 8 * 70 <= drawn < 8 * 70 + 16


def test_without_a_limiter_it_ends_with_the_last_frame():
    memory = buffer()
    with make("single", memory, total_frames=80) as collector, within(BOUND):
        collector.start()
        until(lambda: not collector.is_running())
        assert list(memory.sample_while(collector)) == []


def test_an_episode_that_never_ends_is_an_empty_loop():
    """All frames are made and not one row is there."""
    memory = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    options = {"frames_per_batch": 10, "total_frames": 20, "trajs_per_batch": 1, "replay_buffer": memory}
    with Collector(lambda: CountingEnv((50,)), **options) as collector, within(BOUND):
        collector.start()
        assert list(memory.sample_while(collector)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_raised_at_the_next_sample(kind):
    """Though there are rows, and nobody would have to wait."""
    memory = buffer()
    collector = make(kind, memory, env=Boom)
    collector.start()
    loop = memory.sample_while(collector)
    until(lambda: collector._runner.failure() is not None)
    assert len(memory)
    with within(BOUND), pytest.raises(WorkerRaised, match="boom") as caught:
        next(loop)
    assert isinstance(caught.value.__cause__, OverflowError)
    with pytest.raises(WorkerRaised, match="boom"):
        memory.sample_while(collector)
    collector.shutdown()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_that_is_killed_is_named_at_the_next_sample(kind):
    memory = buffer(limiter=SamplesPerInsert(100, tolerance=1e9))
    collector = make(kind, memory)
    collector.start()
    loop = memory.sample_while(collector)
    next(loop)
    os.kill(pids(collector)[1], signal.SIGKILL)
    with within(BOUND), pytest.raises(WorkerDied, match="worker 1"):
        for _ in loop:
            pass
    collector.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_ends_the_loop(kind):
    memory = buffer(limiter=SamplesPerInsert(8, tolerance=10_000))
    collector = make(kind, memory)
    collector.start()
    loop = memory.sample_while(collector)
    next(loop)
    collector.async_shutdown()
    with within(BOUND):
        assert list(loop) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_of_another_thread_is_waited_for(kind):
    """However long it takes: longer than the limiter's timeout here."""
    memory = buffer(limiter=SamplesPerInsert(1, tolerance=0, timeout=1))
    collector = make(kind, memory)
    collector.start()
    loop = memory.sample_while(collector)
    next(loop)
    paused, resume = threading.Event(), threading.Event()

    def save():
        with collector.pause():
            paused.set()
            resume.wait(BOUND)

    saving = threading.Thread(target=save)
    saving.start()
    assert paused.wait(BOUND)
    count = memory.write_count
    threading.Timer(2, resume.set).start()
    with within(BOUND):
        for _ in range(count // 16 + 5):
            next(loop)
    assert resume.is_set(), "rows that are there were enough: nobody had to wait"
    assert memory.write_count > count
    saving.join()
    # A pause of the thread that waits: nobody would end it.
    with collector.pause(), within(BOUND), pytest.raises(Starved, match="too many"):
        for _ in range(100):
            next(loop)
    collector.shutdown()


def test_pauses_between_samples():
    memory = buffer(limiter=SamplesPerInsert(2, tolerance=0))
    with make("async", memory, total_frames=400) as collector, within(BOUND):
        collector.start()
        for turn, _ in enumerate(memory.sample_while(collector)):
            with collector.pause() if turn % 5 == 0 else contextlib.nullcontext():
                collector.update_policy_weights_()
    assert memory.write_count == 400


def test_batch_size_and_info():
    memory = buffer()
    with make("single", memory, total_frames=-1) as collector:
        collector.start()
        sample, info = next(memory.sample_while(collector, 7, return_info=True))
        assert len(sample) == len(info["index"]) == 7


def test_wrong_collectors():
    memory = buffer()
    with pytest.raises(WrongArgument, match="collector of reap's, got list"):
        memory.sample_while([])
    with make("single", buffer()) as other, pytest.raises(UsageError, match="does not fill this buffer"):
        memory.sample_while(other)
    with make("single", memory) as collector, pytest.raises(WrongState, match=r"call .*\.start\(\) first"):
        memory.sample_while(collector)


def test_a_buffer_whose_collector_is_gone_waits_for_nobody():
    """Whoever waits for rows, a thread that prepares samples too, is told at once, not after the limiter's time-out."""
    memory = buffer(limiter=SamplesPerInsert(1, tolerance=0, min_size=10, timeout=BOUND))
    with make("single", memory, total_frames=20) as collector:
        collector.start()
        until(lambda collector=collector: not collector.is_running())
    del collector
    gc.collect()
    with within(BOUND / 2):
        for _ in range(10):  # more than the ratio allows: there is nobody to be in proportion to
            memory.sample()


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_that_drops_its_rest_waits_for_a_whole_batch(kind):
    memory = ReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=SamplerWithoutReplacement(drop_last=True), batch_size=256
    )
    with make(kind, memory, total_frames=300) as collector, within(BOUND):
        collector.start()
        assert len(memory.sample()) == 256
    with pytest.raises(Starved, match="do not make a batch"):
        memory.sample(1000)
