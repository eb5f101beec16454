"""Ctrl-C at each moment of each verb, one after another: the world goes on without a hole, a repeat, a hang or a leak.

`make test` takes some of the moments, `make test-all` all of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reap._system.conversation import Answer, ChildSilent, Conversation
from reap._system.messages.framed import MessageSocket
from reap.buffers.storage.ring import HEAD
from reap.collectors import AsyncCollector, Collector, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, SamplesPerInsert
from reap.envs import ParallelEnv
from reap.envs.parallel.process_workers import ThreadedProcessWorkers
from reap.testing import CountingEnv, CountingWorld, assert_same, no_leaks
from tests.faults.interrupt_points import Moment
from tests.worlds.background import KINDS as IN_BACKGROUND
from tests.worlds.background import buffer, check_end, make
from tests.worlds.buffers import line
from tests.worlds.faults import HERE, KINDS, LANES, all_gone, collect, healthy, pids, whole
from tests.worlds.waiting import until

pytestmark = pytest.mark.timeout(120)
WORKERS = {"sync": KINDS[0], "async": KINDS[1], "one": AsyncCollector}
ALL = [pytest.mark.slow, pytest.mark.timeout(900)]


def some(every, **quick):
    """Parameters: of these names every moment for `make test-all`, every so manyth for those in `quick`."""
    return list(quick.items()) + [pytest.param(name, 1, marks=ALL) for name in every]


def moments(step, act, after):
    """Call `act` with Ctrl-C at every `step`th moment, until it has no such moment; then `after` with what it gave."""
    at, usual = 1, signal.getsignal(signal.SIGINT)
    while True:
        got = None
        with Moment(at) as moment:
            try:
                got = act()
            except KeyboardInterrupt:
                pass
            else:
                assert not moment.came or moment.no_moment, f"one was swallowed at {moment.where}"
        assert not moment.swallowed, f"a finalizer swallowed one at {moment.where}: {moment.swallowed}"
        assert signal.getsignal(signal.SIGINT) is usual, f"Ctrl-C is kept for ever, after one at {moment.where}"
        try:
            after(got)
        except BaseException as error:
            raise AssertionError(f"after Ctrl-C at moment {at}: {moment.where}: {error}") from error
        if not moment.came:
            assert at > step, "no moment was tried"
            return
        at += step


# ---- in the background ----------------------------------------------------------------------------------------------


class Slow(CountingEnv):
    """Leaves time for others on the machine."""

    def step(self, action):
        time.sleep(0.0003)
        return super().step(action)


def in_a_block(collector):
    with collector.pause():
        pass


def by_hand(collector):
    collector.pause()
    try:
        collector.resume()
    except KeyboardInterrupt:
        collector.resume()
        raise


VERBS = {
    "pause": in_a_block,
    "resume": by_hand,
    "state_dict": lambda collector: collector.state_dict(),
    "update_policy_weights_": lambda collector: collector.update_policy_weights_(),
    "stats": lambda collector: collector.stats(),
}


@pytest.mark.parametrize(
    ("verb", "kind", "step"),
    [
        ("pause", "async", 61),
        ("pause", "single", 11),
        ("state_dict", "single", 11),
        *(pytest.param(verb, kind, 1, marks=ALL) for verb in VERBS for kind in IN_BACKGROUND),
    ],
)
def test_the_background_goes_on(verb, kind, step):
    memory = buffer()
    collector = make(kind, memory, env=Slow)
    collector.start()
    memory.sample()

    def goes_on(_):
        count = memory.write_count
        until(lambda: memory.write_count > count, 10)  # by itself: nobody asks for anything

    moments(step, lambda: VERBS[verb](collector), goes_on)
    with collector.pause():
        check_end(memory)
    collector.async_shutdown()


# ---- a buffer without a collector -----------------------------------------------------------------------------------


def held_locks(fd):
    """The bytes of a file that any process has locked."""
    file = f":{os.fstat(fd).st_ino}"
    return [line.split()[6] for line in Path("/proc/locks").read_text().splitlines() if line.split()[5].endswith(file)]


BUFFER_VERBS = {
    "extend": lambda buffer: buffer.extend(line(4)),
    "sample": lambda buffer: buffer.sample(),
    "empty": lambda buffer: buffer.empty(),
    "read": lambda buffer: buffer[:2],
    "load": lambda buffer: buffer.load_state_dict(buffer.state_dict()),
}


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the kernel does not list file locks")
@pytest.mark.parametrize("verb", BUFFER_VERBS)
def test_a_buffer_stays_open_to_others(verb):
    """No lock stays taken, and no reserved rows stay unfinished, for which other writers would wait."""
    limiter = SamplesPerInsert(1, tolerance=1e9)
    sampler = SamplerWithoutReplacement()
    memory = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=2, limiter=limiter)
    ring = memory._memory.ring

    def goes_on(_):
        assert held_locks(ring.lock.fd) == []
        assert not ring._entries[:, 1].any(), "rows are reserved for ever"
        rows, last = memory.write_count, int(ring.words[HEAD])
        thread = threading.Thread(target=memory.extend, args=(line(6),), daemon=True)
        thread.start()  # of another thread, which the main one does not keep out
        thread.join(10)
        assert (memory.write_count, ring.window()[1]) == (rows + 6, last + 6)

    goes_on(None)
    moments(1, lambda: BUFFER_VERBS[verb](memory), goes_on)


# ---- batches --------------------------------------------------------------------------------------------------------


class Stream:
    """A collector on a world that can be predicted, and what its batches must be."""

    def __init__(self, kind):
        self.kind, self.seen = kind, {}
        if kind in HERE:
            self.collector = HERE[kind]()
        else:
            one = kind == "one"
            self.worlds = [CountingWorld([(3, 1, 5)], first_lane=w, worker=w, workers=2 - one) for w in (0, 1)]
            self.collector = collect(WORKERS[kind], healthy(0) if one else [healthy(0), healthy(1)])
        self.check(self.collector.next())

    def check(self, batch):
        if self.kind in HERE:
            whole(batch, self.seen)
        elif self.kind == "sync":
            for w in (0, 1):
                assert_same(batch[w], self.worlds[w].batch(4))
        else:
            assert_same(batch, self.worlds[batch.origin.worker].batch(8))

    def go_on(self, batch):
        if batch is not None:
            self.check(batch)
        self.check(self.collector.next())


EVERY = [*HERE, *WORKERS]


@pytest.mark.parametrize(("kind", "step"), some(EVERY, single=23, sync=23, threads=53, **{"async": 13}))
def test_batches_go_on(kind, step):
    with no_leaks():
        stream = Stream(kind)
        moments(step, stream.collector.next, stream.go_on)
        stream.collector.shutdown()
        stream.collector = None


def test_an_env_is_closed_after_a_batch_that_was_broken_off():
    envs = []

    def take():
        envs.append(CountingEnv((3, 1, 5)))
        collector = collect(Collector, envs[-1])
        try:
            with Moment(len(envs)) as moment:
                collector.next()
        except KeyboardInterrupt:
            pass
        collector.shutdown()
        assert envs[-1].closed, f"after Ctrl-C at moment {len(envs)}: {moment.where}"
        return moment.came

    while take():
        pass
    assert len(envs) > 100


@pytest.mark.parametrize(("kind", "step"), some(EVERY, sync=61))
@pytest.mark.parametrize("verb", ["state_dict", "update_policy_weights_"])
def test_what_is_asked_is_not_in_the_way_of_batches(kind, verb, step):
    with no_leaks():
        stream = Stream(kind)
        moments(step, lambda: getattr(stream.collector, verb)(), lambda _: stream.go_on(None))
        stream.collector.shutdown()
        stream.collector = None


def test_workers_of_this_process_give_the_generators_back():
    """Each worker that is in this process draws from generators of its own; the caller's are as they were."""
    with collect(MultiSyncCollector, [CountingEnv, CountingEnv], frames_per_batch=4, workers="inline") as collector:
        collector.next()
        torch.manual_seed(3)
        ours, threads = torch.get_rng_state(), torch.get_num_threads()

        def kept(_):
            assert torch.equal(torch.get_rng_state(), ours), "other random numbers"
            assert torch.get_num_threads() == threads

        moments(1, collector.next, kept)


