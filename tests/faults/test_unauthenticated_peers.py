"""Strangers at a door: limited in number and in time, and never in the way of those who have the secret."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from reap._system import listener
from reap._system.listener import PATIENCE, Refused, dial
from reap.backends.network.authenticated_listener import LOOPBACK, AuthenticatedListener
from reap.collectors.distributed import RPCCollector
from reap.join import main as join
from reap.modules import InferenceServer
from reap.testing import CountingEnv, EchoPolicy, no_leaks
from tests.worlds.faults import environment
from tests.worlds.waiting import until

SECRET = b"the secret of this test"


@pytest.fixture
def door():
    """A door that says hello to those who ask for it."""

    def hello(visitor):
        with visitor.socket:
            visitor.socket.sendall(b"hello")

    with no_leaks():
        open_door = AuthenticatedListener(LOOPBACK, 0, SECRET, {"hello": hello})
        yield open_door
        open_door.close()


def greeted(port):
    visitor = dial((LOOPBACK, port), SECRET, "hello")
    with visitor.socket:
        return visitor.socket.recv(16)


@contextlib.contextmanager
def crowd(count, connect):
    """So many connections that say nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect()) for _ in range(count)]


def hung_up_on(connections):
    """How many of them the other side has closed by now."""
    gone = 0
    for one in connections:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                while one.recv(64):
                    pass
                gone += 1
            except ConnectionResetError:
                gone += 1
    return gone


def test_a_crowd_costs_no_threads_and_who_has_the_secret_gets_in(door, caplog):
    before = threading.active_count()
    caplog.set_level(logging.WARNING, "reap")
    with crowd(300, lambda: socket.create_connection((LOOPBACK, door.port))) as strangers:
        for _ in range(3):
            assert greeted(door.port) == b"hello"
        until(lambda: threading.active_count() <= before + 1)  # those of the ones that were greeted end
        assert hung_up_on(strangers) >= 300 - listener._MAX_STRANGERS
    assert "refused so far" in caplog.text
    assert caplog.text.count("refused so far") <= 2, "a line for each stranger is a flood of its own"


def test_who_has_the_secret_gets_in_while_strangers_keep_coming(door):
    over = threading.Event()

    def flood():
        while not over.is_set():
            with crowd(20, lambda: socket.create_connection((LOOPBACK, door.port))):
                pass

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert [greeted(door.port) for _ in range(5)] == [b"hello"] * 5
    finally:
        over.set()
        thread.join()


def test_a_stranger_that_sends_a_byte_now_and_then_is_limited_in_all(door, monkeypatch):
    monkeypatch.setattr(listener, "PATIENCE", 0.5)
    began = time.monotonic()
    with socket.create_connection((LOOPBACK, door.port)) as stranger, contextlib.suppress(ConnectionError):
        stranger.settimeout(0.05)
        assert len(stranger.recv(32)) == 32
        for _ in range(60):
            stranger.sendall(b"?")
            try:
                if not stranger.recv(32):
                    break
            except TimeoutError:
                continue
    assert time.monotonic() - began < 2.5, "it would have taken 3 s to say all"


def test_another_secret_and_another_service_are_refused_at_once(door):
    began = time.monotonic()
    with pytest.raises(Refused, match="different secret, or no service 'hello'"):
        dial((LOOPBACK, door.port), b"not the secret", "hello")
    with pytest.raises(Refused, match="different secret, or no service 'goodbye'"):
        dial((LOOPBACK, door.port), SECRET, "goodbye")
    assert time.monotonic() - began < PATIENCE, "it was taken for a crowd"
    assert greeted(door.port) == b"hello"


FEW = """
import logging, os, resource, sys, threading
from reap.backends.network.authenticated_listener import LOOPBACK, AuthenticatedListener
logging.basicConfig(stream=sys.stderr)
said = threading.Event()
def hello(visitor):
    visitor.socket.sendall(b"hello")
    visitor.socket.close()
    said.set()
door = AuthenticatedListener(LOOPBACK, 0, b"the secret of this test", {"hello": hello})
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(door.port, flush=True)
sys.stdin.readline()
assert said.wait(20)
print(threading.active_count(), flush=True)
door.close()
os.close(os.open(os.devnull, os.O_RDONLY))
print("closed", flush=True)
"""


def test_a_process_without_descriptors_goes_on_listening():
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FEW],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    port = int(child.stdout.readline())
    with crowd(200, lambda: socket.create_connection((LOOPBACK, port))):
        assert greeted(port) == b"hello"
        said, errors = child.communicate("now\n", timeout=30)
    assert child.returncode == 0, errors
    threads, end = said.split()
    assert int(threads) <= 4
    assert end == "closed"
    assert "cannot accept a connection: [Errno 24] Too many open files" in errors
    assert errors.count("cannot accept a connection") <= 3


FLOOD = """
import resource, socket, sys
family, address, count = eval(sys.argv[1]), eval(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for _ in range(count):
    one = socket.socket(family, socket.SOCK_STREAM)
    one.connect(address)
    held.append(one)
print("here", flush=True)
sys.stdin.read()
gone = 0
for one in held:
    one.settimeout(float(sys.argv[4]))  # since they have been here for a while
    try:
        while one.recv(64): pass
        gone += 1
    except ConnectionResetError:
        gone += 1
    except TimeoutError:
        pass
print(gone, flush=True)
"""


