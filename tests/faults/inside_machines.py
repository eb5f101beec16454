"""Run by test_machines.py, in the namespace of the hub: workers on two other machines, and all that may go wrong."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from reap._system.listener import Refused, dial
from reap.backends.network.launchers import new_secret
from reap.backends.network.node_connection import LOST
from reap.collectors.distributed import DistributedCollector, DistributedSyncCollector, RPCCollector, RPCSyncCollector
from reap.errors import WorkerDied
from reap.testing import CountingWorld, EchoPolicy, assert_same, no_leaks
from tests.faults.machines import HUB, A, ip
from tests.worlds.faults import BOUND, PROMISED, ROOM, SOON, all_gone, healthy, pids, within

NAMESPACES = dict(zip(("a", "b"), os.environ["REAP_TEST_MACHINES"].split()))
PORT = 29755
pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    new_secret(path)
    return path


@pytest.fixture(scope="module")
def nodes(secret):
    """A node on each of the other machines, which serves one collector after the other."""
    command = [sys.executable, "-m", "reap.join", "--address", f"{HUB}:{PORT}", "--secret-file", str(secret), "--again"]
    started = {
        name: subprocess.Popen(["ip", "netns", "exec", space, *command], start_new_session=True)
        for name, space in NAMESPACES.items()
    }
    joined(DistributedSyncCollector, secret).shutdown()  # a node keeps its fork server from its first collector on
    yield started
    for node in started.values():
        node.kill()
        node.wait()


@pytest.fixture
def make(nodes, secret):
    return functools.partial(joined, secret=secret)


def joined(kind, secret, **options):
    """A collector whose two workers are on the two nodes."""
    given = {"frames_per_batch": 16, "track_traj_ids": False, "join_timeout": 80, **options}
    place = {"launcher": "join", "secret_file": secret, "listen": HUB, "tcp_port": PORT}
    return kind([healthy(0), healthy(1)], EchoPolicy(), **place, **given)


def link(name, state):
    ip("link", "set", f"to-{name}", state)


def listening():
    """Addresses of this machine on which somebody listens, but for the loopback ones."""
    found = set()
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    for _, local, _, state, *_ in lines:
        if state == "0A":
            address, port = local.split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
            if not host.startswith("127."):
                found.add((host, int(port, 16)))
    return found


def expected(world, batch):
    """What the next batch of a world holds, trajectory ids left out."""
    return {key: value for key, value in world.batch(batch).items() if key != ("collector", "traj_ids")}


@pytest.mark.parametrize("kind", [DistributedSyncCollector, RPCSyncCollector])
def test_two_machines_in_step(make, kind, caplog, secret):
    """Bit for bit, at the speed of the slow link; new weights act at once; whoever lacks the secret is refused."""
    before = listening()
    c = make(kind, track_policy_version=True, update_after_each_batch=True)
    assert {host for host, _ in listening() - before} == {HUB}
    if kind is RPCSyncCollector:
        assert len(listening() - before) == 2  # the collector's door, and its agent's
    world = CountingWorld([(3, 1, 5)] * 2)
    for version in range(10):
        batch = c.next()
        assert (batch.pop("policy_version") == version).all()
        batch["next"].pop("policy_version")
        assert_same(batch, expected(world, 8))
    with caplog.at_level(logging.WARNING, "reap"):
        with pytest.raises(Refused):
            dial((HUB, PORT), b"not the secret at all", "node")
        with socket.create_connection((HUB, PORT)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 200)
            assert stranger.recv(32)  # its part of a greeting; nothing that was sent is read as anything else
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    assert caplog.text.count("refused a connection") == 2
    assert_same(c.next().exclude("policy_version", ("next", "policy_version")), expected(world, 8))
    with within(BOUND):
        c.shutdown()
    del c
    assert listening() == before


@pytest.mark.parametrize("kind", [DistributedCollector, RPCCollector])
def test_a_link_that_comes_back(make, kind):
    """Cut for a while: everything goes on where it was, nothing is lost and nothing comes twice."""
    c = make(kind)
    streams = {0: [], 1: []}
    for turn in range(60):
        if turn == 20:
            link("a", "down")
            threading.Timer(1.5, link, ("a", "up")).start()
        batch = c.next()
        streams[batch.origin.worker].append(batch["observation"].clone())
        c.update_policy_weights_()
    while min(map(len, streams.values())) < 25:
        batch = c.next()
        streams[batch.origin.worker].append(batch["observation"].clone())
    c.shutdown()
    for lane, found in streams.items():
        whole = torch.cat(found)
        world = CountingWorld([(3, 1, 5)] * 2)
        want = torch.as_tensor(world.batch(len(whole))[("observation",)])[lane]
        assert torch.equal(whole, want)


@pytest.mark.parametrize("kind", [DistributedCollector, RPCSyncCollector])
def test_a_link_that_stays_cut(make, kind):
    """The node is named in time, its workers end by themselves, and it comes back when the link does."""
    with no_leaks():
        c = make(kind)
        c.next()
        workers = pids(c)
        link("a", "down")
        until = time.monotonic() + LOST + PROMISED + ROOM
        try:
            with within(LOST + PROMISED + ROOM), pytest.raises(WorkerDied, match="sent no heartbeat") as caught:
                while True:
                    c.update_policy_weights_()
                    c.next()
            assert re.match(rf"worker \d \(pid \d+ at {A}\): is out of reach", str(caught.value))
            with within(BOUND):
                c.shutdown()
            assert all_gone(workers, within=until - time.monotonic()), "the node's are still there"
        finally:
            link("a", "up")
        del c, caught
    c = make(kind)
    assert c.next().numel() == 16
    c.shutdown()


def test_a_node_that_is_killed(make, nodes):
    with no_leaks():
        c = make(DistributedCollector)
        c.next()
        workers = pids(c)
        os.killpg(nodes["b"].pid, signal.SIGKILL)
        with within(SOON + BOUND), pytest.raises(WorkerDied, match="worker . .*at 10.213.77.3"):
            while True:
                c.next()
        c.shutdown()
        assert all_gone(workers, within=BOUND)
        del c
