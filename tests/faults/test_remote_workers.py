"""Workers over torch.distributed and RPC: every fault is named soon, everything is closed, strangers are refused."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from reap._system.processes import Child
from reap.backends.network.launchers import NodeSettings
from reap.backends.network.node_registry import NodeProcess
from reap.backends.network.signed_messages import Forged, MessageSigner
from reap.backends.remote.gloo import GlooConnection, GlooTransport
from reap.backends.remote.gloo_worker import HERE
from reap.backends.remote.message_transport import BroadcastWeights, MessageConnection, PublicationCount
from reap.backends.remote.rpc_worker import below
from reap.backends.supervisor import Supervisor
from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RPCAsyncCollector,
    RPCCollector,
    RPCSyncCollector,
)
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import NotReady, UsageError, WorkerDied, WorkerRaised, WorkerSilent
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same, no_leaks
from reap.weight_update import WeightSyncScheme
from reap.weights.shared import Packing
from tests.worlds.faults import (
    BOUND,
    SOON,
    all_gone,
    check_what_is_left_out,
    collect,
    faulty,
    gated,
    healthy,
    pids,
    within,
)

KINDS = [DistributedSyncCollector, DistributedCollector]
ALL = [*KINDS, RPCSyncCollector, RPCAsyncCollector]
EXPECTED = {
    "raise": (WorkerRaised, "an injected fault"),
    "exit": (WorkerDied, "exited with code 3"),
    "kill": (WorkerDied, "killed by SIGKILL"),
    "hang": (WorkerSilent, r"sent nothing for[\s\S]*faults.py.*in inject"),
}


@pytest.fixture(scope="module", autouse=True)
def a_first_of_each():
    """Torch keeps a pipe of the first store, and descriptors of the first agent, for the rest of the process."""
    for kind in (DistributedCollector, RPCCollector):
        c = collect(kind, [healthy(), healthy(1)])
        c.next()
        c.shutdown()


@pytest.mark.parametrize("fault", [*EXPECTED][:3] + [pytest.param("hang", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ALL)
def test_in_a_step(kind, fault):
    error, words = EXPECTED[fault]
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


class Large(CountingEnv):
    """Its rollouts take longer to send than to collect."""

    observation_space = gym.spaces.Box(0, 255, (3_000_000,), np.uint8)

    def _observation(self):
        return np.zeros(3_000_000, np.uint8)


@pytest.mark.parametrize("kind", ALL)
def test_killed_while_it_sends(kind):
    """Gloo never ends a wait for what had arrived in part."""
    for after in (0.1, 0.113, 0.129):
        with no_leaks():
            c = kind([Large] * 2, frames_per_batch=8, total_frames=-1)
            c.next()
            killer = threading.Timer(after, os.kill, (pids(c)[1], signal.SIGKILL))
            with within(SOON + BOUND), pytest.raises(WorkerDied, match="SIGKILL"):
                killer.start()
                while True:
                    c.next()
            killer.join()
            assert c.closed
            del c


@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_waits_no_longer_than_it_may(kind, tmp_path):
    """Also for a batch that is being taken. Afterwards it goes on as if nobody had asked."""
    gate, memory = tmp_path / "gate", ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    with collect(kind, [gated(gate)], replay_buffer=memory) as c:
        c.start()
        memory.sample()
        with within(SOON), pytest.raises(NotReady, match="after 0.2 s"):
            c.pause(timeout=0.2)
        gate.touch()
        with c.pause(timeout=60):
            count = memory.write_count
            assert count == c.stats()["frames"]
        while memory.write_count == count:
            memory.sample()


def test_what_was_left_of_a_timeout_is_told_rounded():
    supervisor = Supervisor(SimpleNamespace(wait=lambda seconds: []))
    supervisor.workers = [SimpleNamespace(index=0, pending_slots={0: False}, dropped=False, busy=False)]
    with pytest.raises(NotReady, match="still busy after 0 s"):
        supervisor.drain(0.000093)


def test_a_group_for_weights_that_cannot_be_joined():
    """Gloo's own error is told as that of a worker."""

    def group(*_):
        raise RuntimeError("Connection reset by peer")

    transport = GlooTransport(nodes=NodeSettings("join"))
    transport._workers, transport._address = [], SimpleNamespace(group=group)
    with pytest.raises(WorkerDied, match="weights could not be sent: Connection reset"):
        transport.join_weights()


