"""Replay buffers beside TorchRL's: what a learner waits for between two updates.

    uniform       sample(256) of 1M rows of CartPole frames
    slices        sample(8192) as 256 slices of 32
    prioritized   sample(256) and new priorities for it
    extend        32 lanes × 64 steps in

Contenders take turns inside one run, each with the same rows; what is printed are medians of paired ratios (TorchRL's
time / reap's). TorchRL's priorities need its compiled tree: where that does not load, reap's time stands alone.

python -m benchmarks.buffers [--rows 1000000] [--rounds 200] [--only uniform]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.single import calls, race
from reap import data as ours

CASES = ("uniform", "slices", "prioritized", "extend")


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


def measure(case: str, frames: TensorDict, rounds: int) -> dict[str, Any]:
    """Medians of one case."""
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
        times = "   ".join(f"{name} {found[f'{name}_us']:8.0f} µs" for name in found["calls"])
        print(f"{case:12} {times}   " + (f"{found['ratio']:5.1f}×" if "ratio" in found else "TorchRL's tree: absent"))
    return results


if __name__ == "__main__":
    main()
