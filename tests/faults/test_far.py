"""Workers over torch.distributed: every fault is named soon, everything is closed, strangers are refused."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time

import pytest
import torch
from torch.distributed import TCPStore

from reap.backends.seal import Forged, Seal
from reap.collectors.distributed import DistributedCollector, DistributedSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import UsageError, WorkerDied, WorkerRaised, WorkerSilent
from reap.testing import CountingWorld, EchoPolicy, assert_same, no_leaks
from tests.faults.worlds import BOUND, SOON, all_gone, collect, faulty, healthy, pids, within

pytestmark = pytest.mark.timeout(60)
KINDS = [DistributedSyncCollector, DistributedCollector]
TOLD = {
    "raise": (WorkerRaised, "an injected fault"),
    "exit": (WorkerDied, "exited with code 3"),
    "kill": (WorkerDied, "killed by SIGKILL"),
    "hang": (WorkerSilent, r"sent nothing for[\s\S]*faults.py.*in inject"),
}


@pytest.fixture(scope="module", autouse=True)
def a_first_store():
    """Torch keeps a pipe of the first one for the rest of the process."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("fault", TOLD)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_step(kind, fault):
    error, words = TOLD[fault]
    with no_leaks():
        c = collect(kind, [healthy(), faulty(fault, 21)], **({"timeout": 0.5} if error is WorkerSilent else {}))
        workers = pids(c)
        began = last = time.monotonic()
        with pytest.raises(error, match=words) as caught:
            while time.monotonic() - began < 20:
                last = time.monotonic()
                c.next()
        assert time.monotonic() - last < SOON + BOUND
        assert caught.value.worker == f"1 (pid {workers[1]})"
        assert c.closed
        assert all_gone(workers, within=BOUND)
        del c, caught


@pytest.mark.parametrize("fault", ["raise", "exit"])
def test_while_it_is_built(fault):
    with no_leaks(), within(20), pytest.raises(TOLD[fault][0], match=TOLD[fault][1]):
        collect(KINDS[0], [healthy(), faulty(fault, 0, "reset")])


@pytest.mark.parametrize("kind", KINDS)
def test_killed_from_outside(kind):
    """Also an update finds out."""
    with no_leaks():
        c = collect(kind, [healthy(), healthy(1)])
        c.next()
        os.kill(pids(c)[1], signal.SIGKILL)
        with within(SOON + BOUND), pytest.raises(WorkerDied, match="worker 1 .*SIGKILL"):
            while True:
                c.update_policy_weights_()
                c.next()
        c.shutdown()
        del c


def test_shutdown_in_the_middle_of_a_step():
    with no_leaks():
        c = collect(DistributedCollector, [faulty("hang", 2), healthy()])
        c.next()
        workers = pids(c)
        with within(BOUND + 1):
            c.shutdown()
        assert all_gone(workers, within=1)
        del c


def test_two_workers_in_step():
    """Both workers' lanes, in order, bit for bit; ids of their own."""
    world = CountingWorld([(3, 1, 5)] * 2)
    with no_leaks():
        c = DistributedSyncCollector(
            [healthy(0), healthy(1)], EchoPolicy(), frames_per_batch=16, total_frames=16 * 20, track_traj_ids=False
        )
        for batch in c:
            want = {key: value for key, value in world.batch(8).items() if key != ("collector", "traj_ids")}
            assert_same(batch, want)
        c.shutdown()
        del c, batch


def test_random_frames_and_updates_after_each_batch():
    policy = EchoPolicy()
    c = DistributedSyncCollector(
        [healthy()] * 2,
        policy,
        frames_per_batch=8,
        total_frames=40,
        track_policy_version=True,
        init_random_frames=8,
        update_after_each_batch=True,
    )
    versions = [batch["policy_version"].unique().tolist() for batch in c]
    c.shutdown()
    assert versions == [[0], [1], [2], [3], [4]]


def test_weights_for_one_worker():
    c = DistributedSyncCollector([healthy()] * 2, EchoPolicy(), frames_per_batch=8, track_policy_version=True)
    c.update_policy_weights_({1: {"weight": torch.tensor(3.0), "mix": torch.tensor([3.0, 5.0, 7.0])}})
    batch = c.next()
    c.shutdown()
    echo = (batch["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True)
    assert torch.equal(batch["action"], echo * torch.tensor([1.0, 3.0]).reshape(2, 1, 1))


def test_into_a_replay_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=16)
    c = DistributedCollector([healthy()] * 2, EchoPolicy(), frames_per_batch=8, total_frames=80, replay_buffer=buffer)
    assert list(c) == [None] * 10
    c.shutdown()
    assert len(buffer) == 80


def test_strangers_are_refused(caplog):
    """What is put into the store by somebody without the secret is refused, and never read."""
    seal = Seal(b"ours")
    with caplog.at_level(logging.WARNING, "reap"), pytest.raises(Forged):
        seal.open(Seal(b"theirs").close(pickle.dumps("hello"), "to/0/0"), "to/0/0")
    assert "not written by a peer" in caplog.text
    with pytest.raises(Forged):
        seal.open(seal.close(b"go", "to/0/0"), "to/0/1")
    c = DistributedCollector([healthy()], EchoPolicy(), frames_per_batch=8)
    remote, address = c._process.workers[0], c._process._address
    assert address.host == "127.0.0.1"
    store = TCPStore("127.0.0.1", address.port, is_master=False, wait_for_workers=False)
    store.set(f"to/0/{remote.told}", b"x" * 100)
    with pytest.raises(WorkerDied):
        for _ in range(20):
            c.next()
    c.shutdown()


def test_wrong_arguments():
    for wrong, words in (
        ({"launcher": "sp"}, "launcher"),
        ({"backend": "nccl"}, "backend"),
        ({"tcp_port": "x"}, "tcp_port"),
        ({"max_weight_update_interval": 0}, "max_weight_update_interval"),
        ({"update_after_each_batch": True, "max_weight_update_interval": 3}, "update_after_each_batch"),
        ({"collector_kwargs": {"frames_per_batch": 3}}, "collector_kwargs"),
        ({"num_workers_per_collector": 2}, "num_workers_per_collector"),
        ({"preemptive_threshold": 0.5, "sync": True}, "preemptive_threshold"),
    ):
        with no_leaks(), pytest.raises(UsageError, match=words):
            DistributedCollector([healthy()], EchoPolicy(), frames_per_batch=8, **wrong)