def test_who_has_died_is_looked_for_in_a_second_however_many_live():
    """And named at once, if it is known."""
    pipes = [os.pipe() for _ in range(4)]
    living = [SimpleNamespace(gone=lambda: False, sentinel=sentinel) for sentinel, _ in pipes]
    gone = SimpleNamespace(gone=lambda: True, sentinel=pipes[3][0], death=lambda: WorkerDied("was killed"))
    transport = GlooTransport(nodes=NodeSettings("join"))
    transport._workers = [SimpleNamespace(index=index, child=gone, name="3") for index in range(4)]
    transport._children = dict(enumerate(living))
    with within(2.0):
        assert "no route" in str(transport._send_failure(RuntimeError("no route")))
    transport._children[3] = gone
    os.close(pipes[3][1])  # its end
    with within(0.9):
        assert "was killed" in str(transport._send_failure(RuntimeError("no route")))
    for fd in (fd for pipe in pipes for fd in pipe if fd != pipes[3][1]):
        os.close(fd)


def test_weights_that_were_not_sent_are_not_waited_for():
    """Orders ask for those that were sent, and each message has a number of its own."""
    sent, numbers = PublicationCount(), []

    def broadcast(packed):
        numbers.append(int(packed[:8].view(torch.int64)))
        if len(numbers) == 2:
            raise MemoryError

    transport = SimpleNamespace(sent=sent, wait_for_room=lambda: None, broadcast=broadcast)
    named = {"weight": torch.ones(3)}
    weights = BroadcastWeights(Packing.of(named), list(named), transport)
    weights.publish(named, 1)
    with pytest.raises(MemoryError):
        weights.publish(named, 2)
    assert sent.count == 1
    weights.publish(named, 3)
    assert numbers == [1, 2, 3]
    assert sent.count == 3


def test_threads_of_a_worker_are_waited_for_when_it_has_ended():
    """Before that they may be waiting for it."""
    done = []

    class Process:
        silent = False

        def signal(self, number):
            done.append(number)

        def gone(self, timeout=0.0):
            return signal.SIGKILL in done

        def release(self):
            done.append("ended")

    worker = SimpleNamespace(index=0, slots={})
    worker.connection = MessageConnection(worker, PublicationCount())
    worker.connection.join_threads = lambda: done.append("threads")
    transport = GlooTransport(nodes=NodeSettings("mp"))
    transport._children[0] = Process()
    transport.retire(worker)
    assert done == [signal.SIGKILL, "ended", "threads"]


class LostGroup:
    """A group whose other side is gone: whoever receives from it waits until somebody cuts it off."""

    def __init__(self):
        self.cut = threading.Event()

    def recv(self, tensors, peer, tag):
        if tag:
            self.cut.set()

        def wait(timeout):
            assert self.cut.wait(SOON), "nobody has cut it off"
            raise RuntimeError("cut off")

        return SimpleNamespace(wait=wait)


def test_a_node_that_is_lost_while_its_group_is_joined():
    group, process = LostGroup(), NodeProcess(0, 1, lambda process: None)

    def joined(*_):
        process.ended("is out of reach", "", lost=True)
        return group

    store = SimpleNamespace(get=lambda key: HERE)
    address = SimpleNamespace(secret=b"", store=lambda: store, group=joined)
    worker = SimpleNamespace(index=0, restarts=0, slots={})
    orders, wakeup = SimpleNamespace(put=None, give_up=lambda name: None), SimpleNamespace(wake=lambda: None)
    connection = GlooConnection(worker, PublicationCount(), process, address, orders, wakeup)
    connection.join_threads()
    assert group.cut.is_set()
    process.release()


