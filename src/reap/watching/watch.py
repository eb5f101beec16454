"""Watch: a live view of a running collector: `collector.watch()`, and from elsewhere `reap watch PID`.

    collector ◄── sampled once a second, from a thread; no call to a worker, no waiting ──► Views ──► PageServer
                                                                                              └──► registry: a file

It references its collector only weakly, and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from typing import Any

import torch

from reap.arguments import whole
from reap.errors import WrongState
from reap.watching.registry import register
from reap.watching.samples import RunInfo, Sample, Views, WorkerSample, memory_of
from reap.watching.server import PageServer

EVERY = 1.0  # seconds between two samples
_COLLECT = "collect_seconds"


class Watch:
    """A web page that shows what a collector is doing.

    >>> watch = collector.watch()
    >>> watch.url
    'http://127.0.0.1:40213/…/'
    """

    def __init__(self, collector: Any, port: int = 0) -> None:
        whole("port", port, least=0, most=65535)
        self._collector = weakref.ref(collector)
        self._lags: Counter[int] = Counter()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._owner = os.getpid()
        self._views = Views(
            RunInfo(
                name=type(collector).__name__,
                pid=os.getpid(),
                total=float(collector.options.total),
                in_step=_in_step(collector),
                frames_per_batch=collector.requested_frames_per_batch,
                cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            )
        )
        self._views.add(self._sample(collector))
        self._server = PageServer(self.view, self.stacks, port)
        self.url = self._server.url
        try:
            entry = {"pid": os.getpid(), "port": self._server.port, "url": self.url, "name": type(collector).__name__}
            self._file = register(entry)
        except BaseException:
            self._server.close()
            raise
        collector._listeners.add(self._count_lags)
        self._thread = threading.Thread(target=self._run, name="reap-looks", daemon=True)
        self._thread.start()

    def view(self) -> dict[str, Any]:
        """Return what the page shows, as a dictionary."""
        collector, now = self._collector(), None
        if collector is not None and not self._closed.is_set():
            with contextlib.suppress(RuntimeError):
                now = self._sample(collector)
        with self._lock:
            return self._views.view(now)

    def stacks(self) -> dict[str, str]:
        """Return the current stack of each worker."""
        collector = self._collector()
        if collector is None:
            raise WrongState("this collector is gone")
        found: dict[str, str] = collector.stacks()
        return found

    def close(self) -> None:
        """Stop serving. May be called twice. A collector calls it when it is closed."""
        if self._closed.is_set() or self._owner != os.getpid():
            return
        self._closed.set()
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
        collector = self._collector()
        if collector is not None:
            collector._listeners.remove(self._count_lags)
        self._server.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __repr__(self) -> str:
        return f"Watch({self.url}{', closed' if self._closed.is_set() else ''})"

    def _repr_html_(self) -> str:
        """Return a link to the page, for notebooks."""
        return f'<a href="{self.url}" target="_blank" rel="noreferrer">watch it</a>'

    # ---- looking --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(EVERY):
            collector = self._collector()
            if collector is not None:
                with contextlib.suppress(RuntimeError):  # a dictionary changed size meanwhile: skip this sample
                    sample = self._sample(collector)
                    with self._lock:
                        self._views.add(sample)
            del collector  # hold no reference while this thread waits

    def _count_lags(self, batch: Any) -> None:
        """Count the frames of a batch by their policy lag."""
        collector = self._collector()
        if collector is None:
            return
        origin = getattr(batch, "origin", None)
        versions = batch.get("policy_version", None)
        if origin is not None:
            self._lags[max(int(origin.lag), 0)] += batch.numel()
        elif isinstance(versions, torch.Tensor):
            ages, counts = torch.unique(collector.policy_version - versions, return_counts=True)
            for age, count in zip(ages.tolist(), counts.tolist()):
                self._lags[max(int(age), 0)] += count
        elif self._views.info.in_step is not False:
            self._lags[0] += batch.numel()  # all made between two updates

    def _sample(self, collector: Any) -> Sample:
        """Return a sample of what this process knows, without calling workers. Errors are left to the collector."""
        if (catch_up := getattr(collector._runner, "catch_up", None)) is not None:
            catch_up()  # count what free-running workers have collected
        backend, pipeline = collector._backend, collector._pipeline
        busy, waited = collector._clock.so_far(working=collector._life.busy is not None)
        recent = backend.episodes.recent()
        doing = {one.index: one for one in backend.activity()}
        reports = backend.reports(collector._clock)
        return Sample(
            time=time.monotonic(),
            frames=pipeline.frames,
            batches=pipeline.batches,
            version=collector.policy_version,
            restarts=backend.restarts,
            learner=None if collector._runner is not None else waited,
            collecting=busy,
            workers=[_worker(report, doing.get(report.index)) for report in reports],
            lags=dict(self._lags),
            returns=recent[:, 1].tolist(),
            lengths=recent[:, 2].tolist(),
            episodes=sum(report.stats["episodes"] for report in reports),
            memory=memory_of(os.getpid()),
            closed=collector._life.why_closed,
        )


def _worker(report: Any, doing: Any) -> WorkerSample:
    stats = report.stats
    env, policy = (float(stats[name] or 0.0) for name in ("env_seconds", "policy_seconds"))
    loop = max(float(stats[_COLLECT]) - env - policy, 0.0)
    rest = (float(stats[name] or 0.0) for name in ("transport_seconds", "wait_seconds"))
    lanes = 1 if doing is None else doing.lanes
    return WorkerSample(
        index=report.index,
        alive=report.alive,
        frames=report.frames,
        lanes=lanes,
        steps=report.size // max(lanes, 1),
        seconds=(env, policy, loop, *rest),
        doing="ended" if doing is None else doing.text,
        pid=None if doing is None else doing.pid,
        memory=None if doing is None else memory_of(doing.pid),
    )


def _in_step(collector: Any) -> bool | None:
    delivery = getattr(collector._backend, "delivery", None)
    return None if delivery is None else bool(delivery.in_step)
