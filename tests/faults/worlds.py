"""What the fault tests share: envs with faults, the two kinds of collector, and a look at who is alive."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import torch

from reap.collectors import MultiAsyncCollector, MultiSyncCollector
from reap.testing import CountingEnv, EchoPolicy, FaultyEnv
from reap.testing.faults import inject

KINDS = [MultiSyncCollector, MultiAsyncCollector]
# What is promised is two seconds and five. The rest is room for a machine that has something else to do: what these
# bounds are to catch is a wait that would never end, or only by chance.
SOON = 5.0  # seconds within which a death must be known
BOUND = 8.0  # seconds within which everything is closed


def healthy(lane=0):
    return lambda: CountingEnv((3, 1, 5), lane)


def faulty(fault, at=0, where="step"):
    return lambda: FaultyEnv(CountingEnv((3, 1, 5), 1), at=at, fault=fault, where=where)


class ClosesWhenLet(CountingEnv):
    """Closes when there is a file that says it may, or after a while; says how."""

    def __init__(self, folder):
        super().__init__((3, 1, 5), 0)
        self.folder = folder

    def close(self):
        until = time.monotonic() + 3.0
        while not (self.folder / "may").exists() and time.monotonic() < until:
            time.sleep(0.01)
        (self.folder / "closed").touch()


class Stuck(CountingEnv):
    """Says that it is about to be, in its third step."""

    def __init__(self, note, fault):
        super().__init__((50,), 0)
        self.note, self.fault, self.left = note, fault, 3

    def step(self, action):
        self.left -= 1
        if not self.left:
            self.note.touch()
            inject(self.fault)
        return super().step(action)


class RaisesThen(CountingEnv):
    """Raises in its third step, when there is a note."""

    def __init__(self, note):
        super().__init__((50,), 1)
        self.note, self.left = note, 3

    def step(self, action):
        self.left -= 1
        if not self.left:
            while not self.note.exists():
                time.sleep(0.01)
            inject("raise")
        return super().step(action)


def collect(kind, makers, policy=None, **options):
    return kind(makers, policy or EchoPolicy(), **{"frames_per_batch": 8, "total_frames": -1, **options})


def pids(collector):
    return [remote.child.pid for remote in collector._backend.workers]


def alive(pid):
    """Whether there is such a process, zombies not counted."""
    with contextlib.suppress(OSError):
        return state(Path(f"/proc/{pid}")) != "Z"
    return False


def all_gone(numbers, within):
    """Whether these processes end in time."""
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in numbers) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(alive(pid) for pid in numbers)


def wait_until_stopped(pid):
    """A signal is only on its way when `kill` returns: until it has come, the process still answers."""
    while any(state(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def state(process):
    return (process / "stat").read_text().rsplit(")", 1)[1].split()[0]


def freeze(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def within(seconds):
    """Fails if the block takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s, allowed are {seconds} s"


def ran_ahead(collector, batches=2):
    """Wait until an asynchronous collector has so many batches that nobody has taken; one in step never has any."""
    while not collector._sync and len(collector._backend.supervisor.arrived) < batches:
        collector._backend.supervisor.look()
        time.sleep(0.001)


def check_what_is_left_out(kind, **options):
    """Two updates before anybody acts: buffers of the first hold, though the second has parameters alone.

    So do those of a state that was loaded since, and those one worker was given by itself.
    """
    ones = torch.ones(3)
    with collect(kind, [healthy(), healthy(1)], **options) as c:
        c.next()
        state = c.state_dict()
        c.update_policy_weights_({"weight": torch.tensor(2.0), "mix": ones})
        c.update_policy_weights_({"weight": torch.tensor(3.0)})
        batch = c.next()
        assert torch.equal(batch["action"], 3 * batch["observation"].sum(-1, keepdim=True))
        c.load_state_dict(state)
        c.update_policy_weights_({"weight": torch.tensor(3.0)})
        assert torch.equal(c.get_cached_weights(worker=1)["mix"], EchoPolicy().mix)
        c.update_policy_weights_({1: {"weight": torch.tensor(3.0), "mix": 2 * ones}})
        c.update_policy_weights_({"weight": torch.tensor(4.0)})
        assert torch.equal(c.get_cached_weights(worker=0)["mix"], EchoPolicy().mix)
        assert torch.equal(c.get_cached_weights(worker=1)["mix"], 2 * ones)