class Word(str):
    """Can be read only in the process that wrote it, as an object of a class that others do not have."""

    def __reduce__(self):
        return _read_at_home, (os.getpid(), str(self))


def _read_at_home(pid, text):
    if os.getpid() != pid:
        raise ModuleNotFoundError(f"no module for {text!r} here")
    return Word(text)


class Says(CountingEnv):
    observation_space = gym.spaces.Dict(observation=CountingEnv.observation_space, text=gym.spaces.Text(9))

    def _observation(self):
        return {"observation": super()._observation(), "text": Word(f"step {self.t}")}


@pytest.mark.parametrize("kind", ALL)
def test_what_cannot_be_read_here_is_told(kind):
    with no_leaks():
        c = collect(kind, [lambda: Says((3, 1, 5), 0)])
        workers = pids(c)
        with pytest.raises(WorkerRaised, match="ModuleNotFoundError.*no module for 'step 0' here") as caught:
            c.next()
        assert caught.value.worker == f"0 (pid {workers[0]})"
        assert c.closed
        del c, caught


@pytest.mark.parametrize("fault", ["raise", "exit"])
@pytest.mark.parametrize("kind", [DistributedSyncCollector, RPCSyncCollector])
def test_while_it_is_built(kind, fault):
    with no_leaks(), within(20), pytest.raises(EXPECTED[fault][0], match=EXPECTED[fault][1]):
        collect(kind, [healthy(), faulty(fault, 0, "reset")])


@pytest.mark.parametrize("kind", ALL)
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


@pytest.mark.parametrize("kind", KINDS[:1] + [RPCSyncCollector])
def test_workers_that_have_gone_home_are_not_killed(kind, monkeypatch):
    """They have closed their envs and say so: nobody waits for them until time is up."""
    sent, send = [], Child.signal
    monkeypatch.setattr(Child, "signal", lambda child, number: (sent.append(number), send(child, number)))
    c = collect(kind, [healthy(), healthy(1)])
    c.next()
    c.shutdown()
    assert signal.SIGKILL not in sent


def test_closed_twice():
    c = collect(DistributedCollector, [healthy()])
    c.next()
    for _ in range(2):
        c._backend.close()
    c.shutdown()


@pytest.mark.parametrize("kind", [DistributedCollector, RPCCollector])
def test_shutdown_in_the_middle_of_a_step(kind):
    with no_leaks():
        c = collect(kind, [faulty("hang", 2), healthy()])
        c.next()
        workers = pids(c)
        with within(BOUND):
            c.shutdown()
        assert all_gone(workers, within=SOON)
        del c


@pytest.mark.parametrize("kind", [DistributedSyncCollector, RPCSyncCollector])
def test_two_workers_in_step(kind):
    """Both workers' lanes, in order, bit for bit; a policy may be larger than what a pipe holds."""
    world, policy = CountingWorld([(3, 1, 5)] * 2), EchoPolicy()
    policy.register_buffer("ballast", torch.zeros(2**20))
    with no_leaks():
        c = kind([healthy(0), healthy(1)], policy, frames_per_batch=16, total_frames=320, track_traj_ids=False)
        for batch in c:
            want = {key: value for key, value in world.batch(8).items() if key != ("collector", "traj_ids")}
            assert_same(batch, want)
        c.shutdown()
        del c, batch


