"""Rows that can be predicted, processes that write them, and a disk that is small."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys

import cloudpickle
import pytest
import torch
from tensordict import TensorDict

from reap._system.processes import Child, end
from reap.data import ReplayBuffer
from tests.buffers.child_messages import hear, tell


def frames(ids, steps, done=None, *, pixels=False):
    ids, steps = torch.as_tensor(ids), torch.as_tensor(steps)
    done = torch.zeros(ids.shape, dtype=torch.bool) if done is None else torch.as_tensor(done)
    leaves = {
        "observation": torch.stack([ids, steps], -1).float(),
        "step": steps,
        "next": {"done": done.unsqueeze(-1), "reward": (ids * 1000 + steps).double().unsqueeze(-1)},
        "collector": {"traj_ids": ids},
    }
    if pixels:
        leaves["pixels"] = (ids * 7 + steps).to(torch.uint8)[..., None, None].expand(*ids.shape, 20, 20).contiguous()
        leaves["half"] = steps.to(torch.bfloat16)
    return TensorDict(leaves, batch_size=ids.shape)


def line(n, first=0):
    return frames(torch.zeros(n, dtype=torch.int64), torch.arange(first, first + n))


def check_row(sample):
    obs = sample["observation"].double()
    assert (sample["next", "reward"][..., 0] == obs[..., 0] * 1000 + obs[..., 1]).all()
    assert (sample["step"] == obs[..., 1]).all()
    assert (sample["collector", "traj_ids"] == obs[..., 0]).all()


def writer(description, number, work):
    """Bytes of a child that opens the buffer, says so, writes, and says so."""

    def target(connection, fds):
        buffer = ReplayBuffer.open(fds, description)
        connection.send("open")
        connection.recv()
        work(buffer, number, connection)
        connection.send("done")
        connection.recv()

    return cloudpickle.dumps(target)


def start(buffer, works):
    fds, description = buffer.handle()
    children = [Child(writer(description, i, work), fds=fds, name=f"writer-{i}") for i, work in enumerate(works)]
    for child in children:
        assert hear(child) == "open"
    return children


def stop(children):
    for child in children:
        if not child.gone():
            tell(child, None)
    end(children, patience=5, deadline=10)


def episodes(count, size):
    def work(buffer, number, connection):
        for i in range(count):
            ids = torch.full((size,), number * 100_000 + i)
            buffer.extend(frames(ids, torch.arange(size)))

    return work


def half_a_row(buffer, number, connection):
    """Reserve, write something, and be killed before the commit."""
    rows = buffer._memory.rows
    honest = rows.write

    def write(first, values):
        honest(first, {key: value[:2] for key, value in values.items()})
        connection.send("writing")
        signal.pause()

    rows.write = write
    buffer.extend(frames(torch.full((6,), 77), torch.arange(6)))


BEGIN = """
import os, sys, torch
from tensordict import TensorDict
from reap.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from reap.errors import NoSpace

disk = sys.argv[1]

def rows(count, first=0, width=100):
    steps = torch.arange(first, first + count)
    return TensorDict({"wide": steps[:, None].expand(count, width).contiguous(), "step": steps}, [count])

def refused(call, *words):
    try:
        call()
    except NoSpace as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError("it was not refused")
"""


@functools.cache
def mounting() -> bool:
    """Whether this user may mount a disk of their own."""
    try:
        done = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=20
        )
    except OSError:
        return False
    return done.returncode == 0


def on_a_small_disk(program, directory, *, megabytes=1, at=None):
    """Run `program` where `directory` is a disk of its own, which goes with the process."""
    if not mounting():
        pytest.skip("mounting is not allowed here")
    directory.mkdir(exist_ok=True)
    at = at or directory
    mount = f'mount -t tmpfs -o size={megabytes}m none "{at}" && exec "$0" -c "$1" "$2"'
    command = ["unshare", "-m", "sh", "-c", mount, sys.executable, BEGIN + program, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "ends"), (done.returncode, done.stdout, done.stderr)