@contextlib.contextmanager
def flood(address, count, patience=PATIENCE):
    """So many strangers of another process, who say nothing; a function that says how many were sent away in time."""
    family = "socket.AF_INET" if isinstance(address, tuple) else "socket.AF_UNIX"
    command = [sys.executable, "-S", "-c", FLOOD, family, repr(address), str(count), str(patience)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as strangers:
        assert strangers.stdout.readline() == "here\n"
        yield lambda: int(strangers.communicate(timeout=60)[0])


@contextlib.contextmanager
def limited_to(descriptors):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_flood_leaves_descriptors_and_threads_to_their_owner(door, monkeypatch):
    monkeypatch.setattr(listener, "PATIENCE", 0.5)
    before = threading.active_count()
    used = max(map(int, os.listdir("/proc/self/fd")))
    with limited_to(used + 200), flood((LOOPBACK, door.port), 400) as sent_away:
        with open(os.devnull):
            assert greeted(door.port) == b"hello"
        assert threading.active_count() <= before + 1
        assert sent_away() == 400  # those who were not pushed out by others: after their time


LEARNER = """
import os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from reap.collectors.distributed import DistributedCollector
from reap.testing import CountingEnv, EchoPolicy

def look():
    sys.stdin.readline()
    with open(os.devnull):
        print("threads", threading.active_count(), flush=True)

threading.Thread(target=look).start()
print("ready", threading.active_count(), flush=True)
given = dict(launcher="join", secret_file=sys.argv[1], tcp_port=int(sys.argv[2]), join_timeout=60)
with DistributedCollector([CountingEnv], EchoPolicy(), frames_per_batch=8, **given) as collector:
    print("frames", collector.next().numel(), flush=True)
    sys.stdin.readline()
"""
SERVER = """
import os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
import torch
from tensordict import TensorDict
from reap.modules import InferenceServer

with InferenceServer(torch.nn.Linear(3, 1)) as server:
    client = server.client("process")
    print(server.address[0], threading.active_count(), flush=True)
    sys.stdin.readline()
    with open(os.devnull):
        print("threads", threading.active_count(), flush=True)
    td = TensorDict({"observation": torch.zeros(3)})
    print("actions", client(td)["action"].numel(), server.is_alive, flush=True)
    sys.stdin.readline()
    client.close()
"""
MANY = 1500  # connections, where a process may have 1,024 descriptors


@contextlib.contextmanager
def running(code, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def told(process):
    return process.stdout.readline().split()


def listens(port):
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((LOOPBACK, port)):
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_node_joins_a_learner_of_1024_descriptors_during_a_flood_of_1500(tmp_path):
    secret, port = tmp_path / "secret", 29800 + os.getpid() % 150
    assert join(["--new-secret", str(secret)]) == 0
    node = [sys.executable, "-W", "ignore", "-m", "reap.join", "--address", f"{LOOPBACK}:{port}"]
    with running(LEARNER, secret, port) as learner:
        _, threads = told(learner)
        until(lambda: listens(port))
        with flood((LOOPBACK, port), MANY) as sent_away:
            say(learner, "look")
            word, now = told(learner)
            assert word == "threads", "its own open() failed"
            assert int(now) <= int(threads) + 8
            joining = subprocess.Popen([*node, "--secret-file", str(secret), "--workers", "1"], env=environment())
            assert told(learner) == ["frames", "8"]
            assert sent_away() == MANY
        say(learner, "enough")
        assert learner.wait(60) == 0
        assert joining.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_inference_server_of_1024_descriptors_answers_during_a_flood_of_1500():
    with running(SERVER) as server:
        address, threads = told(server)
        with flood(eval(address), MANY) as sent_away:
            say(server, "look")
            word, now = told(server)
            assert word == "threads", "its own open() failed"
            assert int(now) <= int(threads) + 3
            assert told(server) == ["actions", "1", "True"]
            assert sent_away() == MANY
        say(server, "enough")
        assert server.wait(60) == 0


def test_a_crowd_at_the_inference_servers_socket():
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])

    def connect():
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.connect(server.address[0])
        return one

    with no_leaks(), InferenceServer(policy) as server:
        before = threading.active_count()
        client = server.client("process")
        with crowd(300, connect):
            out = client(TensorDict({"observation": torch.zeros(3)}))
            assert torch.equal(out["action"], policy.module.bias)
            assert threading.active_count() <= before + 3
        client.close()


def test_nothing_of_a_stranger_is_left_behind(door):
    before = len(os.listdir("/proc/self/fd"))
    with crowd(40, lambda: socket.create_connection((LOOPBACK, door.port))) as strangers:
        for one in strangers:
            one.sendall(b"x" * 200)
    assert greeted(door.port) == b"hello"  # after them all
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def ports_of(pid):
    """The TCP ports at which a process listens."""
    links = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    sockets = {os.readlink(link) for link in links if os.path.lexists(link)}
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.append(int(words[1].rsplit(":", 1)[1], 16))
    return found


def test_rpc_on_one_machine_listens_at_no_port():
    """A port scan would end the learner with SIGABRT: TensorPipe knows no secrets."""
    before = ports_of(os.getpid())
    with RPCCollector([CountingEnv], EchoPolicy(), frames_per_batch=8) as collector:
        assert collector.next().numel() == 8
        assert ports_of(os.getpid()) == before
        assert [ports_of(child.pid) for child in collector._backend.transport._children.values()] == [[]]