@pytest.mark.parametrize("kind", [DistributedCollector, RPCCollector])
def test_ids_are_unique_among_workers(kind):
    c = kind([healthy(0), healthy(1)], EchoPolicy(), frames_per_batch=8)
    seen = {0: set(), 1: set()}
    while min(map(len, seen.values())) < 20:  # one of them may be much slower
        batch = c.next()
        seen[batch.origin.worker] |= set(batch["collector", "traj_ids"].tolist())
    c.shutdown()
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("backend", ["distributed", "rpc"])
def test_by_the_front_door(backend):
    for sync, kind in (
        (True, MultiSyncCollector),
        (False, {"distributed": DistributedCollector, "rpc": RPCCollector}[backend]),
    ):
        scheme = WeightSyncScheme.from_backend(backend)
        c = Collector(
            healthy(),
            EchoPolicy(),
            backend=backend,
            num_collectors=2,
            sync=sync,
            frames_per_batch=8,
            weight_sync_schemes={"policy": scheme},
            backend_options={"launcher": "mp"},
        )
        assert isinstance(c, kind)
        c.update_policy_weights_()
        assert c.next().numel() == 8
        assert c.policy_version == 1
        c.shutdown()
    with pytest.raises(UsageError, match="cannot send weights to these workers"):
        MultiSyncCollector([healthy()], EchoPolicy(), frames_per_batch=8, weight_sync_schemes={"policy": scheme})


def test_weights_go_down_a_tree():
    """Everybody is sent to once, nobody sends to more than two, and all of five act with them."""
    for workers in (1, 2, 5, 100):
        told = [below(index, workers) for index in range(-1, workers)]
        assert sorted(i for each in told for i in each) == list(range(workers))
        assert max(map(len, told)) <= 2
    c = RPCSyncCollector([healthy()] * 5, EchoPolicy(), frames_per_batch=5, track_policy_version=True)
    for version in range(4):
        assert (c.next()["policy_version"] == version).all()
        c.update_policy_weights_()
    c.shutdown()


def test_one_agent_at_a_time():
    c = RPCCollector([healthy()], EchoPolicy(), frames_per_batch=8)
    with pytest.raises(UsageError, match="already has an RPC agent"):
        RPCCollector([healthy()], EchoPolicy(), frames_per_batch=8)
    assert c.next().numel() == 8
    c.shutdown()


def test_random_frames_and_updates_after_each_batch():
    policy = EchoPolicy()
    c = DistributedSyncCollector(
        [healthy()] * 2,
        policy,
        frames_per_batch=8,
        total_frames=40,
        track_policy_version=True,
        init_random_frames=8,
        update_interval=1,
    )
    versions = [batch["policy_version"].unique().tolist() for batch in c]
    c.shutdown()
    assert versions == [[0], [1], [2], [3], [4]]


def test_random_frames_in_collector_kwargs():
    """A team that runs ahead is told of them too."""
    options = {"collector_class": "async", "collector_kwargs": {"init_random_frames": 16}}
    with collect(DistributedCollector, [healthy()], **options) as c:
        acted = [
            torch.equal(b["action"], (b["observation"] * EchoPolicy().mix).sum(-1, True)) for b, _ in zip(c, "1234")
        ]
    assert acted == [False, False, True, True]


