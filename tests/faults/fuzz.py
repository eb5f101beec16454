"""Strangers with bad intentions, at whatever listens: for as long as one likes.

    python -m tests.faults.fuzz --seconds 600

Another process listens as a collector and an inference server do. Here six kinds of strangers come, all at once: random
bytes, handshakes with wrong proofs, handshakes that were recorded, slow ones, connections that are reset halfway, and a
thousand that say nothing. Now and then a friend comes, who has the secret and is to be let in. The process says at the
end how many threads and descriptors it has, how much memory it took meanwhile, and how many objects were unpickled
before anybody had proved anything: none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from reap._system.listener import _NAME, _NONCE, _PROOF, Refused, _proof, _service_bytes, dial

SECRET = b"the secret of this test"
FOOLED = os.path.join(tempfile.gettempdir(), f"reap-was-fooled-{os.getpid()}")  # made by whoever loads our pickle
_WHOLE = _NONCE + _PROOF + _NAME

LISTENS = """
import gc, json, logging, os, sys, threading, torch
from tensordict.nn import TensorDictModule
from reap.backends.network.authenticated_listener import LOOPBACK
from reap.backends.network.node_registry import NodeRegistry
from reap.modules import InferenceServer

logging.getLogger("reap").setLevel(logging.ERROR)
read = []
sys.addaudithook(lambda event, args: read.append(args) if event == "pickle.find_class" else None)
registry = NodeRegistry(LOOPBACK, 0, b"the secret of this test", 9, lambda: None)
server = InferenceServer(TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"]))
address, key = server.address
read.clear()

def status():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return {"rss": int(lines["VmRSS"].split()[0]), "threads": threading.active_count(),
            "fds": len(os.listdir("/proc/self/fd")), "pickles": len(read)}

print(json.dumps({"port": registry.port, "unix": address.hex(), "key": key.hex()}), flush=True)
for _ in sys.stdin:
    gc.collect()
    print(json.dumps(status()), flush=True)
server.shutdown()
registry.close(1.0)
print(json.dumps(status()), flush=True)
"""


class Target:
    """The process that listens."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        about = self._line()
        self.addresses = [("127.0.0.1", about["port"]), bytes.fromhex(about["unix"])]
        self.secrets = [SECRET, bytes.fromhex(about["key"])]
        self.services = ["node", "inference"]

    def _line(self) -> dict:
        text = self._process.stdout.readline()
        assert text, f"it has ended with {self._process.wait(10)}"
        return json.loads(text)

    def status(self) -> dict:
        """Memory in KiB, threads, descriptors, and what was unpickled."""
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(30) == 0


def connect(address):
    one = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX, socket.SOCK_STREAM)
    one.settimeout(2.0)
    one.connect(address)
    return one


def random_bytes(address, draw):
    with connect(address) as one:
        for _ in range(draw.randrange(1, 6)):
            one.sendall(draw.randbytes(draw.choice((1, 31, _WHOLE - 1, _WHOLE, _WHOLE + 1, 4096, 200_000))))
        one.recv(1024)


def huge_lengths(address, draw):
    """What would be read as lengths by whoever reads lengths, and a pickle that would say so if it was loaded."""
    evil = f"cposix\nsystem\n(S'touch {FOOLED}'\ntR.".encode()
    with connect(address) as one:
        one.sendall(struct.pack("!IQ", 2**32 - 1, 2**63) + struct.pack("!i", 2**31 - 1) + evil * draw.randrange(1, 9))
        one.recv(1024)


def wrong_proof(address, draw):
    with connect(address) as one:
        nonce = one.recv(_NONCE)
        name = draw.choice((b"node", b"store", b"inference", b"\xff" * 9)).ljust(_NAME, b"\0")
        one.sendall(draw.choice((nonce, draw.randbytes(_NONCE))) + draw.randbytes(_PROOF) + name)
        assert one.recv(_PROOF) in (b"", b"\0" * _PROOF), "a stranger was let in"


