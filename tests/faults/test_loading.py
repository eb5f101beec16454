"""What a child process is given, and cannot load: the cause is told. What only a script has: it travels."""

from __future__ import annotations

import functools
import subprocess
import sys
import types

import cloudpickle
import pytest
import torch

from reap.collectors import Collector, Evaluator, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, RPCCollector
from reap.envs import AsyncEnvPool, ParallelEnv
from reap.errors import WorkerError
from reap.modules import ProcessInferenceServer
from tests.worlds.faults import environment

pytestmark = pytest.mark.timeout(120)


class Unloadable:
    """A factory made in another process by code that raises: an import, `__setstate__`, a proxy's connection."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return raising, (self.error,)

    def __call__(self):
        return "CartPole-v1"


def raising(error, *_):
    raise error


WAYS = {
    "workers": lambda make: MultiSyncCollector([make], frames_per_batch=8),
    "a policy": lambda make: MultiSyncCollector(["CartPole-v1"], policy_factory=make, frames_per_batch=8),
    "init_fn": lambda make: MultiSyncCollector(["CartPole-v1"], init_fn=make, frames_per_batch=8),
    "lanes": lambda make: ParallelEnv(2, make),
    "a pool": lambda make: AsyncEnvPool([make] * 2, backend="multiprocessing"),
    "threads of a process": lambda make: AsyncEnvPool(
        [make] * 2, backend="multiprocessing", envs_per_worker=2, worker_threads=True
    ),
    "an evaluator": lambda make: Evaluator(
        make, torch.nn.Linear(4, 2), num_trajectories=1, backend="process"
    ).evaluate(),
    "an inference server": ProcessInferenceServer,
    "workers over gloo": lambda make: DistributedCollector([make], frames_per_batch=8),
    "workers over RPC": lambda make: RPCCollector([make], frames_per_batch=8),
}
ALL = [way if "over" not in way else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
# The last three are what the end of a process's own connection, or its own end, looks like.
ERRORS = [ValueError("of theirs"), ConnectionRefusedError("of theirs"), EOFError("of theirs"), SystemExit("of theirs")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", ALL)
def test_a_child_that_cannot_load_what_it_was_given_tells_the_cause(way, error):
    with pytest.raises(WorkerError, match="of theirs") as caught:
        WAYS[way](Unloadable(error))
    assert "exited with code" not in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", ERRORS[1:3], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", ALL)
def test_a_factory_that_raises_what_a_lost_connection_does_is_told(way, error):
    """A simulator that is not there: the worker has not lost us, it is the user's error."""
    with pytest.raises(WorkerError, match="of theirs"):
        WAYS[way](functools.partial(raising, error))


SCRIPT = """
import functools, multiprocessing, sys
import gymnasium as gym, numpy as np, torch
from reap.collectors import Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector
from reap.envs import AsyncEnvPool, ParallelEnv
from reap.modules import ProcessInferenceServer

LONG = 4

class World(gym.Env):
    observation_space = gym.spaces.Box(0, 1e9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, long=LONG):
        self.long = long
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.t += 1
        if self.t > 100:
            raise TooLong(self.t)
        return np.full(2, self.t, np.float32), 1.0, self.t == self.long, False, {}

class TooLong(Exception):
    pass

class Policy(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

def make():
    return World()

def collected(collector):
    with collector:
        return collector.next()["next", "observation"][..., 0].tolist()

def train():
    given = dict(frames_per_batch=8, total_frames=8)
    assert World.__module__ == "__mp_main__"
    print("sync", collected(MultiSyncCollector([World, make], Policy(), **given)))
    print("async", collected(MultiAsyncCollector([functools.partial(World, LONG)], policy_factory=Policy, **given)))
    print("parallel", collected(Collector(ParallelEnv(2, World), Policy(), **given)))
    print("pool", collected(Collector(AsyncEnvPool([make] * 2, backend="multiprocessing"), Policy(), **given)))
    with Evaluator(make, Policy(), num_trajectories=2, backend="process") as evaluator:
        print("evaluator", evaluator.evaluate()["eval/reward"])
    with ProcessInferenceServer(Policy) as server:
        print("server", server.policy_version)
    try:
        collected(MultiSyncCollector([lambda: World(0)], Policy(), frames_per_batch=200))
    except Exception as error:
        print("cause", type(error.__cause__) is TooLong, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=train, daemon=True)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
TIMES = "[1.0, 2.0, 3.0, 4.0]"
SAID = f"""\
sync [{TIMES}, {TIMES}]
async [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]
parallel [{TIMES}, {TIMES}]
pool [{TIMES}, {TIMES}]
evaluator 4.0
server 0
cause True
"""


@pytest.mark.parametrize("way", ["workers", "lanes", "a pool", "an evaluator"])
def test_what_the_main_module_of_a_spawned_process_defines_travels(way, monkeypatch):
    """The main module is set up as in such a process, but here: with the name that classes and functions have there."""
    script = types.ModuleType("__mp_main__")
    exec(SCRIPT, script.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    before = cloudpickle.list_registry_pickle_by_value()
    collector = {
        "workers": lambda: MultiSyncCollector([script.World], policy_factory=script.Policy, frames_per_batch=8),
        "lanes": lambda: Collector(ParallelEnv(1, script.World), frames_per_batch=8),
        "a pool": lambda: Collector(AsyncEnvPool([script.make], backend="multiprocessing"), frames_per_batch=8),
        "an evaluator": lambda: Evaluator(script.make, script.Policy(), num_trajectories=2, backend="process"),
    }[way]()
    with collector:
        if way == "an evaluator":
            assert collector.evaluate()["eval/reward"] == 4
        else:
            assert collector.next()["next", "observation"][..., 0].flatten().tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert cloudpickle.list_registry_pickle_by_value() == before


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_script_that_is_run_in_a_process_of_multiprocessing_uses_its_own_classes(start, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert done.stdout == SAID, done.stderr
    assert done.returncode == 0