def test_pipes_are_closed_by_whoever_closes_next():
    with no_leaks():
        at, came = 1, True
        while came:
            fds = list(os.pipe())
            with contextlib.suppress(KeyboardInterrupt), Moment(at) as moment:
                ThreadedProcessWorkers._close(fds)
            ThreadedProcessWorkers._close(fds)
            at, came = at + 1, moment.came


def test_half_a_message_is_kept():
    at, came = 1, True
    while came:
        (ours, theirs), (sentinel, _) = pairs = socket.socketpair(), socket.socketpair()
        talk = Conversation(SimpleNamespace(socket=MessageSocket(ours), sentinel=sentinel.fileno(), gone=lambda: False))
        messages = [pickle.dumps(Answer(call, f"answer {call}")) for call in (1, 2)]
        data = b"".join(len(one).to_bytes(4, "big") + one for one in messages)
        theirs.sendall(data[:20])
        with contextlib.suppress(KeyboardInterrupt, ChildSilent), Moment(at) as moment:
            talk.next(0.0)
        theirs.sendall(data[20:])
        assert talk.answer(2, 1.0) == "answer 2", moment.where
        at, came = at + 1, moment.came
        for one in (*pairs[0], *pairs[1]):
            one.close()
    assert at > 20


def test_half_a_message_is_sent_once():
    """Where the child reads more slowly than it is called, the rest of a call is sent while an answer is waited for."""
    at, came = 1, True
    while came:
        (ours, theirs), (sentinel, _) = pairs = socket.socketpair(), socket.socketpair()
        talk = Conversation(SimpleNamespace(socket=MessageSocket(ours), sentinel=sentinel.fileno(), gone=lambda: False))
        given = os.urandom(400_000)  # more than the socket takes at once
        talk.call("keep", given)
        read = theirs.recv(1 << 20)
        with contextlib.suppress(KeyboardInterrupt, ChildSilent), Moment(at) as moment:
            talk.next(0.0)
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError, ChildSilent):
            while True:
                talk.child.socket.flush()
                read += theirs.recv(1 << 20)
        assert int.from_bytes(read[:4], "big") == len(read) - 4, moment.where
        assert pickle.loads(read[4:]) == (1, "keep", (given,))
        at, came = at + 1, moment.came
        for one in (*pairs[0], *pairs[1]):
            one.close()
    assert at > 20


