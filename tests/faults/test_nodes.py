"""Workers of nodes that fail, and nodes that are lost: others take their places, or the run goes on without them."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reap._foreign import torch_internals
from reap.backends.network import node_agent, node_registry
from reap.backends.network.launchers import NodeSettings, new_secret, read_secret
from reap.backends.network.node_agent import NodeAgent
from reap.backends.network.node_registry import NodeProcess, NodeRegistry
from reap.collectors import MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, RPCCollector
from reap.errors import UsageError, WorkerDied
from reap.testing import EchoPolicy
from tests.worlds.faults import SOON, collect, healthy, pids, within
from tests.worlds.restarts import by_lane, check_lane
from tests.worlds.waiting import until

REMOTE = [DistributedCollector, RPCCollector]


class Node:
    """A node of this process, which can be lost."""

    def __init__(self, port, secret, workers=1):
        self._agent = None
        self._given = {"workers": workers, "listen": None, "patience": 60.0}
        self._thread = threading.Thread(target=self._run, args=(port, read_secret(secret)))
        self._thread.start()

    def _run(self, port, secret):
        self._agent = NodeAgent("127.0.0.1", port, secret, **self._given)
        self.ended = self._agent.run()

    def lose(self):
        """Its connection breaks."""
        self._agent._connection._socket.shutdown(2)
        self.join()

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def secret(tmp_path):
    new_secret(tmp_path / "secret")
    return tmp_path / "secret"


@pytest.fixture
def port():
    return 28000 + os.getpid() % 900


@pytest.fixture
def options(secret, port):
    return {"launcher": "join", "secret_file": secret, "tcp_port": port, "join_timeout": 60, "timeout": 30.0}


def check(batches, sync, cuts=1):
    lanes = by_lane(batches, MultiSyncCollector if sync else MultiAsyncCollector)
    assert check_lane(lanes[0], 0) == 0
    assert check_lane(lanes[1], 1) == cuts


@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_a_worker_of_a_node_that_dies(kind, on_failure, options, secret, port):
    """Its node starts another; or the others go on, and have the latest weights all the same."""
    node, told, batches = Node(port, secret, workers=3), [], []
    policy = EchoPolicy()
    with collect(
        kind, [healthy(0), healthy(1), healthy(2)], policy, frames_per_batch=12, sync=True,
        on_failure=on_failure, on_restart=told.append, **options,
    ) as c:  # fmt: skip
        batches += [c.next() for _ in range(3)]
        os.kill(pids(c)[0], signal.SIGKILL)
        while not told:
            batches.append(c.next())
        for version in range(2, 6):
            c.update_policy_weights_({"weight": torch.tensor(float(version))})
            batch = c.next()
            echo = (batch["observation"] * policy.mix).sum(-1, keepdim=True)
            assert torch.equal(batch["action"], version * echo)
        assert c.stats()["workers_alive"] == (3 if on_failure == "restart" else 2)
        assert c.stats()["restarts"] == (1 if on_failure == "restart" else 0)
    node.join()
    assert "SIGKILL" in str(told[0].cause)
    assert "at 127.0.0.1" in str(told[0].cause)
    rows = torch.cat(batches, 1)
    for lane in range(3):
        own = rows[lane]
        own = own if on_failure == "restart" else own[own["collector", "mask"]]
        assert check_lane(own, lane) == (1 if on_failure == "restart" and lane == 0 else 0)


@pytest.mark.parametrize("kind", REMOTE)
def test_a_node_that_is_lost_and_one_that_comes(kind, options, secret, port):
    """As ready: nobody waits for it but its own lane. It has the latest weights, and those alone."""
    first, other = Node(port, secret), Node(port, secret)
    told, batches, policy = [], [], EchoPolicy()
    more = {"sync": False, "on_failure": "restart", "on_restart": told.append}
    with collect(kind, [healthy(0), healthy(1)], policy, **more, **options) as c:
        while len({batch.origin.worker for batch in batches}) < 2:  # else there is nothing to be cut
            batches.append(c.next())
        other.lose()
        c.update_policy_weights_({"weight": torch.tensor(2.0)})
        lost = None
        for _ in range(40):  # a worker in the place of the lost one waits for a node
            batch = c.next()
            lost = 1 - batch.origin.worker if int(c.stats()["restarts"]) else lost
        assert lost is not None
        assert not told
        other = Node(port, secret)
        while not told or batch.origin.worker != lost:
            batch = c.next()
        assert [one.worker for one in told] == [lost]
        assert "is out of reach: it closed the connection" in str(told[0].cause)
        assert torch.equal(batch["action"], 2 * (batch["observation"] * policy.mix).sum(-1, keepdim=True))
        assert bool(batch["collector", "cut"][0])
    first.join()
    other.join()


def test_spares_wait_until_they_are_needed(options, secret, port):
    nodes = [Node(port, secret) for _ in range(3)]
    batches = []
    with collect(DistributedCollector, [healthy(0), healthy(1)], sync=True, on_failure="restart", **options) as c:
        batches += [c.next() for _ in range(3)]
        registry = c._backend.transport._node_pool.registry
        busy = [node for node in nodes if any(pids(c)[1] == child.pid for child in node._agent._children.values())]
        until(lambda: registry.places)
        busy[0].lose()
        with within(SOON):
            batches += [c.next() for _ in range(3)]
        assert c.stats()["restarts"] == 1
    for node in nodes:
        node.join()
    check(batches, sync=True)


def test_nobody_comes_in_its_place(options, secret, port):
    node = Node(port, secret, workers=2)
    told = []
    c = collect(
        DistributedCollector,
        [healthy(0), healthy(1)],
        sync=True,
        on_failure="restart",
        on_restart=told.append,
        **{**options, "join_timeout": 3.0},
    )
    c.next()
    node.lose()
    words = (
        r"no node connected to 127.0.0.1:\d+ within 3 s \(join_timeout\); no node is available to start a replacement"
    )
    with pytest.raises(WorkerDied, match=words) as caught:
        while True:
            c.next()
    assert "is out of reach: it closed the connection" in str(caught.value.__cause__)
    assert c.closed
    assert not told


def test_closing_does_not_wait_for_a_node(options, secret, port):
    """A worker in the place of another that waits for a node is ended at once."""
    node = Node(port, secret)
    c = collect(DistributedCollector, [healthy()], on_failure="restart", **options)
    c.next()
    node.lose()
    while not c.stats()["restarts"]:
        c._backend.supervisor.listen(within=1.0)
    with within(SOON - 1):
        c.shutdown()


def test_a_node_that_leaves_when_it_is_wanted_is_waited_for(secret, monkeypatch):
    """What is left of `join_timeout` is for another to come, and nobody is refused later because of it."""
    pool = NodeSettings("join", secret_file=str(secret), patience=60.0).open(1, 0, lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(NodeRegistry, "places", 1)  # it hangs up after this
        (process,) = pool.gather([b""], "gloo", [{}], lambda process: None, lambda seconds: None)
    assert not process.gone(0.2)
    assert not pool.registry.no_node_came
    process.release()
    pool.close(0.0)


def test_a_worker_that_its_node_cannot_start(options, secret, port, monkeypatch):
    """It is told of as that worker's failure; the node and its other workers go on."""
    node, make, made = Node(port, secret, workers=2), node_agent.Child, []

    def refuse(*given, **more):
        made.append(given)
        if len(made) == 2:
            raise WorkerDied("no room for another process")
        return make(*given, **more)

    monkeypatch.setattr(node_agent, "Child", refuse)
    with collect(DistributedCollector, [healthy(0), healthy(1)], sync=True, on_failure="restart", **options) as c:
        batches = [c.next() for _ in range(3)]
        assert c.stats()["restarts"] == 1
    node.join()
    assert node.ended == "the collector is closed"
    check(batches, sync=True, cuts=0)


