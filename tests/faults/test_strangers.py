"""Strangers at a door: limited in number and in time, and never in the way of those who have the secret."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from reap import listener
from reap.backends.door import LOOPBACK, Door, Refused, dial
from reap.listener import PATIENCE
from reap.modules import InferenceServer
from reap.testing import no_leaks

SECRET = b"the secret of this test"


@pytest.fixture
def door():
    """A door that says hello to those who ask for it."""

    def hello(visitor):
        with visitor.socket:
            visitor.socket.sendall(b"hello")

    with no_leaks():
        open_door = Door(LOOPBACK, 0, SECRET, {"hello": hello})
        yield open_door
        open_door.close()


def greeted(port):
    visitor = dial(LOOPBACK, port, SECRET, "hello")
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
        assert threading.active_count() <= before + 1
        assert hung_up_on(strangers) >= 300 - listener._MOST
    assert "turned away" in caplog.text
    assert caplog.text.count("turned away") <= 2, "a line for each stranger is a flood of its own"


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
    with pytest.raises(Refused, match="another secret, or no 'hello' for us"):
        dial(LOOPBACK, door.port, b"not the secret", "hello")
    with pytest.raises(Refused, match="another secret, or no 'goodbye' for us"):
        dial(LOOPBACK, door.port, SECRET, "goodbye")
    assert time.monotonic() - began < PATIENCE, "it was taken for a crowd"
    assert greeted(door.port) == b"hello"


FEW = """
import logging, os, resource, sys, threading
from reap.backends.door import LOOPBACK, Door
logging.basicConfig(stream=sys.stderr)
said = threading.Event()
def hello(visitor):
    visitor.socket.sendall(b"hello")
    visitor.socket.close()
    said.set()
door = Door(LOOPBACK, 0, b"the secret of this test", {"hello": hello})
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(door.port, flush=True)
sys.stdin.readline()
assert said.is_set()
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
    threads, end = said.split()
    assert int(threads) <= 4
    assert end == "closed"
    assert "cannot accept a connection: [Errno 24] Too many open files" in errors
    assert errors.count("cannot accept a connection") <= 3


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
    until = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
