"""The ring against a model in plain Python: writers interleave, wrap, fail and die between reserve and commit."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.ring import BEGINS, FRONTIER, HEAD, HOLE
from tests import example_count
from tests.buffers.child_messages import hear, tell


class Model:
    """What the ring should say: a list of positions, each with a state."""

    def __init__(self, capacity):
        self.capacity, self.rows, self.base = capacity, [], 0

    def window(self):
        low = max(self.base, len(self.rows) - self.capacity)
        high = next((p for p, state in enumerate(self.rows) if state == "writing"), len(self.rows))
        return low, max(low, high)

    def live(self):
        low, high = self.window()
        return [p for p in range(low, high) if self.rows[p] == "good"]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(1, 9)),
        st.tuples(st.just("commit"), st.integers(0, 5)),
        st.tuples(st.just("abandon"), st.integers(0, 5)),
        st.tuples(st.just("die"), st.integers(0, 5)),
        st.tuples(st.just("empty"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=example_count(150), deadline=None)
@given(steps, st.integers(3, 20))
def test_against_the_model(steps, capacity):
    memory, model = BufferFiles(capacity), Model(capacity)
    ring, open_ = memory.ring, []
    for verb, n in steps:
        if verb == "reserve":
            end = len(model.rows) + n
            if any(first < end - capacity // 2 for first, _, _ in open_):
                continue  # it would wait for that writer
            first, entry = ring.reserve(n)
            assert first == len(model.rows)
            open_.append((first, n, entry))
            model.rows += ["writing"] * n
        elif verb == "empty":
            ring.empty()
            model.base = -(-len(model.rows) // capacity) * capacity
            model.rows += ["gone"] * (model.base - len(model.rows))
        elif open_:
            first, n, entry = open_.pop(n % len(open_))
            if verb == "commit":
                ring.mark(max(first, first + n - capacity), np.full(min(n, capacity), BEGINS, np.uint8))
                ring.commit(entry)
            elif verb == "abandon":
                ring.abandon(entry)
            else:
                with ring.lock.locked():
                    ring.lock.release(entry)  # what the kernel does for a process that dies
                for _ in range(2):
                    ring.window()  # the second look at a frontier that does not move
            model.rows[first : first + n] = ["good" if verb == "commit" else "hole"] * n
        low, high = ring.window()
        assert (low, high) == model.window()
        marks = ring.marks_of(low, high)
        assert [low + i for i, mark in enumerate(marks) if mark != HOLE] == model.live()
        assert len(ring) == len(model.live())
        starts, lengths = memory.runs.table()
        assert [p for s, k in zip(starts, lengths) for p in range(s, s + k)] == model.live()


def test_a_dead_writer_makes_room_for_the_next():
    ring = BufferFiles(10).ring
    _first, entry = ring.reserve(6)
    with ring.lock.locked():
        ring.lock.release(entry)
    assert ring.reserve(10)[0] == 6  # all of the ring: what the dead one had is taken
    assert ring.window() == (6, 6)


def test_a_slow_writer_leaves_half_the_ring_to_readers():
    ring = BufferFiles(100).ring
    for _ in range(10):
        ring.commit(ring.reserve(10)[1])
    _, slow = ring.reserve(10)
    fast = threading.Thread(target=lambda: [ring.commit(ring.reserve(10)[1]) for _ in range(20)])
    fast.start()
    while ring.words[HEAD] < 150:  # as far as it gets
        pass
    assert len(ring) == 50
    ring.commit(slow)
    fast.join()
    assert (len(ring), ring.words[HEAD]) == (100, 310)


def test_died_between_its_two_words():
    ring = BufferFiles(10).ring
    ring._entries[5] = 0, 4  # the entry is there, the head has not moved
    first, entry = ring.reserve(2)
    assert first == 4
    ring.mark(first, np.full(2, BEGINS, np.uint8))
    ring.commit(entry)
    assert [ring.window() for _ in range(2)][1] == (0, 6)
    assert len(ring) == 2


def test_the_gate_stays_shut_until_the_outermost_leaves():
    import cloudpickle

    from reap._system.processes import Child, end

    ring = BufferFiles(10).ring

    def target(connection, fds):
        import fcntl

        for _ in range(2):
            try:
                fcntl.lockf(fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError:
                connection.send("shut")
            else:
                connection.send("open")
            connection.recv()

    with ring.lock.locked():
        with ring.lock.locked():
            pass
        child = Child(cloudpickle.dumps(target), fds=[ring.lock.fd])
        assert hear(child) == "shut"
    tell(child, None)
    assert hear(child) == "open"
    tell(child, None)
    end([child], patience=5, deadline=10)


def test_a_lap_between_two_looks_leaves_no_empty_window():
    """A reader looks at the frontier, sleeps, and finds the head a lap further: rows are there nevertheless."""
    ring = BufferFiles(10).ring

    def write(count):
        for _ in range(count):
            ring.commit(ring.reserve(1)[1])

    class Slow:
        def __init__(self, words, laps):
            self.words, self.laps = words, laps

        def __getitem__(self, word):
            value = self.words[word]
            if word == FRONTIER and self.laps:
                self.laps -= 1
                write(11)
            return value

    write(3)
    ring._ints = Slow(ring._ints, 3)
    assert ring.window() == (26, 36)


def test_rows_that_fill_the_whole_ring_leave_nothing_to_read_while_they_are_written():
    ring = BufferFiles(10).ring
    ring.commit(ring.reserve(3)[1])
    _, entry = ring.reserve(12)
    assert ring.window() == (5, 5)
    ring.commit(entry)
    assert ring.window() == (5, 15)


def test_a_lap_between_two_looks_at_the_runs_is_no_empty_buffer():
    """A reader of slices looks at the window, sleeps, and finds all of it written over: it looks again, alone."""
    from reap.data import LazyTensorStorage, ReplayBuffer, SliceSampler
    from tests.worlds.buffers import line

    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2), batch_size=4)
    buffer.extend(line(10))
    ring, honest, laps = buffer._memory.ring, buffer._memory.ring.marks_of, [1]

    def slow(low, high):
        marks = honest(low, high).copy()
        if laps[0]:
            laps[0] -= 1
            for _ in range(12):
                buffer.extend(line(1))
        return marks

    ring.marks_of = slow
    assert buffer.sample()["step"].tolist() == [0] * 4
    assert not laps[0]
