"""Ctrl-C while lanes are under way: whenever it comes, nothing hangs afterwards and no frame is a wrong one."""

from __future__ import annotations

import pytest

SCRIPT = """
import os, random, signal, threading, time, torch
from reap.collectors import AsyncBatchedCollector
from reap.envs import GymEnv
from reap.testing import CountingEnv, EchoPolicy

random.seed(0)
lengths = ((3, 1, 5), (2, 2, 7), (4,), (1,))
make = [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]
c = AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=120, {options})
hits = 0

def interrupt(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(10):
    thread = threading.Thread(target=interrupt, args=(random.random() * 0.03,))
    try:
        thread.start()
        while thread.is_alive():  # Python swallows one that comes in a finalizer
            c.next()
        time.sleep(0.02)
    except KeyboardInterrupt:
        hits += 1
    thread.join()
    for _ in range(2):
        batch = c.next()
        ids = batch["collector", "traj_ids"]
        for one in ids.unique():
            frames = batch[ids == one]
            lane, episode, first = frames["observation"][0].tolist()
            want = [[lane, episode, first + t] for t in range(len(frames) + 1)]
            assert frames["observation"].tolist() == want[:-1]
            assert frames["next", "observation"].tolist() == want[1:]
c.shutdown()
print("hits", hits)
"""


@pytest.mark.parametrize(
    "options",
    [
        'env_backend="threading"',
        'env_backend="multiprocessing"',
        pytest.param('env_backend="multiprocessing", worker_threads=True, envs_per_worker=2', marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_at_any_moment(options, programs):
    code = SCRIPT.replace("{options}", options)
    done = programs.run(code, timeout=110)
    assert done.returncode == 0, done.stderr
    said, hits = done.stdout.split()
    assert said == "hits"
    assert int(hits) >= 5
