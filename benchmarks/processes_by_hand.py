"""The reference with two processes: what an expert would write for exactly this env and policy.

    apart   each process acts for its own lanes and writes into memory all see
            sync    one batch for all: a semaphore says go, one says done
            async   two batches for each: a byte in a pipe says which is full; first come, first served
    central the policy acts here; per step a semaphore says go to each process, one says done

Columns are `[T, N, …]`, those of `by_hand.Loop`. The consumer gets torch tensors on the shared memory, good
until it asks for the next batch. Processes are forked, so memory without a name and semaphores are simply there.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.envs_and_policies import Case

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]
Batch = dict[str, Tensor]
_FORK: Any = mp.get_context("fork")
_SLOTS = 2  # of each asynchronous process


def semaphore(value: int = 0) -> Any:
    """Return one that forked processes share."""
    return _FORK.Semaphore(value)


def shared(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that forked processes see as well."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def columns(case: Case, lanes: int) -> Columns:
    """One batch of so many lanes."""
    env = case.make()
    seen, act = env.observation_space, env.action_space
    env.close()
    lead = (case.steps, lanes)
    kinds: dict[str, Any] = {
        "obs": ((*lead, *(seen.shape or ())), seen.dtype),
        "next_obs": ((*lead, *(seen.shape or ())), seen.dtype),
        "action": ((*lead, *(act.shape or ())), act.dtype),
        "reward": (lead, np.float32),
        **dict.fromkeys(("terminated", "truncated", "done"), (lead, np.bool_)),
        "ids": (lead, np.int64),
    }
    return {name: shared(*kind) for name, kind in kinds.items()}


def window(whole: Columns, first: int, count: int) -> Columns:
    return {name: column[:, first : first + count] for name, column in whole.items()}


def tensors(whole: Columns) -> Batch:
    return {name: torch.from_numpy(column) for name, column in whole.items()}


class Lanes:
    """One process's envs and, where it decides itself, its policy."""

    def __init__(self, case: Case, worker: int) -> None:
        torch.set_num_threads(1)
        self.case, self.envs = case, [case.make() for _ in range(case.lanes)]
        first = worker * case.lanes
        self.policy = case.policy(probabilistic=False)
        torch.manual_seed(worker)
        self.current = np.stack([env.reset(seed=first + i)[0] for i, env in enumerate(self.envs)])
        self.traj = np.arange(first, first + case.lanes)
        self.next_id = (worker + 1) * 2**40

    def fill(self, into: Columns) -> None:
        """One batch: the flags are cleared at once, and written only where an episode ends."""
        obs, action, ids = into["obs"], into["action"], into["ids"]
        following, reward = into["next_obs"], into["reward"]
        flags = into["terminated"], into["truncated"], into["done"]
        for flag in flags:
            flag[...] = False
        current, traj, policy, continuous = self.current, self.traj, self.policy, self.case.continuous
        seen = torch.from_numpy(current)
        steps = [env.step for env in self.envs]
        with torch.inference_mode():
            for t in range(self.case.steps):
                obs[t] = current
                chosen = policy(seen).numpy()
                action[t] = chosen
                ids[t] = traj
                row, earned = following[t], reward[t]
                for i, a in enumerate(chosen if continuous else chosen.tolist()):
                    o, r, terminated, truncated, _ = steps[i](a)
                    row[i] = o
                    earned[i] = r
                    if terminated or truncated:
                        flags[0][t, i], flags[1][t, i], flags[2][t, i] = terminated, truncated, True
                        o, _ = self.envs[i].reset()
                        traj[i] = self.next_id
                        self.next_id += 1
                    current[i] = o

    def step(self, t: int, into: Columns, current: Array) -> None:
        """One row, decided elsewhere; what is seen next goes to `current`."""
        row, earned = into["next_obs"][t], into["reward"][t]
        actions = into["action"][t]
        for i, a in enumerate(actions if self.case.continuous else actions.tolist()):
            o, r, terminated, truncated, _ = self.envs[i].step(a)
            row[i] = o
            earned[i] = r
            if terminated or truncated:
                into["terminated"][t, i], into["truncated"][t, i], into["done"][t, i] = terminated, truncated, True
                o, _ = self.envs[i].reset()
            current[i] = o


