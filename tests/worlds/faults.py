"""What the fault tests share: envs with faults, the two kinds of collector, and a look at who is alive."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import ParallelEnv
from reap.testing import CountingEnv, EchoPolicy, FaultyEnv
from reap.testing.faults import inject
from tests.worlds.waiting import comes_true, until

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
        comes_true((self.folder / "may").exists, 3.0)
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
            until(self.note.exists)
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
    return comes_true(lambda: not any(map(alive, numbers)), within)


def wait_until_stopped(pid):
    """A signal is only on its way when `kill` returns: until it has come, the process still answers."""
    until(lambda: all(state(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir()))


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
    supervisor = collector._backend.supervisor
    until(lambda: collector._sync or supervisor.poll_failures() or len(supervisor.arrived) >= batches)


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


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


PROMISED = 2.0  # seconds after the timeout by which the error is there, and everything closed


ROOM = 5.0  # for a busy machine: what is caught is a wait for something else


def gated(gate):
    """An env whose twelfth step waits for a file. (A class of its own: workers need not import this module.)"""

    def make():
        class Gated(CountingEnv):
            left = 12

            def step(self, action):
                self.left -= 1
                while self.left == 0 and not gate.exists():
                    time.sleep(0.01)
                return super().step(action)

        return Gated((50,), 1)

    return make


class OpensGate(logging.Handler):
    """Opens the gate when the env that waits for it is said to be silent: on a busy machine others may be, too."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.told = gate, []

    def emit(self, record):
        said = record.getMessage()
        if "worlds/faults.py" in said:
            self.told.append(said)
            self.gate.touch()


class Pest(threading.Thread):
    """Sends SIGINT to the main thread, again and again, while it is told to."""

    def __init__(self, seed):
        super().__init__(daemon=True)
        self.random, self.on, self.over = random.Random(seed), threading.Event(), False
        self.sent = 0

    def run(self):
        while not self.over:
            self.on.wait()
            time.sleep(self.random.random() * 0.003)
            if self.on.is_set() and not self.over:
                self.sent += 1
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def stop(self):
        self.on.clear()
        self.over = True
        self.on.set()
        self.join()


class Handler:
    """A user's own: interrupts once each time it is armed, so that this test can always catch it."""

    def __init__(self):
        self.armed = False

    def __call__(self, number, frame):
        armed, self.armed = self.armed, False
        if armed:
            raise KeyboardInterrupt

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self), sys.unraisablehook
        sys.unraisablehook = lambda _: None  # one that falls into a finalizer between two calls: Python drops it
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before[0])
        sys.unraisablehook = self.before[1]


LANES = ((3, 1, 5), (2, 2, 7), (4,))


def whole(batch, seen=None):
    """Every trajectory of a batch is one: steps of one episode, without a hole, also after those `seen`."""
    flat = batch.reshape(-1)
    ids = flat["collector", "traj_ids"]
    seen = {} if seen is None else seen  # of each lane the last one, and the step at which it goes on
    for one in ids.unique():
        frames = flat[ids == one]
        lane, episode, first = frames["observation"][0].tolist()
        want = torch.tensor([[lane, episode, first + t] for t in range(len(frames) + 1)])
        assert torch.equal(frames["observation"], want[:-1])
        assert torch.equal(frames["next", "observation"], want[1:])
        length = LANES[int(lane)][int(episode) % len(LANES[int(lane)])]
        assert torch.equal(frames["next", "done"][:, 0], want[1:, 2] == length)
        last, following = seen.get(lane, (0, None))
        assert last <= int(one), "time runs backwards"
        assert last < int(one) or following in (None, first), f"trajectory {last} goes on at {first}, not {following}"
        seen[lane] = int(one), first + len(frames)


class SlowEnv(CountingEnv):
    """Its successor comes late: who does not wait for it finds what was there before."""

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


def counting(env=CountingEnv):
    return [lambda n=n, one=one: env(one, n) for n, one in enumerate(LANES)]


HERE = {
    "single": lambda env=CountingEnv: collect(Collector, counting(env)[0]),
    "workers": lambda env=CountingEnv: collect(KINDS[0], counting(env), frames_per_batch=24, workers="inline"),
    "parallel": lambda env=CountingEnv: collect(Collector, ParallelEnv(3, counting(env)), frames_per_batch=24),
    **{
        name: lambda env=CountingEnv, options=options: collect(
            AsyncBatchedCollector, counting(env), frames_per_batch=24, **options
        )
        for name, options in {
            "threads": {"env_backend": "threading"},
            "processes": {"env_backend": "multiprocessing"},
            "threads of a process": {"env_backend": "multiprocessing", "worker_threads": True, "envs_per_worker": 3},
        }.items()
    },
}
