"""Soak: workers that fail at random for as long as you like, under `on_failure="restart"`. Every frame is checked.

    python -m benchmarks.soak                          each kind of collector for 20 faults
    python -m benchmarks.soak --faults 200 --frames 25_000_000 --only sync async --workers 8 --json soak.json
    python -m benchmarks.soak --docs benchmarks/results/soak/*.json       docs/failures.md and its chart, of all these

The world is predictable (`CountingEnv` under `EchoPolicy`): each row says which lane, episode and step it is, so a row
that is lost, repeated or torn is seen. What must come out: every fault is counted and named, nobody hangs, and nothing
is left behind (processes, descriptors, memory).

Faults are of workers (an env does it, at a step that nobody knows before), of the disk (a checkpoint is written while
no file may grow; a disk is filled beside a buffer of memory-mapped rows), and of links (between network namespaces,
for less and for more than the time after which a node is taken for lost). What a machine cannot do is skipped and said.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import logging
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import commit, describe, versions
from reap import checkpoint
from reap.backends.network.launchers import new_secret
from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv
from reap.errors import NoSpace
from reap.testing import CountingEnv, EchoPolicy
from reap.testing.faults import full_disk, inject

LENGTHS = (3, 1, 5, 40)
LANES = 4  # of each worker
STEPS = 64  # of a rollout
FAULTS = ("raise", "exit", "kill", "segfault", "oom", "hang", "stop", "disk", "descriptors")
BY_LANE = ("batched", "ready")  # kinds whose lanes come as they are ready: in processes, in threads of processes


class Unlucky(CountingEnv):
    """Fails at a step that nobody knows before, and writes down how."""

    def __init__(self, lane: int, every: float, notes: str) -> None:
        super().__init__(LENGTHS, lane)
        self._left, self._notes = int(random.SystemRandom().expovariate(1 / every)) + 50, notes

    def step(self, action: Any) -> Any:
        """Step, or fail."""
        self._left -= 1
        if self._left == 0:
            fault = random.SystemRandom().choice(FAULTS)
            with open(self._notes, "a") as notes:
                notes.write(f"{fault}\n")
            inject(fault)  # type: ignore[arg-type]
        return super().step(action)


def lanes(first: int, every: float, notes: str) -> Callable[[], Any]:
    """A factory of the lanes of one worker, one of which fails now and then."""

    def make() -> Any:
        makers = [
            lambda lane=lane: GymEnv(Unlucky(lane, every, notes) if lane == first else CountingEnv(LENGTHS, lane))
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


class Skipped(Exception):
    """This machine cannot do it; why."""


def make(kind: str, workers: int, every: float, told: list[Any], around: Surroundings) -> tuple[Any, Any]:
    """A collector of this kind, and the buffer it writes to, if it does."""
    makers = [lanes(w * LANES, every, around.notes) for w in range(workers)]
    options: dict[str, Any] = {
        "on_failure": "restart",
        "max_restarts": None,
        "on_restart": told.append,
        "timeout": around.timeout,
        "total_frames": -1,
    }
    whole = workers * LANES * STEPS
    if kind == "sync":
        return MultiSyncCollector(makers, EchoPolicy(), frames_per_batch=whole, cat_results=0, **options), None
    if kind == "async":
        return MultiAsyncCollector(makers, EchoPolicy(), frames_per_batch=LANES * STEPS, **options), None
    if kind in ("background", "memmap"):
        rows = 2 * whole * 64
        storage = (
            LazyTensorStorage(rows) if kind == "background" else LazyMemmapStorage(rows // 8, scratch_dir=around.disk)
        )
        buffer = ReplayBuffer(storage=storage, batch_size=8)
        size = LANES * STEPS
        return MultiAsyncCollector(makers, EchoPolicy(), frames_per_batch=size, replay_buffer=buffer, **options), buffer
    if kind in BY_LANE:
        notes = around.notes
        envs = [
            (lambda n=n: Unlucky(n, every, notes) if n % LANES == 0 else CountingEnv(LENGTHS, n))
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
        every_lane = [(lambda n=n: Unlucky(n, every, around.notes)) for n in range(workers)]
        del options["total_frames"]
        env = ParallelEnv(workers, every_lane, **options)
        return Collector(env, EchoPolicy(), frames_per_batch=workers * STEPS), None
    from reap.collectors.distributed import DistributedCollector, RayCollector, RPCCollector

    remote = {"gloo": DistributedCollector, "nodes": DistributedCollector, "rpc": RPCCollector, "ray": RayCollector}[
        kind
    ]
    options.update(around.launching)
    return remote(makers, EchoPolicy(), frames_per_batch=whole, cat_results=0, sync=True, **options), None


class Surroundings:
    """What a kind of collector needs around it, and the faults that come from there: its disk, its links."""

    launching: Mapping[str, Any] = {}
    timeout = 2.0  # seconds after which one that hangs, or is stopped, is found silent
    disk = ""

    def __init__(self, folder: str) -> None:
        self.folder, self.notes = folder, f"{folder}/notes"
        Path(self.notes).touch()
        self._next = time.monotonic() + 2.0
        self._saved: Path | None = None
        self.count: Counter[str] = Counter()  # faults that were survived without a worker's failure

    def injected(self) -> Counter[str]:
        """Faults by name: those of workers, and of what is around them."""
        return Counter(Path(self.notes).read_text().split()) + self.count

    def disturb(self, collector: Any) -> None:
        """Called again and again: now and then something happens."""
        if time.monotonic() < self._next:
            return
        self._save(collector)
        self._next = time.monotonic() + 2.0 + 4.0 * random.random()

    def _save(self, collector: Any) -> None:
        """A checkpoint that fits on the disk, then one that does not: the first is the one that is loaded."""
        path = f"{self.folder}/checkpoints"
        if self._saved is None or random.random() < 0.5:
            self._saved = checkpoint.save(path, collector=collector, policy=collector.policy)
            return
        state = Kept(collector.state_dict())  # before: newcomers need files that grow
        with contextlib.suppress(NoSpace), full_disk(100):
            checkpoint.save(path, collector=state, policy=collector.policy)
            raise AssertionError("a checkpoint was written to a disk that is full")
        if checkpoint.load(path).path != self._saved:
            raise AssertionError("a checkpoint that did not fit on the disk took the place of one that did")
        self.count["full disk, checkpoint"] += 1

    def close(self) -> None:
        """Leave everything as it was."""


class Kept:
    """A state that was asked for."""

    def __init__(self, state: Any) -> None:
        self.state_dict = lambda: state


class Agents(Surroundings):
    """RPC's, which make files in threads of their own and end the program where those may not grow: none is limited."""

    def _save(self, collector: Any) -> None:
        checkpoint.save(f"{self.folder}/checkpoints", collector=collector, policy=collector.policy)