def test_a_stack_is_that_of_now(monkeypatch):
    """A worker that answered once and does not any more has no stack: it is deaf."""
    monkeypatch.setattr(node_registry, "_STACK", 0.01)
    answers = ["where it was"]
    process = NodeProcess(0, 1, lambda process: None)

    def send(**message):
        if answers:
            process.stack_received(answers.pop())

    process.placed_on(SimpleNamespace(host="there", connection=SimpleNamespace(send=send)))
    assert process.ask_stack() == "where it was"
    assert process.ask_stack() == ""
    process.release()


def test_a_port_that_is_taken_leaves_no_secret_behind(tmp_path):
    pytest.importorskip("submitit")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        jobs = {"launcher": "submitit", "slurm_kwargs": {"folder": tmp_path, "timeout_min": 2}}
        with pytest.raises(UsageError):
            collect(DistributedCollector, [healthy()], tcp_port=taken, **jobs)
    assert not list(tmp_path.glob("secret-*"))


@pytest.mark.slow  # two jobs that import torch
def test_a_job_that_is_gone_is_submitted_again(tmp_path):
    pytest.importorskip("submitit")
    jobs = {"launcher": "submitit", "slurm_kwargs": {"folder": tmp_path, "timeout_min": 2}}
    with collect(DistributedCollector, [healthy()], sync=True, on_failure="restart", **jobs) as c:
        rows = [c.next() for _ in range(3)]
        (job,) = c._backend.transport._node_pool._jobs
        (node,) = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
        os.kill(int(node), signal.SIGKILL)
        while not c.stats()["restarts"]:
            rows.append(c.next())
        rows += [c.next() for _ in range(4)]
    assert check_lane(torch.cat(rows, -1).reshape(-1), 0) == 1


def test_a_torch_that_introduces_nobody(monkeypatch):
    """Without the private name there is no replacing, and it is said why."""
    monkeypatch.setattr(torch_internals, "can_introduce_rpc_agents", lambda: False)
    with pytest.raises(UsageError, match="on_failure='restart'.*RPC cannot replace an agent"):
        collect(RPCCollector, [healthy()], on_failure="restart")