def halfway(address, draw):
    one = connect(address)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.sendall(draw.randbytes(draw.randrange(_WHOLE)))
    one.close()


class Recorded:
    """Handshakes of friends, as somebody on the way between has seen them, played again."""

    def __init__(self, target: Target) -> None:
        self.said: dict = {}
        for address, secret, service in zip(target.addresses, target.secrets, target.services):
            self.said[address] = recorded(address, secret, service)

    def __call__(self, address, draw):
        with connect(address) as one:
            one.recv(_NONCE)
            one.sendall(self.said[address])
            assert one.recv(_PROOF) in (b"", b"\0" * _PROOF), "a recorded handshake was taken for a friend's"


def recorded(address, secret, service):
    """What a friend says to a listener, and is let in for."""
    with connect(address) as one:
        theirs, ours = one.recv(_NONCE), os.urandom(_NONCE)
        said = ours + _proof(secret, b"visitor", theirs, ours, _service_bytes(service)) + _service_bytes(service)
        one.sendall(said)
        assert one.recv(_PROOF) == _proof(secret, b"door", theirs, ours, _service_bytes(service))
    return said


def slow(address, over, draw):
    while not over.is_set():
        with contextlib.suppress(OSError), connect(address) as one:
            for _ in range(200):
                one.sendall(draw.randbytes(1))
                if over.wait(0.05):
                    return


def crowd(address, over, count):
    """So many connections that say nothing; who is sent away comes again."""
    held: list = []
    while not over.wait(0.2):
        held = held[-count // 2 :]
        while len(held) < count and not over.is_set():
            with contextlib.suppress(OSError):
                held.append(connect(address))
                continue
            break
    for one in held:
        one.close()


def run(seconds: float, seed: int = 0, half_open: int = 1000) -> dict:
    """Let them come for so long; returns what was seen, and raises if one got in, or a friend did not."""
    target = Target()
    first = target.status()
    counts: dict[str, int] = {}
    failures: list[str] = []
    over = threading.Event()
    attacks = [random_bytes, huge_lengths, wrong_proof, halfway, Recorded(target)]

    def attack(address, number):
        draw = random.Random(seed * 1000 + number)
        while not over.is_set():
            kind = draw.choice(attacks)
            name = getattr(kind, "__name__", "recorded")
            try:
                kind(address, draw)
            except AssertionError as error:
                failures.append(str(error))
            except OSError:
                pass  # sent away in the crowd
            counts[name] = counts.get(name, 0) + 1

    threads = [threading.Thread(target=attack, args=(address, n)) for n, address in enumerate(target.addresses)]
    threads += [threading.Thread(target=slow, args=(a, over, random.Random(seed))) for a in target.addresses]
    threads += [threading.Thread(target=crowd, args=(target.addresses[0], over, half_open))]
    before, friends, began = None, 0, time.monotonic()
    for thread in threads:
        thread.start()
    seen = []
    try:
        while time.monotonic() - began < seconds:
            over.wait(min(1.0, seconds / 8))
            try:
                dial(target.addresses[1], target.secrets[1], target.services[1], 10.0).socket.close()
                dial(target.addresses[0], SECRET, "node", 10.0).socket.close()
                friends += 1
            except Refused as error:
                failures.append(f"a friend was refused: {error}")
            seen.append(target.status())
            if before is None and time.monotonic() - began > seconds / 8:
                before = seen[-1]  # everything was used once
    finally:
        over.set()
        for thread in threads:
            thread.join()
    time.sleep(0.5)
    after = target.status()
    target.close()
    fooled = os.path.exists(FOOLED)
    most = {name: max(one[name] for one in seen) for name in ("threads", "fds", "rss")}
    told = {"counts": counts, "friends": friends, "failures": failures, "fooled": fooled}
    return {**told, "first": first, "before": before, "after": after, "most": most}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = run(args.seconds, args.seed)
    print(json.dumps(found, indent=1))
    raise SystemExit(bool(found["failures"] or found["fooled"] or found["after"]["pickles"]))
