"""Soak: workers that fail at random for as long as you like, under `on_failure="restart"`. Every frame is checked.

    python -m benchmarks.soak                          each kind of collector for 20 faults
    python -m benchmarks.soak --faults 200 --frames 25_000_000 --only sync async --workers 8 --json soak.json

The world is predictable (`CountingEnv` under `EchoPolicy`): each row says which lane, episode and step it is, so a row
that is lost, repeated or torn is seen. What must come out: every fault is counted and named, nobody hangs, and nothing
is left behind (processes, descriptors, memory).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv
from reap.testing import CountingEnv, EchoPolicy
from reap.testing.faults import inject

LENGTHS = (3, 1, 5, 40)
LANES = 4  # of each worker
STEPS = 64  # of a rollout
FAULTS = ("raise", "exit", "kill", "segfault", "oom", "hang", "stop")
BY_LANE = ("batched", "ready")  # kinds whose lanes come as they are ready: in processes, in threads of processes
TIMEOUT = 2.0  # seconds after which one that hangs, or is stopped, is found silent


class Unlucky(CountingEnv):
    """Fails at a step that nobody knows before."""

    def __init__(self, lane: int, every: float) -> None:
        super().__init__(LENGTHS, lane)
        self._left = int(random.SystemRandom().expovariate(1 / every)) + 50

    def step(self, action: Any) -> Any:
        """Step, or fail."""
        self._left -= 1
        if self._left < 0:
            inject(random.SystemRandom().choice(FAULTS))  # type: ignore[arg-type]
        return super().step(action)


def lanes(first: int, every: float) -> Callable[[], Any]:
    """A factory of the lanes of one worker, one of which fails now and then."""

    def make() -> Any:
        makers = [
            lambda lane=lane: GymEnv(Unlucky(lane, every) if lane == first else CountingEnv(LENGTHS, lane))
            for lane in range(first, first + LANES)
        ]
        return SerialEnv(LANES, makers)

    return make


class Witness:
    """Sees the rows of some lanes in the order in which they were made, and says whether they are true."""

    def __init__(self, first: int, count: int) -> None:
        self._lane = np.arange(first, first + count)[:, None]
        self._last: dict[str, Any] | None = None
        self.rows = self.cuts = 0

    def see(self, batch: Any) -> None:
        """The next rows, `[lanes, time]`; rows that are no frames are at the end of a lane."""
        mask = batch.get(("collector", "mask"), None)
        if mask is not None and not bool(mask.all()):
            for lane in range(len(mask)):  # a step is missing here and there: look at each lane by itself
                self._see(batch[lane : lane + 1, mask[lane]], slice(lane, lane + 1))
        else:
            self._see(batch, slice(None))

    def _see(self, batch: Any, of: slice) -> None:
        if not batch.shape[-1]:
            return
        seen = {
            "id": batch["collector", "traj_ids"].numpy(),
            "episode": batch["observation"][..., 1].numpy(),
            "step": batch["observation"][..., 2].numpy(),
            "done": batch["next", "done"][..., 0].numpy(),
        }
        lane, episode, step = self._lane[of], seen["episode"], seen["step"]
        action = batch["action"][..., 0].numpy()
        length = np.array(LENGTHS)[episode.astype(int) % len(LENGTHS)]
        expect("lane", batch["observation"][..., 0].numpy() == lane)
        expect("next step", batch["next", "observation"][..., 2].numpy() == step + 1)
        expect("action", action == 3 * lane + 5 * episode + 7 * step)
        expect("reward", batch["next", "reward"][..., 0].numpy() == step + 1 + action / 8)
        expect("end", seen["done"] == (step + 1 >= length))
        cut = batch["collector", "cut"].numpy()
        shape = (len(self._lane), 1)
        if self._last is None:
            self._last = {"id": np.full(shape, -1), "episode": np.full(shape, -1.0), "step": np.full(shape, -1.0)}
            self._last["done"] = np.ones(shape, bool)
        before = {name: np.concatenate([self._last[name][of], values[:, :-1]], 1) for name, values in seen.items()}
        begins = seen["id"] != before["id"]
        expect("ids only grow", seen["id"] >= before["id"])
        expect("a trajectory begins at its beginning", ~begins | (step == 0))
        expect("one that did not end is marked", ~begins | before["done"] | cut)
        goes_on = (step == before["step"] + 1) & (episode == before["episode"]) & ~before["done"]
        expect("no row is missing, none comes twice", begins | goes_on)
        for name, values in seen.items():
            self._last[name][of] = values[:, -1:]
        self.rows += step.size
        self.cuts += int(cut.sum())


def expect(what: str, true: Any) -> None:
    """Raise if it is not so everywhere."""
    if not np.all(true):
        raise AssertionError(f"not so: {what}, in {int((~true).sum())} of {true.size} rows")


def held() -> dict[str, int]:
    """What this process holds."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "children": len(children.read_text().split()) if children.exists() else 0,
        "megabytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20,
    }


