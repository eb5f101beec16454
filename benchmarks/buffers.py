"""Replay buffers beside TorchRL's: what a learner waits for between two updates.

    uniform       sample(256) of 1M rows of CartPole frames
    slices        sample(8192) as 256 slices of 32
    prioritized   sample(256) and new priorities for it
    extend        32 lanes × 64 steps in
    ingest        a batch of 2 workers × 16 lanes of CartPole, delivered / written into a buffer by the workers
    writing       sample(256) of 1M rows while nobody writes / while two workers do

Contenders take turns inside one run, each with the same rows; what is printed are medians of paired ratios (TorchRL's
time / reap's). TorchRL's priorities need its compiled tree: where that does not load, reap's time stands alone.
The last two are reap beside itself: `writing` in seconds of CPU, since three processes share the cores there.

python -m benchmarks.buffers [--rows 1000000] [--rounds 200] [--only uniform]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.single import calls, race
from reap import data as ours
from reap.collectors import MultiSyncCollector
from reap.envs import GymEnv, SerialEnv

CASES = ("uniform", "slices", "prioritized", "extend", "ingest", "writing")
LANES, STEPS = 16, 64


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


def ingest(rows: int, rounds: int) -> dict[str, Any]:
    """What it costs workers to write into a buffer themselves."""
    buffer = ours.ReplayBuffer(storage=ours.LazyTensorStorage(rows))
    with workers() as without, workers(buffer) as filling:
        seconds = race({"delivered": without.next, "written": filling.next}, max(rounds // 4, 3))
    found: dict[str, Any] = {f"{name}_us": statistics.median(times) * 1e6 for name, times in seconds.items()}
    found["ratio"] = statistics.median(a / b for a, b in zip(seconds["delivered"], seconds["written"]))
    return found


def writing(count: int, rounds: int) -> dict[str, Any]:
    """What it costs a reader that others write."""
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
        for _ in range(max(rounds // 10, 3)):
            with collector.pause():
                idle = samples()
            pairs.append((idle, samples()))
    found = {"idle_us": 1e6 * statistics.median(a for a, _ in pairs)}
    found["writing_us"] = 1e6 * statistics.median(b for _, b in pairs)
    return {**found, "ratio": statistics.median(a / b for a, b in pairs)}


def measure(case: str, frames: TensorDict, rounds: int) -> dict[str, Any]:
    """Medians of one case."""
    if case in ("ingest", "writing"):
        return (ingest if case == "ingest" else writing)(len(frames), rounds)
    import torchrl.data as theirs

    runs = {"reap": contender(ours, case, frames)}
    with contextlib.suppress(RuntimeError):  # its compiled tree is not there
        runs["torchrl"] = contender(theirs, case, frames)
    if case == "slices":
        rounds = max(rounds // 10, 3)
    seconds = race(runs, rounds)
    found: dict[str, Any] = {f"{name}_us": statistics.median(times) * 1e6 for name, times in seconds.items()}
    if "torchrl" in seconds:
        found["ratio"] = statistics.median(b / a for a, b in zip(seconds["reap"], seconds["torchrl"]))
    return {**found, "calls": {name: calls(run) for name, run in runs.items()}}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", choices=CASES)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    frames, results = cartpole(options.rows), {}
    for case in [options.only] if options.only else CASES:
        results[case] = found = measure(case, frames, options.rounds)
        names = [key.removesuffix("_us") for key in found if key.endswith("_us")]
        times = "   ".join(f"{name} {found[f'{name}_us']:8.0f} µs" for name in names)
        print(f"{case:12} {times}   " + (f"{found['ratio']:5.2f}×" if "ratio" in found else "TorchRL's tree: absent"))
    return results


if __name__ == "__main__":
    main()
