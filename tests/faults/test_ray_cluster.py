"""Clusters: one that runs already, one that is started here, one that dies. Each driver is a process of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray")
COMMON = """
import os, ray, sys, threading, time
from reap.collectors.distributed import RayCollector
from reap.data import LazyTensorStorage, RayReplayBuffer
from reap.errors import WorkerDied
from reap.testing import CountingEnv, EchoPolicy
def collect(**options):
    options = {"frames_per_batch": 8, "remote_configs": {"num_cpus": 0.25}, **options}
    return RayCollector([lambda: CountingEnv((3, 1, 5), 0)], EchoPolicy(), **options)
"""
JOINS = """
c = collect(ray_init_config={"address": "auto", "log_to_driver": False})
(node,) = ray.nodes()
assert node["Resources"]["mark"] == 7, node  # the one that was started by hand
assert c.next().numel() == 8
c.shutdown()
assert not ray.is_initialized()
"""
STARTS = """
config = {"address": "local", "num_cpus": 1, "object_store_memory": 80 * 2**20, "log_to_driver": False}
def children():
    tasks = os.listdir("/proc/self/task")
    return [pid for task in tasks for pid in open(f"/proc/self/task/{task}/children").read().split()]
def family(pid):
    yield pid
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in open(f"/proc/{pid}/task/{task}/children").read().split():
            yield from family(child)
def listening():
    held = set()
    for pid in family(os.getpid()):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                pass
    rows = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}").readlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}
c = collect(ray_init_config=config)
assert children()
loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
assert listening() and listening() <= loopback, listening()  # nobody else's machine can knock
actors = [pid for pid in family(os.getpid()) if "ray::" in open(f"/proc/{pid}/cmdline").read()]
assert actors and all(os.getpriority(os.PRIO_PROCESS, int(pid)) == os.nice(0) for pid in actors)
buffer = RayReplayBuffer(storage=lambda: LazyTensorStorage(100))
c.next()
c.shutdown()
assert ray.is_initialized()  # somebody uses it still
assert len(buffer) == 0
buffer.shutdown()
assert not ray.is_initialized()
assert not children()
assert threading.active_count() == 1
c = collect(ray_init_config=config)
c.shutdown(shutdown_ray=False)
assert ray.is_initialized()  # as was asked for
ray.shutdown()
"""
DIES = """
c = collect(ray_init_config={"address": "auto", "log_to_driver": False}, restart=RESTART)
c.next()
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    while True:
        c.next()
except WorkerDied as error:
    assert "worker 0" in str(error) and "its actor died" in str(error), error
    assert not RESTART or "cluster does not answer" in str(error), error
print("named", time.monotonic() - began, flush=True)
c.shutdown()
os._exit(0)  # Ray would try to reach it for longer
"""


def drive(code, environment):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", COMMON + code],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def environment():
    """A place and a token of its own: nobody else's cluster is found, and nobody else finds this one."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        path = os.pathsep.join(p for p in sys.path if p)
        own = {"RAY_TMPDIR": place, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        yield {**{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}, **own, "PYTHONPATH": path}
        for pid in processes_of(place):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def running(environment):
    """A cluster that was started by hand."""
    start(environment)
    return environment


def start(environment):
    ray = Path(sys.executable).with_name("ray")
    options = ["--port=0", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
    options += ["--node-ip-address=127.0.0.1", "--object-store-memory=80000000", '--resources={"mark": 7}']
    calm = {**environment, "RAY_worker_niceness": "0"}  # Ray's own, 15, is 3% of a core beside other tests
    subprocess.run([ray, "start", "--head", *options], env=calm, check=True, capture_output=True, timeout=100)


def processes_of(place, *names):
    """Who was started there."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().decode(errors="replace")
            if place in words and (not names or any(name in words for name in names)):
                yield int(entry.parent.name)


def ends_well(driver):
    out, err = driver.communicate(timeout=100)
    assert driver.returncode == 0, out + err
    return out


def test_one_that_runs(running):
    ends_well(drive(JOINS, running))


@pytest.mark.slow
def test_one_of_our_own(environment):
    ends_well(drive(STARTS, environment))


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
def test_one_that_dies(environment, restart):
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        own = {**environment, "RAY_TMPDIR": place}
        try:
            start(own)
            driver = drive(DIES.replace("RESTART", str(restart)), own)
            assert driver.stdout.readline() == "ready\n", driver.stderr.read()
            for pid in list(processes_of(place, "gcs_server", "raylet/raylet")):
                os.kill(pid, signal.SIGKILL)
            driver.stdin.write("go\n")
            driver.stdin.flush()
            name, seconds = ends_well(driver).split()
            assert name == "named"
            assert float(seconds) < 40
        finally:
            for pid in processes_of(place):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
