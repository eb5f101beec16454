"""SamplesPerInsert: collecting and learning in proportion, never both waiting, and an error in place of a hang."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.buffers import row_source
from reap.buffers.storage.ring import SAMPLED
from reap.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
from reap.errors import Starved, UsageError, WorkerRaised, WrongArgument
from reap.testing import CountingEnv
from tests.worlds.background import KINDS, buffer, check_rows, make
from tests.worlds.buffers import line
from tests.worlds.faults import BOUND, within
from tests.worlds.waiting import until


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.5, 4])
def test_the_ratio_is_kept(kind, ratio):
    """Whoever is faster waits: a learner that only samples, and one that takes its time."""
    memory = buffer(limiter=SamplesPerInsert(ratio, tolerance=100, min_size=60))
    collector = make(kind, memory)
    collector.start()
    for update in range(1, 151):
        check_rows(memory.sample(), 1.0)
        if update % 50 == 0:
            behind = memory.limiter.behind(memory._memory.ring)
            assert -100 - 16 <= behind <= 100 + 40 * ratio  # a sample; a rollout of each worker
    until(lambda: not memory.may_write)
    time.sleep(0.05)
    assert memory.limiter.behind(memory._memory.ring) <= 100 + 40 * ratio  # it rests
    assert collector.is_running()
    collector.async_shutdown()


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.floats(0.01, 100),
    tolerance=st.floats(0, 1000),
    least=st.integers(1, 50),
    rows=st.integers(1, 60),
    size=st.integers(1, 60),
)
def test_one_of_the_two_always_may(ratio, tolerance, least, rows, size):
    """Whatever the sizes of writes and samples: never a deadlock, never further off than one of them."""
    limiter = SamplesPerInsert(ratio, tolerance=tolerance, min_size=least)
    memory = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=size, limiter=limiter)
    ring = memory._memory.ring
    for turn in range(60):
        try:
            limiter.check(ring)
            may_sample = True
        except Starved:
            may_sample = False
        assert may_sample or memory.may_write
        if may_sample and (turn % 2 or not memory.may_write):
            limiter.count(ring, size)
        else:
            memory.extend(line(rows))
        if memory.write_count >= least:
            assert -tolerance - size - 1e-6 <= limiter.behind(ring) <= max(tolerance, 0) + rows * ratio + 1e-6


def test_a_sample_nobody_feeds_is_an_error():
    memory = buffer(limiter=SamplesPerInsert(1, tolerance=20, min_size=10, timeout=0.2))
    with within(BOUND), pytest.raises(Starved, match=r"0 rows are written, min_size is 10; no rows came for \d s"):
        memory.sample()
    collector = make("single", memory, total_frames=60)
    collector.next()
    memory.sample()
    memory.sample()
    with pytest.raises(Starved, match="32 rows were sampled and 20 written, at 1 samples per row") as caught:
        memory.sample()
    assert "no rows came" not in str(caught.value), "batches are taken by hand: nobody had to wait to know"
    collector.next()
    memory.sample()
    collector.shutdown()


def test_patience_counts_from_the_last_row(monkeypatch):
    """Rows arrive one by one, each in time, and all together take longer than the timeout."""
    memory = buffer(limiter=SamplesPerInsert(1, min_size=10, timeout=20))
    now = [0.0]

    def sleep(_):
        now[0] += 15
        if memory.write_count < 10:
            memory.extend(line(1))

    monkeypatch.setattr(row_source, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert set(memory.sample()["step"].tolist()) == {0}
    assert now[0] == 150
    memory.limiter.min_size = 11
    with pytest.raises(Starved, match=r"10 rows are written, min_size is 11; no rows came for 30 s"):
        memory.sample()


@pytest.mark.parametrize("kind", KINDS)
def test_the_learners_loop_ends_when_the_collector_does(kind):
    """Whoever is faster: a learner that waits for rows which will never come is let go."""
    for _ in range(13 if kind in ("single", "ready") else 5):
        memory = buffer(limiter=SamplesPerInsert(1, tolerance=0, min_size=10, timeout=20))
        collector = make(kind, memory, total_frames=80)
        collector.start()
        while collector.is_running():
            check_rows(memory.sample(), 1.0)
        assert memory.write_count == 80
        with within(2):
            for _ in range(20):  # nobody is there to be in proportion to
                check_rows(memory.sample(), 1.0)
        assert memory._memory.ring.words[SAMPLED] <= 70 + 16  # nor are they counted
        collector.async_shutdown()
        memory.sample()


def test_a_sample_that_waits_is_let_go_by_shutdown():
    memory = buffer(limiter=SamplesPerInsert(1, tolerance=0, min_size=5000, timeout=50))
    hold = threading.Event()

    class Held(CountingEnv):
        def step(self, action):
            if self.episode == 9:
                hold.wait(30)
            return super().step(action)

    collector = make("single", memory, env=Held)
    collector.start()
    got = []
    learner = threading.Thread(target=lambda: got.append(memory.sample()))
    learner.start()
    until(lambda: memory.write_count)
    assert not got
    hold.set()
    collector.async_shutdown()
    learner.join(10)
    check_rows(got[0], 1.0)


def test_nothing_was_ever_written():
    """All is over and there is no row: that is an error still."""
    memory = buffer(limiter=SamplesPerInsert(1, timeout=20))
    collector = make("single", memory)
    collector.shutdown()
    with within(2), pytest.raises(Starved, match="empty"):
        memory.sample()


@pytest.mark.parametrize("kind", ["single", "async"])
def test_a_collector_that_failed_is_not_one_that_ended(kind):
    class Boom(CountingEnv):
        def step(self, action):
            if self.episode == 3:
                raise OverflowError("boom")
            return super().step(action)

    memory = buffer(limiter=SamplesPerInsert(1, tolerance=0, timeout=30))
    collector = make(kind, memory, env=Boom, total_frames=10_000)
    collector.start()
    with within(10), pytest.raises(WorkerRaised, match="boom") as caught:
        while collector.is_running():
            memory.sample()
    assert isinstance(caught.value.__cause__, OverflowError)
    with pytest.raises(WorkerRaised, match="boom"):
        for _ in range(1000):
            memory.sample()
    collector.shutdown()


def test_a_writer_in_another_thread_is_waited_for():
    memory = buffer(limiter=SamplesPerInsert(1, tolerance=0, min_size=10, timeout=10))
    late = threading.Timer(0.1, lambda: memory.extend(line(30)))
    late.start()
    assert len(memory.sample()) == 16
    late.join()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_ends_the_wait(kind):
    class Boom(CountingEnv):
        def step(self, action):
            if self.episode == 3:
                raise OverflowError("boom")
            return super().step(action)

    memory = buffer(limiter=SamplesPerInsert(1, tolerance=0, timeout=30))
    collector = make(kind, memory, env=Boom)
    collector.start()
    with within(10), pytest.raises(WorkerRaised, match="boom"):
        for _ in range(1000):
            memory.sample()
    collector.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resting_collector_answers(kind):
    memory = buffer(limiter=SamplesPerInsert(1, tolerance=0))
    collector = make(kind, memory)
    collector.start()
    until(lambda: not memory.may_write)
    with within(BOUND):
        for _ in range(5):
            collector.update_policy_weights_()
            collector.set_seed(1)
            with collector.pause():
                pass
        collector.async_shutdown()


def test_counts_are_kept_and_forgotten(tmp_path):
    memory = buffer(100, limiter=SamplesPerInsert(1, tolerance=20))
    memory.extend(line(40))
    memory.sample()
    memory.dumps(tmp_path)
    other = buffer(100, limiter=SamplesPerInsert(1, tolerance=20))
    other.loads(tmp_path)
    assert other.limiter.behind(other._memory.ring) == memory.limiter.behind(memory._memory.ring) == 39 - 16
    other.empty()
    assert other.may_write
    with pytest.raises(Starved, match="0 rows are written"):
        other.limiter.check(other._memory.ring)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SamplesPerInsert(0), "ratio"),
        (lambda: SamplesPerInsert("2"), "ratio"),
        (lambda: SamplesPerInsert(1, tolerance=-1), "tolerance"),
        (lambda: SamplesPerInsert(1, min_size=0), "min_size"),
        (lambda: SamplesPerInsert(1, timeout=0), "timeout"),
        (lambda: buffer(10, limiter=SamplesPerInsert(1, min_size=11)), "never fit"),
    ],
)
def test_wrong_numbers(call, message):
    with pytest.raises(UsageError, match=message):
        call()
    with pytest.raises(WrongArgument, match="SamplesPerInsert, got int"):
        buffer(limiter=3)