def test_weights_for_one_worker():
    c = DistributedSyncCollector([healthy()] * 2, EchoPolicy(), frames_per_batch=8, track_policy_version=True)
    c.update_policy_weights_({1: {"weight": torch.tensor(3.0), "mix": torch.tensor([3.0, 5.0, 7.0])}})
    batch = c.next()
    c.shutdown()
    echo = (batch["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True)
    assert torch.equal(batch["action"], echo * torch.tensor([1.0, 3.0]).reshape(2, 1, 1))


@pytest.mark.parametrize("kind", [MultiSyncCollector, DistributedSyncCollector, RPCSyncCollector])
def test_what_an_update_leaves_out_stays_as_it_was(kind):
    check_what_is_left_out(kind)


def test_into_a_replay_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=16)
    c = DistributedCollector([healthy()] * 2, EchoPolicy(), frames_per_batch=8, total_frames=80, replay_buffer=buffer)
    assert list(c) == [None] * 10
    c.shutdown()
    assert len(buffer) == 80


def test_strangers_are_refused(caplog):
    """What is put into the store by somebody without the secret is refused, and never read."""
    signer = MessageSigner(b"ours")
    with caplog.at_level(logging.WARNING, "reap"), pytest.raises(Forged):
        signer.verified(MessageSigner(b"theirs").sign(pickle.dumps("hello"), "to/0/0"), "to/0/0")
    assert "their signature is wrong" in caplog.text
    with pytest.raises(Forged):
        signer.verified(signer.sign(b"go", "to/0/0"), "to/0/1")
    c = DistributedCollector([healthy()], EchoPolicy(), frames_per_batch=8)
    remote, address = c._backend.workers[0], c._backend.transport._address
    assert address.host == "127.0.0.1"
    store = TCPStore("127.0.0.1", address.port, is_master=False, wait_for_workers=False)
    store.set(f"to/0.0/{remote.connection.orders_sent}", b"x" * 100)
    assert all_gone(pids(c), within=BOUND)  # first: an order of ours would take the place of what was put there
    with pytest.raises(WorkerDied):
        c.next()
    c.shutdown()


def test_wrong_arguments():
    for wrong, words in (
        ({"max_weight_update_interval": 0}, "max_weight_update_interval"),
        ({"update_after_each_batch": True, "max_weight_update_interval": 3}, "update_after_each_batch"),
        ({"collector_kwargs": 3}, "collector_kwargs"),
        ({"num_workers_per_collector": 2}, "num_workers_per_collector"),
        ({"preemptive_threshold": 0.5, "sync": True}, "preemptive_threshold"),
        ({"max_weight_update_interval": "3"}, "max_weight_update_interval must be a whole number, got '3'"),
        ({"collector_class": [1]}, "collector_class"),
        ({"init_random_frames": "3"}, "init_random_frames"),
        ({"sync": "yes"}, "sync must be True or False, got 'yes'"),
        ({"collector_kwargs": {"sync": True}}, "collector_kwargs holds 'sync'"),
        ({"launcher": "join", "secret_file": 3}, "secret_file must be a path, got 3"),
        ({"join_timeout": float("nan")}, "join_timeout"),
        ({"join_timeout": float("inf")}, "join_timeout"),
        (
            {"collector_class": "sync", "deterministic": True, "on_failure": "restart"},
            "deterministic=True with on_failure='restart'.*collector_class",
        ),
    ):
        with no_leaks(), pytest.raises(UsageError, match=words):
            DistributedCollector([healthy()], EchoPolicy(), frames_per_batch=8, **wrong)
    for wrong, words in (
        ({"tensorpipe_options": {"foo": 1}}, "tensorpipe_options.*foo"),
        ({"tensorpipe_options": {"num_worker_threads": 1}}, "num_worker_threads must be at least 2, got 1"),
        (
            {"tensorpipe_options": {"rpc_timeout": np.float32(60)}, "launcher": "join", "secret_file": "x"},
            "tensorpipe_options.*only numbers, text, lists and mappings",
        ),
        ({"visible_devices": ["foo"]}, "visible_devices.*'foo'"),
        ({"visible_devices": 3}, "visible_devices.*3"),
    ):
        with no_leaks(), pytest.raises(UsageError, match=words):
            RPCCollector([healthy()], EchoPolicy(), frames_per_batch=8, **wrong)


def _refused(*_):
    raise ConnectionRefusedError("the hook's own server")


@pytest.mark.parametrize("kind", [MultiAsyncCollector, DistributedCollector, RPCAsyncCollector])
def test_a_hook_that_cannot_connect_is_the_cause(kind):
    """Its ConnectionError is the user's, not the loss of the collector."""
    options = {"frames_per_batch": 8, "total_frames": -1, "hooks_in_workers": True, "pre_collect_hook": _refused}
    c = kind([healthy(), healthy(1)], EchoPolicy(), **options)
    with pytest.raises(WorkerRaised, match="the hook's own server") as caught:
        c.next()
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
