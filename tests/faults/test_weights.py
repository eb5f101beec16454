"""Weights are never torn: no reader ever sees half of one version and half of another, and the stamp is the truth."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from multiprocessing.connection import wait

import cloudpickle
import pytest
import torch
from torch import nn

from reap._system.processes import Child, end
from reap.core.shared_slots import SharedFile
from reap.testing import CountingEnv
from reap.weights.shared import Packing, SharedWeights
from tests.worlds.faults import KINDS, collect, freeze, healthy, pids
from tests.worlds.waiting import comes_true, until


class Telltale(nn.Module):
    """All its tensors hold the version; its action is the least value among them, `most` the greatest."""

    def __init__(self, tensors, size):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(tensors)])
        self.register_buffer("stamp", torch.zeros(3, dtype=torch.int64))

    def become(self, version):
        with torch.no_grad():
            for part in self.parts:
                part.fill_(version)
            self.stamp.fill_(version)

    def forward(self, observation):
        least, most = torch.cat([*self.parts, self.stamp.float()]).aminmax()
        return torch.stack([least, most]).expand(*observation.shape[:-1], 2)


class TwoActions(CountingEnv):
    import gymnasium as gym
    import numpy as np

    action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def passes(kind, tensors, size, forward_passes, frames=100):
    """Publish as fast as it goes, from this thread between batches and from another all the time."""
    policy = Telltale(tensors, size)
    c = collect(kind, [lambda: TwoActions((50,), 0)] * 2, policy, frames_per_batch=frames, track_policy_version=True)
    over, lock, written = threading.Event(), threading.Lock(), [0]

    def publish():
        with lock:
            written[0] += 1
            policy.become(written[0])
            c.update_policy_weights_()
            assert c.policy_version == written[0]

    def hammer():
        while not over.is_set():
            publish()

    thread = threading.Thread(target=hammer)
    thread.start()
    seen, done = set(), 0
    try:
        while done < forward_passes or len(seen) < 4:  # whoever publishes has to come to it
            batch = c.next()
            done += batch.numel()
            least, most = batch["action"][..., 0], batch["action"][..., 1]
            assert torch.equal(least, most), "torn"
            assert torch.equal(least.long(), batch["policy_version"]), "the stamp is not what acted"
            seen |= set(batch["policy_version"].unique().tolist())
            if kind is KINDS[0]:
                assert len(batch["policy_version"].unique()) == 1
    finally:
        over.set()
        thread.join()
        c.shutdown()
    return len(seen), written[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tensors", "size"), [(40, 7), (6, 300_000)])
def test_never_torn(kind, tensors, size):
    passes(kind, tensors, size, 4_000 if size < 100 else 400, frames=100 if size < 100 else 4)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_forward_passes(kind):
    """Together more than a million, the large policy included."""
    passes(kind, 12, 5, 500_000, frames=200)
    passes(kind, 6, 300_000, 4_000, frames=4)


# ---- the block itself, without a collector ------------------------------------------------------------------------

SIZES = {"small": (5, 11), "several MB": (8, 400_000)}


def tensors_of(shape):
    count, size = shape
    return [torch.zeros(size) for _ in range(count)]


def packing_of(shape):
    return Packing.of({str(n): tensor for n, tensor in enumerate(tensors_of(shape))})


def write_for_ever(connection, fds, shape):
    """A writer without a pause between two versions."""
    file = SharedFile(fd=fds[0])
    weights, version = SharedWeights(file, packing_of(shape)), 0
    connection.send_bytes(b"ready")
    values = tensors_of(shape)
    while not connection.poll():
        version += 1
        for value in values:
            value.fill_(version % 1000)
        weights.publish({str(n): value for n, value in enumerate(values)}, version)


@contextlib.contextmanager
def writer(shape):
    file = SharedFile()
    child = Child(cloudpickle.dumps(functools.partial(write_for_ever, shape=shape)), fds=[file.fd], name="writer")
    try:
        wait([child.socket])
        assert child.socket.receive()
        yield file
    finally:
        child.socket.close()
        child.signal(15)
        end([child], patience=1, deadline=2)
        file.close()


def read(file, shape, reads, least=0):
    """So many reads, of which at least so many were overtaken on the way."""
    weights, mine, last, overtaken, fresh = SharedWeights(file, packing_of(shape)), tensors_of(shape), 0, 0, 0
    plain = weights._read

    def counted(tensors):
        nonlocal overtaken
        version = plain(tensors)
        overtaken += version is None
        return version

    weights._read = counted
    while fresh < reads or overtaken < least:
        version = weights.refresh(mine)
        if version is None:
            continue
        fresh += 1
        assert version > last, "time runs backwards"
        last = version
        for tensor in mine:
            lowest, highest = tensor.aminmax()
            assert lowest == highest == version % 1000, f"torn: {lowest} to {highest} in version {version}"


@pytest.mark.parametrize("size", SIZES)
def test_a_writer_that_never_rests(size):
    with writer(SIZES[size]) as file:
        read(file, SIZES[size], 1000 if size == "small" else 20)


def test_a_reader_that_is_always_overtaken(monkeypatch):
    """One that dawdles in every read: without the lock it would never finish."""
    shape = SIZES["small"]
    copy = torch._foreach_copy_

    def slowly(into, source):
        for a, b in zip(into, source):
            copy([a], [b])
            time.sleep(0.002)

    with writer(shape) as file:
        monkeypatch.setattr(torch, "_foreach_copy_", slowly)
        read(file, shape, 30, least=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES)
def test_a_writer_that_never_rests_for_long(size):
    with writer(SIZES[size]) as file:
        read(file, SIZES[size], 100_000 if size == "small" else 2_000)


def test_a_writer_that_dies_in_the_middle_leaves_no_lock():
    shape = SIZES["several MB"]
    for _ in range(5):
        file = SharedFile()
        target = cloudpickle.dumps(functools.partial(write_for_ever, shape=shape))
        child = Child(target, fds=[file.fd], name="writer")
        wait([child.socket])
        assert child.socket.receive()
        read(file, shape, 1)  # something is there, and it goes on writing
        child.signal(9)
        assert child.gone(2)
        read(file, shape, 1)
        child.release()
        file.close()


class SaysSo(TwoActions):
    """Leaves a note in its third step: from here on it acts with the weights it has."""

    def __init__(self, note):
        super().__init__((50,), 0)
        self.note, self.left = note, 3

    def step(self, action):
        self.left -= 1
        if not self.left:
            self.note.touch()
        return super().step(action)


@pytest.mark.parametrize("options", [{}, {"update_at_each_batch": True}], ids=["asked for", "at each batch"])
def test_a_batch_that_was_broken_off_is_finished_with_its_own_weights(tmp_path, options):
    """One worker has begun and the other has not when Ctrl-C comes; then weights are published."""
    note, policy = tmp_path / "begun", Telltale(2, 3)
    makers = [lambda: SaysSo(note), lambda: TwoActions((50,), 1)]
    with collect(KINDS[0], makers, policy, track_policy_version=True, **options) as c:
        waiting = pids(c)[1]
        freeze(waiting)

        def interrupt():
            until(note.exists)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            c.next()
        thread.join()
        before = c.policy_version

        def go_on():
            comes_true(lambda: c._backend.version != before, 0.3)  # nothing is to happen in this time
            os.kill(waiting, signal.SIGCONT)

        thread = threading.Thread(target=go_on)
        thread.start()
        policy.become(7)
        if not options:
            c.update_policy_weights_()
        batch = c.next()
        thread.join()
        assert batch["policy_version"].unique().tolist() == [before]
        assert batch["action"].unique().tolist() == [0]


def break_off_update(c, weights):
    """Update the weights, with Ctrl-C while worker 1 is frozen and has not answered."""
    worker = c._backend.workers[1]
    freeze(worker.child.pid)

    def interrupt():
        until(lambda: worker.pending_call is not None)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        c.update_policy_weights_(dict.fromkeys((0, 1), weights))
    thread.join()


def test_an_update_that_was_broken_off_is_loaded_before_the_next_is_written():
    """Both lie in the same memory, and the worker is told how long the first one is."""
    with collect(KINDS[1], [healthy(), healthy(1)]) as c:
        c.next()
        calls = c._backend.supervisor.calls + 1
        break_off_update(c, {"weight": torch.tensor(2.0)})

        def go_on():
            comes_true(lambda: c._backend.supervisor.calls > calls, 0.3)  # nothing is to happen in this time
            os.kill(pids(c)[1], signal.SIGCONT)

        thread = threading.Thread(target=go_on)
        thread.start()
        last = {"weight": torch.tensor(3.0), "mix": torch.ones(3)}
        c.update_policy_weights_(dict.fromkeys((0, 1), last))
        thread.join()
        for worker in (0, 1):
            assert c.get_cached_weights(worker=worker)["weight"] == 3


def test_weights_of_an_update_that_was_broken_off_have_a_version_of_their_own():
    with collect(KINDS[1], [healthy(), healthy(1)]) as c:
        c.next()
        break_off_update(c, {"weight": torch.tensor(2.0)})
        origin = c.next().origin
        while not origin.version:
            origin = c.next().origin
        assert (origin.worker, origin.lag) == (0, 0)
        os.kill(pids(c)[1], signal.SIGCONT)
        c.update_policy_weights_({w: {"weight": torch.tensor(3.0)} for w in (0, 1)})
        assert c.policy_version > origin.version