class Large(CountingEnv):
    """What it is in the middle of does not go into a socket at once."""

    def __init__(self, lengths, lane):
        super().__init__(lengths, lane)
        self.memory = np.zeros(1_000_000, np.uint8)


@pytest.mark.parametrize(("timeout", "step"), [(None, 97), (60.0, 97), pytest.param(None, 5, marks=ALL)])
def test_large_answers_nobody_waits_for_are_not_in_the_way(timeout, step):
    makers = [functools.partial(Large, one, lane) for lane, one in enumerate(LANES)]
    with no_leaks():
        collector = collect(Collector, ParallelEnv(3, makers, timeout=timeout), frames_per_batch=24)
        seen = {}
        moments(step, collector.state_dict, lambda _: whole(collector.next(), seen))
        assert collector.state_dict()["resume"] is not None
        collector.shutdown()
        collector = None


@pytest.mark.parametrize(("kind", "step"), some(EVERY, single=5, **{"async": 151}))
def test_a_shutdown_that_was_broken_off_is_finished_by_the_next(kind, step):
    with no_leaks():
        streams, workers = [Stream(kind)], []

        def ended(_):
            streams.pop().collector.shutdown()
            assert all_gone(workers, 0)
            streams.append(Stream(kind))

        def shut_down():
            workers[:] = pids(streams[0].collector) if kind in WORKERS else []
            streams[0].collector.shutdown()

        moments(step, shut_down, ended)
        streams.pop().collector.shutdown()


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=ALL)])
def test_locks_of_shared_statistics_are_not_kept(step):
    """TorchRL's VecNorm has a lock, which several processes may share: one that is kept stops them all."""
    envs = pytest.importorskip("torchrl.envs")
    normalize = envs.VecNormV2(in_keys=["observation"])
    lanes = envs.SerialEnv(2, lambda: envs.GymEnv("CartPole-v1"))
    collector = Collector(envs.TransformedEnv(lanes, normalize), frames_per_batch=20)
    for _ in range(3):
        collector.next()

    def goes_on(_):
        assert normalize.lock.acquire(block=False)
        normalize.lock.release()

    moments(step, collector.next, goes_on)
    collector.shutdown()