class SmallDisk(Surroundings):
    """A disk of its own, which is filled to the last byte now and then."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.disk = f"{folder}/disk"
        os.mkdir(self.disk)
        made = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", self.disk]
        done = subprocess.run(made, capture_output=True, text=True) if shutil.which("mount") else None
        if done is None or done.returncode:
            raise Skipped(f"a small disk cannot be mounted here: {done.stderr.strip() if done else 'no mount'}")

    def disturb(self, collector: Any) -> None:
        """Rows were reserved when the buffer was made: a disk without a byte left takes them all the same."""
        if time.monotonic() < self._next:
            return
        rest = Path(self.disk) / "rest"
        with contextlib.suppress(OSError), rest.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(0.5)
        rest.unlink()
        self.count["full disk, buffer"] += 1
        self._next = time.monotonic() + 2.0 + 4.0 * random.random()

    def close(self) -> None:
        subprocess.run(["umount", "-l", self.disk], capture_output=True, check=False)


class Links(Surroundings):
    """Two nodes in network namespaces, whose links are cut now and then; this process is in a third one meanwhile."""

    timeout = 10.0  # a link that was cut for 2.5 s may carry nothing for twice as long: senders wait longer each time

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        from tests.faults.machines import HUB, Machines

        if shutil.which("ip") is None:
            raise Skipped("there is no `ip` here to make network namespaces with")
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._machines, self._home = Machines(), os.open("/proc/self/ns/net", os.O_RDONLY)
        self._cutting: threading.Timer | None = None
        try:
            self._machines.up()
            with open(f"/run/netns/{self._machines.hub}") as hub:
                enter_network(hub.fileno())
        except OSError as error:
            self.close()
            raise Skipped(f"network namespaces are not permitted here: {error}") from None
        secret = Path(folder) / "secret"
        new_secret(secret)
        self.launching = {
            "launcher": "join",
            "secret_file": secret,
            "listen": HUB,
            "tcp_port": 29756,
            "join_timeout": 120,
        }
        command = [
            sys.executable,
            "-m",
            "reap.join",
            "--address",
            f"{HUB}:29756",
            "--secret-file",
            str(secret),
            "--again",
        ]
        for name in (self._machines.a, self._machines.b):
            self._nodes.append(subprocess.Popen(["ip", "netns", "exec", name, *command], stderr=subprocess.DEVNULL))

    def disturb(self, collector: Any) -> None:
        if time.monotonic() < self._next or (self._cutting is not None and self._cutting.is_alive()):
            return
        lost = random.random() < 0.5
        seconds = 8.0 if lost else 2.5 * random.random()
        name = random.choice(["to-a", "to-b"])
        self._link(name, "down")
        self._cutting = threading.Timer(seconds, self._link, (name, "up"))
        self._cutting.start()
        with open(self.notes, "a") as notes:
            notes.write("link-lost\n" if lost else "link-cut\n")
        self._next = time.monotonic() + seconds + 4.0 + 4.0 * random.random()

    def _link(self, name: str, state: str) -> None:
        from tests.faults.machines import ip

        ip("-n", self._machines.hub, "link", "set", name, state)

    def close(self) -> None:
        if self._cutting is not None:
            self._cutting.join()
        for node in self._nodes:
            node.kill()
            node.wait()
        enter_network(self._home)
        os.close(self._home)
        self._machines.down()


def enter_network(namespace: int) -> None:
    """This thread, and those that it starts, are in another network from now on."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