def make(kind: str, workers: int, every: float, told: list[Any]) -> tuple[Any, Any]:
    """A collector of this kind, and the buffer it writes to, if it does."""
    makers = [lanes(w * LANES, every) for w in range(workers)]
    options: dict[str, Any] = {
        "on_failure": "restart",
        "max_restarts": None,
        "on_restart": told.append,
        "timeout": TIMEOUT,
        "total_frames": -1,
    }
    whole = workers * LANES * STEPS
    if kind == "sync":
        return MultiSyncCollector(makers, EchoPolicy(), frames_per_batch=whole, cat_results=0, **options), None
    if kind == "async":
        return MultiAsyncCollector(makers, EchoPolicy(), frames_per_batch=LANES * STEPS, **options), None
    if kind == "background":
        buffer = ReplayBuffer(storage=LazyTensorStorage(2 * whole * 64), batch_size=8)
        size = LANES * STEPS
        return MultiAsyncCollector(makers, EchoPolicy(), frames_per_batch=size, replay_buffer=buffer, **options), buffer
    if kind in BY_LANE:
        envs = [
            (lambda n=n: Unlucky(n, every) if n % LANES == 0 else CountingEnv(LENGTHS, n))
            for n in range(workers * LANES)
        ]
        options["envs_per_worker"] = LANES
        if kind == "batched":
            options["env_backend"] = "multiprocessing"
            return AsyncBatchedCollector(envs, EchoPolicy(), frames_per_batch=whole, **options), None
        del options["total_frames"]
        pool = AsyncEnvPool(envs, backend="multiprocessing", worker_threads=True, **options)
        return Collector(pool, EchoPolicy(), frames_per_batch=whole), None
    if kind == "parallel":
        every_lane = [(lambda n=n: Unlucky(n, every)) for n in range(workers)]
        del options["total_frames"]
        env = ParallelEnv(workers, every_lane, **options)
        return Collector(env, EchoPolicy(), frames_per_batch=workers * STEPS), None
    if kind == "gloo":
        from reap.collectors.distributed import DistributedCollector

        return DistributedCollector(
            makers, EchoPolicy(), frames_per_batch=whole, cat_results=0, sync=True, **options
        ), None
    from reap.collectors.distributed import RayCollector

    return RayCollector(makers, EchoPolicy(), frames_per_batch=whole, cat_results=0, sync=True, **options), None