class Processes:
    """Forked processes that end with this one, or with `close`."""

    def __init__(self, count: int, target: Callable[[int], None]) -> None:
        def live(w: int) -> None:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: nobody would say go any more
            target(w)

        self._all = [_FORK.Process(target=live, args=(w,), daemon=True) for w in range(count)]
        gc.freeze()  # or a collection in a child writes to, and so copies, all pages it shares with this process
        for one in self._all:
            one.start()
        gc.unfreeze()

    def close(self) -> None:
        for one in self._all:
            one.terminate()
        for one in self._all:
            one.join()
            one.close()


class Sync:
    """All processes fill their lanes of one common batch, when asked."""

    def __init__(self, case: Case, workers: int = 2) -> None:
        whole = columns(case, workers * case.lanes)
        self._batch = tensors(whole)
        self._go, self._done = [semaphore() for _ in range(workers)], semaphore()

        def work(w: int) -> None:
            lanes, mine = Lanes(case, w), window(whole, w * case.lanes, case.lanes)
            go, done = self._go[w], self._done
            while go.acquire():
                lanes.fill(mine)
                done.release()

        self.close = Processes(workers, work).close

    def __call__(self) -> Batch:
        for go in self._go:
            go.release()
        for _ in self._go:
            self._done.acquire()
        return self._batch


class Async:
    """Each process fills two batches in turn, and waits while both are full or in use."""

    def __init__(self, case: Case, workers: int = 2) -> None:
        slots = [[columns(case, case.lanes) for _ in range(_SLOTS)] for _ in range(workers)]
        self._batches = [tensors(slot) for own in slots for slot in own]
        self._free = [semaphore(_SLOTS) for _ in range(workers)]
        self._full, full = os.pipe()
        self._held: int | None = None

        def work(w: int) -> None:
            lanes, free, n = Lanes(case, w), self._free[w], 0
            while free.acquire():
                lanes.fill(slots[w][n])
                os.write(full, bytes([w * _SLOTS + n]))
                n = (n + 1) % _SLOTS

        self._processes = Processes(workers, work)
        os.close(full)

    def __call__(self) -> Batch:
        if self._held is not None:
            self._free[self._held // _SLOTS].release()
        (self._held,) = os.read(self._full, 1)
        return self._batches[self._held]

    def close(self) -> None:
        self._processes.close()
        os.close(self._full)


class Central:
    """The policy acts here for all lanes; the processes step theirs, row by row."""

    def __init__(self, case: Case, workers: int = 2) -> None:
        self._steps, n = case.steps, workers * case.lanes
        self._columns = columns(case, n)
        self._batch = tensors(self._columns)
        self._current = shared(self._columns["obs"].shape[1:], self._columns["obs"].dtype)
        self._policy = case.policy(probabilistic=False)
        self._traj, self._next_id = np.arange(n), n
        self._go, self._done = [semaphore() for _ in range(workers)], semaphore()

        def work(w: int) -> None:
            lanes, at = Lanes(case, w), slice(w * case.lanes, (w + 1) * case.lanes)
            mine, current = window(self._columns, at.start, case.lanes), self._current[at]
            current[...] = lanes.current
            go, done = self._go[w], self._done
            done.release()
            while True:
                for t in range(case.steps):
                    go.acquire()
                    lanes.step(t, mine, current)
                    done.release()

        self.close = Processes(workers, work).close
        for _ in self._go:
            self._done.acquire()

    def __call__(self) -> Batch:
        whole, current, traj, policy = self._columns, self._current, self._traj, self._policy
        obs, action, ids, over = whole["obs"], whole["action"], whole["ids"], whole["done"]
        for name in ("terminated", "truncated", "done"):
            whole[name][...] = False
        seen = torch.from_numpy(current)
        with torch.inference_mode():
            for t in range(self._steps):
                obs[t] = current
                action[t] = policy(seen).numpy()
                for go in self._go:
                    go.release()
                ids[t] = traj  # while they step
                for _ in self._go:
                    self._done.acquire()
                if over[t].any():
                    (ended,) = over[t].nonzero()
                    traj[ended] = range(self._next_id, self._next_id + len(ended))
                    self._next_id += len(ended)
        return self._batch