class Cluster(Surroundings):
    """Ray's: messages pass through other processes, which may have to wait for a core, too."""

    timeout = 10.0


AROUND: Mapping[str, type[Surroundings]] = {"memmap": SmallDisk, "nodes": Links, "rpc": Agents, "ray": Cluster}


def soak(
    kind: str, *, faults: int, frames: int = 0, minutes: float = math.inf, workers: int = 2, every: float = 4000.0
) -> dict[str, Any]:
    """Collect until so many workers have failed and so many frames were seen, or so long; what was found."""
    if kind == "ray" and importlib.util.find_spec("ray") is None:
        raise Skipped("Ray is not installed")
    workers = 2 if kind == "nodes" else workers
    with tempfile.TemporaryDirectory(prefix="reap-soak-") as folder, contextlib.ExitStack() as last:
        around = AROUND.get(kind, Surroundings)(folder)
        last.callback(around.close)
        return _soak(kind, around, faults=faults, frames=frames, minutes=minutes, workers=workers, every=every)


def _soak(
    kind: str, around: Surroundings, *, faults: int, frames: int, minutes: float, workers: int, every: float
) -> dict[str, Any]:
    told: list[Any] = []
    collector, buffer = make(kind, workers, every, told, around)
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
            if asked - began > 60 * minutes:
                break
            if buffer is not None:
                time.sleep(0.2)
                witnesses[0].rows = collector.stats()["frames"]
                collector.update_policy_weights_(policy)
            else:
                watch(collector.next(), kind, witnesses, each)
            longest = max(longest, time.monotonic() - asked)
            if not series or time.monotonic() - began - series[-1][0] > max(1.0, (time.monotonic() - began) / 500):
                series.append([time.monotonic() - began, sum(one.rows for one in witnesses), len(told)])
                if warm is None and len(told) >= min(10, faults // 2):
                    warm = at_rest(collector, told, kind, witnesses, each, buffer)
            around.disturb(collector)
        after = at_rest(collector, told, kind, witnesses, each, buffer)
        if buffer is not None:
            with collector.pause():
                check_buffer(buffer, workers)
    finally:
        collector.shutdown()
    seconds, rows = time.monotonic() - began, sum(one.rows for one in witnesses)
    series.append([seconds, rows, len(told)])
    causes = Counter(type(failure.cause).__name__ for failure in told)
    injected = around.injected()
    if sum(injected.values()) - sum(around.count.values()) < len(told) - causes["WorkerSilent"]:  # or merely slow
        raise AssertionError(f"workers failed ({dict(causes)}) that were not made to: {dict(injected)}")
    return {
        "kind": kind,
        "workers": workers,
        "frames": rows,
        "faults": len(told),
        "injected": dict(injected),
        "causes": dict(causes),
        "seconds": round(seconds, 1),
        "longest_wait": round(longest, 2),
        "restart_seconds": [round(failure.seconds, 2) for failure in told],
        "held": {name: [(warm or after)[name], value] for name, value in after.items()},
        "series": [[round(t, 1), frames, failed] for t, frames, failed in series],
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


# ---- what is told of it ---------------------------------------------------------------------------------------------


WORDS = {
    "background": "in the background",
    "parallel": "`ParallelEnv`",
    "ray": "Ray",
    "rpc": "RPC",
    "nodes": "gloo, nodes",
    "memmap": "into a memory-mapped buffer",
    "batched": "`AsyncBatchedCollector`",
    "ready": "`AsyncEnvPool`, threads of processes",
}
DEATHS = ("WorkerDied", "WorkerRaised", "WorkerSilent")


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What several runs have found, by kind of collector."""
    found: dict[str, dict[str, Any]] = {}
    for one in (one for record in records for one in record["found"]):
        old = found.get(one["kind"])
        if old is None:
            found[one["kind"]] = {**one, "injected": Counter(one["injected"]), "causes": Counter(one["causes"])}
            continue
        at = old["series"][-1]
        old["series"] = old["series"] + [[t + at[0], n + at[1], failed + at[2]] for t, n, failed in one["series"]]
        for name in ("frames", "faults", "seconds", "injected", "causes", "restart_seconds"):
            old[name] = old[name] + (Counter(one[name]) if isinstance(old[name], Counter) else one[name])
        old["longest_wait"] = max(old["longest_wait"], one["longest_wait"])
        grew = {run["kind"] + str(n): run["held"]["descriptors"] for n, run in enumerate((old, one))}
        worst = max(grew, key=lambda name: grew[name][1] - grew[name][0])
        old["held"] = (old if worst.endswith("0") else one)["held"]
    return found


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """What was found, a row for each kind of collector."""
    lines = [
        "| | frames checked | faults | workers that failed (died, raised, silent) | seconds until it was back (median) "
        "| longest wait for a batch | descriptors, memory maps, MB: after ten failures and at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = merged(records)
    for kind, one in kinds.items():
        died = ", ".join(str(one["causes"].get(name, 0)) for name in DEATHS)
        kept = ", ".join("{} → {}".format(*one["held"][name]) for name in ("descriptors", "maps", "megabytes"))
        back = f"{np.median(one['restart_seconds']):.2f}" if one["restart_seconds"] else "–"
        wait = "–" if kind in ("background", "memmap") else f"{one['longest_wait']:.1f} s"
        made = f"{one['frames'] / 1e6:.3g} million"
        number = sum(one["injected"].values())
        lines.append(
            f"| {WORDS.get(kind, kind)} | {made} | {number} | {one['faults']} ({died}) | {back} | {wait} | {kept} |"
        )
    everything: Counter[str] = sum((one["injected"] for one in kinds.values()), Counter())
    named = ", ".join(f"{count} × {name}" for name, count in everything.most_common())
    frames, failed = sum(one["frames"] for one in kinds.values()), sum(one["faults"] for one in kinds.values())
    lines += [
        "",
        f"In all {frames / 1e6:.4g} million frames and {failed} workers that failed. Faults by name: {named}.",
    ]
    skipped = {kind: why for record in records for kind, why in record["skipped"].items() if kind not in kinds}
    lines += [f"Skipped: {', '.join(f'{kind} ({why})' for kind, why in skipped.items())}."] if skipped else []
    machines = sorted({f"{r['machine']['cores']} cores ({r['date']}, {r['commit']})" for r in records})
    lines.append(f"On {'; '.join(machines)}.")
    return "\n".join(lines)


def draw(records: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """A chart of what was found: frames and faults of each kind of collector, over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (frames, faults) = plt.subplots(1, 2, figsize=(9, 3.2))
    for kind, one in merged(records).items():
        seconds, made, failed = np.array(one["series"]).T
        frames.plot(seconds, made / 1e6, label=f"{kind}: {one['frames'] / 1e6:.3g} million")
        faults.plot(seconds, failed, label=f"{kind}: {one['faults']}")
    for axis, title in ((frames, "frames that were checked, million"), (faults, "workers that failed")):
        axis.set_title(title)
        axis.set_xlabel("seconds")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture)


def write_docs(records: Sequence[Mapping[str, Any]], page: Path = Path("docs/failures.md")) -> None:
    """Put table and chart where the docs ask for them."""
    draw(records, page.with_name("soak.svg"))
    told = f"<!-- soak -->\n{table(records)}\n<!-- end -->"
    page.write_text(re.sub(r"<!-- soak -->.*?<!-- end -->", lambda _: told, page.read_text(), flags=re.S))


KINDS = ("sync", "async", "background", "memmap", "parallel", *BY_LANE, "gloo", "nodes", "rpc", "ray")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="kinds of collectors")
    parser.add_argument("--faults", type=int, default=20, help="workers of each kind that fail, at least")
    parser.add_argument("--frames", type=int, default=0, help="frames of each kind that are checked, at least")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for each kind, at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=float, default=20_000.0, help="steps between two faults of a worker")
    parser.add_argument("--json", type=Path, help="where figures are written")
    parser.add_argument("--docs", nargs="+", type=Path, help="make docs/failures.md of these, and run nothing")
    options = parser.parse_args()
    if options.docs is not None:
        write_docs([json.loads(path.read_text()) for path in options.docs])
        return
    logging.getLogger("reap").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    record: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": describe()}
    record.update(versions=versions(), command=sys.argv[1:], found=[], skipped={}, wrong={})
    limits = {"faults": options.faults, "frames": options.frames, "minutes": options.minutes}
    for kind in options.only:
        try:
            one = soak(kind, **limits, workers=options.workers, every=options.every)
            record["found"].append(one)
            shown = {name: value for name, value in one.items() if name not in ("series", "restart_seconds")}
            print(json.dumps(shown), file=sys.stderr, flush=True)
        except Skipped as why:
            record["skipped"][kind] = str(why)
            print(f"{kind}: skipped, {why}", file=sys.stderr, flush=True)
        except Exception as error:  # the others are to be seen all the same
            record["wrong"][kind] = repr(error)
            traceback.print_exc()
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record))
    print(table([record]))
    raise SystemExit(f"went wrong: {record['wrong']}" if record["wrong"] else 0)


if __name__ == "__main__":
    main()