def soak(kind: str, *, faults: int, frames: int = 0, workers: int = 2, every: float = 4000.0) -> dict[str, Any]:
    """Collect until so many workers have failed and so many frames were seen; what was found."""
    told: list[Any] = []
    collector, buffer = make(kind, workers, every, told)
    each = 1 if kind in ("parallel", *BY_LANE) else LANES
    witnesses = [Witness(n * each, each) for n in range(workers * (LANES if kind in BY_LANE else 1))]
    series: list[list[float]] = []
    began, longest, warm = time.monotonic(), 0.0, None
    policy = collector.policy
    try:
        if buffer is not None:
            collector.start()
        while len(told) < faults or sum(one.rows for one in witnesses) < frames:
            asked = time.monotonic()
            if buffer is not None:
                time.sleep(0.2)
                witnesses[0].rows = collector.stats()["frames"]
                collector.update_policy_weights_(policy)
            else:
                watch(collector.next(), kind, witnesses, each)
            longest = max(longest, time.monotonic() - asked)
            if not series or time.monotonic() - began - series[-1][0] > 1.0:
                series.append([time.monotonic() - began, sum(one.rows for one in witnesses), len(told)])
                if warm is None and len(told) >= min(10, faults // 2):
                    warm = at_rest(collector, told, kind, witnesses, each, buffer)
        after = at_rest(collector, told, kind, witnesses, each, buffer)
        if buffer is not None:
            with collector.pause():
                check_buffer(buffer, workers)
    finally:
        collector.shutdown()
    seconds, rows = time.monotonic() - began, sum(one.rows for one in witnesses)
    causes = Counter(type(failure.cause).__name__ for failure in told)
    return {
        "kind": kind,
        "workers": workers,
        "frames": rows,
        "faults": len(told),
        "causes": dict(causes),
        "seconds": round(seconds, 1),
        "longest_wait": round(longest, 2),
        "median_restart": round(float(np.median([failure.seconds for failure in told])), 2) if told else None,
        "held": {name: [(warm or after)[name], value] for name, value in after.items()},
        "series": series,
    }


def at_rest(collector: Any, told: Sequence[Any], kind: str, witnesses: Any, each: int, buffer: Any) -> dict[str, int]:
    """What is held when nobody is being replaced."""
    while kind != "parallel" and collector.stats()["restarts"] > len(told):
        if buffer is None:
            watch(collector.next(), kind, witnesses, each)
        else:
            time.sleep(0.05)
    return held()


def watch(batch: Any, kind: str, witnesses: Sequence[Witness], each: int) -> None:
    """Show each worker's rows to its witness."""
    if kind == "async":
        witnesses[batch.origin.worker].see(batch)
        return
    if kind == "batched":
        for lane, witness in enumerate(witnesses):
            witness.see(batch[batch["env_index"] == lane].unsqueeze(0))
        return
    for w, witness in enumerate(witnesses):
        witness.see(batch[w * each : (w + 1) * each])


def check_buffer(buffer: ReplayBuffer, workers: int) -> None:
    """The rows of each lane that a buffer holds, in the order in which they were written."""
    rows = buffer[:]
    for lane in range(workers * LANES):
        own = rows[rows["observation"][:, 0] == lane]
        own = own[torch.argsort(own["collector", "traj_ids"] * 64 + own["observation"][:, 2].long())]  # it is a ring
        begins = (own["observation"][:, 2] == 0).nonzero().squeeze(-1)
        if len(begins):
            Witness(lane, 1).see(own[int(begins[0]) :].unsqueeze(0))  # the oldest trajectory may be half overwritten


def draw(results: Path, picture: Path) -> None:
    """A chart of what was found: frames and faults of each kind of collector, over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (frames, faults) = plt.subplots(1, 2, figsize=(9, 3.2))
    for one in json.loads(results.read_text()):
        seconds, made, failed = np.array(one["series"]).T
        frames.plot(seconds, made / 1e6, label=f"{one['kind']}: {one['frames'] / 1e6:.1f} million")
        faults.plot(seconds, failed, label=f"{one['kind']}: {one['faults']}")
    for axis, title in ((frames, "frames that were checked, million"), (faults, "workers that failed")):
        axis.set_title(title)
        axis.set_xlabel("seconds")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture)


KINDS = ("sync", "async", "background", "parallel", *BY_LANE, "gloo", "ray")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS[:-1])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=float, default=20_000.0, help="steps between two faults of a worker")
    parser.add_argument("--json", type=Path, help="where figures are written")
    parser.add_argument("--chart", type=Path, help="draw what --json holds, and run nothing")
    options = parser.parse_args()
    if options.chart is not None:
        draw(options.json, options.chart)
        return
    logging.getLogger("reap").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = []
    for kind in options.only:
        one = soak(kind, faults=options.faults, frames=options.frames, workers=options.workers, every=options.every)
        found.append(one)
        print({name: value for name, value in one.items() if name != "series"}, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
