"""Replay buffers beside TorchRL's: what a learner waits for between two updates.

    uniform       sample(256) of 1M rows of CartPole frames
    slices        sample(8192) as 256 slices of 32
    prioritized   sample(256) and new priorities for it
    extend        32 lanes × 64 steps in
    ingest        a batch of 2 workers × 16 lanes of CartPole, delivered / written into a buffer by the workers
    writing       sample(256) of 1M rows while nobody writes / while two workers do

TorchRL's priorities need its compiled tree: where that does not load, reap's time stands alone. The last two are reap
beside itself: `writing` in seconds of CPU, since three processes share the cores there.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.board import REAP, TORCHRL, Budget, Contender, Probe, Race, Row, Workload, ratio
from reap import data as ours
from reap.collectors import MultiSyncCollector
from reap.envs import GymEnv, SerialEnv

LANES, STEPS, ROWS = 16, 64, 1_000_000
GROUP = "replay buffers"


@cache
def cartpole(rows: int) -> TensorDict:
    """Frames as a collector delivers them; episodes of 20 to 200 steps."""
    torch.manual_seed(0)
    ends = torch.randint(20, 200, (rows // 20 + 1,)).cumsum(0)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[ends[ends <= rows] - 1] = True
    ids = torch.searchsorted(ends, torch.arange(rows), right=True)

    def flags() -> dict[str, torch.Tensor]:
        return {name: torch.zeros(rows, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}

    leaves = {
        "observation": torch.randn(rows, 4),
        "action": torch.nn.functional.one_hot(torch.randint(2, (rows,)), 2),
        **flags(),
        "next": {"observation": torch.randn(rows, 4), "reward": torch.ones(rows, 1), **flags(), "done": done},
        "collector": {"traj_ids": ids},
    }
    return TensorDict(leaves, batch_size=[rows])


def contender(library: Any, case: str, frames: TensorDict) -> Callable[[], Any]:
    """One call of a case, on a buffer that holds all frames."""
    rows = len(frames)
    storage = library.LazyTensorStorage(rows)
    if case == "prioritized":
        buffer = library.TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=256)
        buffer.extend(frames)
        buffer.update_priority(torch.arange(rows), torch.rand(rows))
        errors = torch.rand(64, 256)
        turn = iter(range(10**9))

        def learn() -> Any:
            sample = buffer.sample()
            sample["td_error"] = errors[next(turn) % 64]
            buffer.update_tensordict_priority(sample)
            return sample

        return learn
    key = ("collector", "traj_ids")
    sampler = library.SliceSampler(slice_len=32, traj_key=key) if case == "slices" else library.RandomSampler()
    size = 256 * 32 if case == "slices" else 256
    buffer = library.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=size)
    buffer.extend(frames)
    if case == "extend":
        batch = frames[:2048].clone()
        return lambda: buffer.extend(batch)
    return lambda: buffer.sample()


def workers(buffer: Any = None) -> MultiSyncCollector:
    """Two of them, with or without a buffer to write to."""
    make = [lambda: SerialEnv(LANES, lambda: GymEnv("CartPole-v1"))] * 2
    policy = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    return MultiSyncCollector(make, policy, frames_per_batch=2 * LANES * STEPS, replay_buffer=buffer)


def beside_theirs(case: str, scale: float) -> dict[str, Contender]:
    """One call of each library's."""
    import torchrl.data as theirs

    frames, turn = cartpole(int(ROWS * scale)), 1 if case == "slices" else 20
    runs = {REAP: Contender(contender(ours, case, frames), 1, turn=turn)}
    with contextlib.suppress(RuntimeError):  # its compiled tree is not there
        runs[TORCHRL] = Contender(contender(theirs, case, frames), 1, turn=turn)
    return runs


def ingest(scale: float) -> dict[str, Contender]:
    """What it costs workers to write into a buffer themselves."""
    buffer = ours.ReplayBuffer(storage=ours.LazyTensorStorage(int(ROWS * scale)))
    without, filling = workers(), workers(buffer)
    frames = 2 * LANES * STEPS
    return {
        "delivered": Contender(without.next, frames, without.shutdown),
        REAP: Contender(filling.next, frames, filling.shutdown),
    }


def writing(budget: Budget, workload: Workload) -> list[Row]:
    """What it costs a reader that others write."""
    count = int(ROWS * budget.scale)
    buffer = ours.ReplayBuffer(storage=ours.LazyTensorStorage(count), batch_size=256)
    with workers(buffer) as collector:
        collector.next()
        rows = buffer[:]
        while buffer.write_count < count:
            buffer.extend(rows)
        collector.start()

        def samples() -> float:
            began = time.thread_time()
            for _ in range(100):
                buffer.sample()
            return (time.thread_time() - began) / 100

        pairs = []
        for _ in range(3 if budget.scale < 1 else 15):
            with collector.pause():
                quiet = samples()
            pairs.append((quiet, samples()))
    speeds = {
        "nobody writes": 1e6 * statistics.median(a for a, _ in pairs),
        REAP: 1e6 * statistics.median(b for _, b in pairs),
    }
    return [Row(GROUP, workload.name, "µs of CPU", speeds, {"nobody writes": ratio(pairs, 0.9)}, len(pairs))]


def workloads() -> list[Workload]:
    """Aims: as fast as TorchRL's at least; what was promised where more was."""
    names = {
        "uniform": ("sample(256) of 1M rows", 3.0),
        "slices": ("256 slices of 32 steps", 3.0),
        "prioritized": ("sample(256) by priority, and new priorities", 1.0),
        "extend": ("extend by 2048 rows", 1.0),
    }
    return [
        *(
            Race(GROUP, name, {TORCHRL: aim}, case != "extend", partial(beside_theirs, case), unit="calls/s")
            for case, (name, aim) in names.items()
        ),
        Race(GROUP, "2 workers × 16 lanes write into a buffer", {"delivered": 0.9}, True, ingest, workers=True),
        Probe(GROUP, "sample(256) of 1M rows while two workers write", {"nobody writes": 0.9}, measure=writing),
    ]
