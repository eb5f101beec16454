"""Profiling: a timeline of when each worker collected and when you learned, as one file for Perfetto (ui.perfetto.dev).

    worker 0   ███ rollout ███      ███ rollout ███
    worker 1   ██ rollout ██        ████ rollout ████
    consumer        wait │ █ your code █ │ wait │ █ your code █

All processes of a machine share one clock (CLOCK_MONOTONIC), so times in different rows can be compared.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reap.arguments import count
from reap.backends.base import Backend
from reap.core.measuring.profiling import ACTIVITIES, TraceSettings, activities_of
from reap.errors import UsageError, WrongArgument, nearest

_log = logging.getLogger("reap")
_MOST = 1_000_000  # spans of a timeline: about 200 MB in memory and on disk
_CONSUMER = 1_000_000  # the number of the consumer's row, which puts it below the workers' rows
_WORKER = "{worker_idx}"


@dataclass
class ProfileConfig:
    """The settings of `enable_profile`: one timeline of all workers, and a trace of each one by torch's profiler.

    Args:
        workers: the workers whose rollouts are recorded; None: all.
        num_rollouts: how many rollouts of each worker to record, warm-up included. None: the timeline shows the whole
            run; the traces, which are large, stop after the warm-up and two more rollouts.
        warmup_rollouts: how many rollouts to leave out at the beginning.
        save_path: the timeline's file; None: `collector_profile.json` in the working directory. The traces lie beside
            it (`get_save_path`). If it contains "{worker_idx}", the traces have the worker's number there, and the
            timeline has "timeline".
        activities: what torch's profiler records: "cpu", "cuda" or both; none: only the timeline, no traces.
        record_shapes: record the shapes of operators' inputs.
        profile_memory: record what operators allocate.
        with_stack: record the lines of code that operators come from.
        with_flops: record how many floating-point operations some operators take.
        on_trace_ready: called with the timeline's path when it is written.
    """

    workers: Sequence[int] | None = None
    num_rollouts: int | None = None
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: Sequence[str] = ("cpu", "cuda")
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Path], Any] | None = None

    def __post_init__(self) -> None:
        count("num_rollouts", self.traced_rollouts, least=0)
        count("warmup_rollouts", self.warmup_rollouts, least=0)
        if self.traced_rollouts <= self.warmup_rollouts:
            raise UsageError(
                f"num_rollouts ({self.traced_rollouts}) must be above warmup_rollouts ({self.warmup_rollouts})"
            )
        self.activities = list(self.activities or ())
        unknown = [one for one in self.activities if not isinstance(one, str) or one.lower() not in ACTIVITIES]
        if unknown:
            raise UsageError(f"activities must be among {sorted(ACTIVITIES)}, got {unknown[0]!r}")

    @property
    def traced_rollouts(self) -> int:
        """The number of rollouts that torch's profiler sees, warm-up included."""
        return self.warmup_rollouts + 2 if self.num_rollouts is None else self.num_rollouts

    def get_save_path(self, worker_idx: int) -> Path:
        """Return the path of a worker's trace."""
        path = str(self.save_path or "collector_profile.json")
        if _WORKER in path:
            return Path(path.replace(_WORKER, str(worker_idx)))
        return Path(path).with_stem(f"{Path(path).stem}_{worker_idx}")

    @property
    def timeline_path(self) -> Path:
        """The path of the timeline."""
        return Path(str(self.save_path or "collector_profile.json").replace(_WORKER, "timeline"))

    def get_activities(self) -> list[Any]:
        """Return the activities as torch's `ProfilerActivity`, as far as this machine has them."""
        return activities_of(self.activities)

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Return whether a worker's rollouts are recorded."""
        return self.workers is None or worker_idx in self.workers

    def traces(self, workers: int) -> dict[int, TraceSettings | None]:
        """Return the trace settings of each worker, out of this many; empty if there are no traces."""
        if not self.activities:
            return {}
        return {
            worker: TraceSettings(
                str(self.get_save_path(worker).absolute()),
                self.warmup_rollouts,
                self.traced_rollouts,
                tuple(self.activities),
                self.record_shapes,
                self.profile_memory,
                self.with_stack,
                self.with_flops,
            )
            for worker in range(workers)
            if self.should_profile_worker(worker)
        }


class Profiler:
    """Records the timeline of a collector between `enable` and `disable`."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None

    def enable(self, backend: Backend, num_workers: int, **told: Any) -> None:
        """Record the rollouts of this many workers from now on; `told` holds the fields of `ProfileConfig`."""
        known = {one.name for one in fields(ProfileConfig)}
        unknown = sorted(told.keys() - known)
        if unknown:
            raise WrongArgument(f"enable_profile has no option {unknown[0]!r}{nearest(unknown[0], known)}")
        self.timeline = Timeline(ProfileConfig(**told), num_workers)
        backend.on_rollout = self.timeline.rollout
        traces = self.timeline.config.traces(num_workers)
        if traces:
            backend.profile(traces)

    def disable(self, backend: Backend, num_workers: int) -> None:
        """Stop recording, and write what was recorded."""
        traces = {} if self.timeline is None else self.timeline.config.traces(num_workers)
        if traces:
            backend.profile(dict.fromkeys(traces))
        self.write(backend)

    def write(self, backend: Backend) -> None:
        """Write the timeline, if there is one, and stop recording it."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            backend.on_rollout = None
            timeline.write()


class Timeline:
    """Collects time spans; writes them when every worker has made `num_rollouts`, or when the collector ends."""

    def __init__(self, config: ProfileConfig, workers: int) -> None:
        self.config = config
        self.path = config.timeline_path
        known = range(workers)
        self._wanted = list(known if config.workers is None else config.workers)
        unknown = [worker for worker in self._wanted if worker not in known]
        if unknown:
            raise UsageError(f"workers names {unknown[0]}, but the workers are 0 to {workers - 1}")
        self._made = dict.fromkeys(self._wanted, 0)
        self._events: list[dict[str, Any]] = []
        self._left: float | None = None  # when the consumer last got a batch
        self._written = False

    def rollout(self, worker: int, span: tuple[float, float], **about: Any) -> None:
        """Add one worker's rollout; `span` is its start and end."""
        made, most = self._made.get(worker), self.config.num_rollouts
        if made is None or (most is not None and made >= most):
            return
        self._made[worker] = made + 1
        if most is None or made >= self.config.warmup_rollouts:
            self._span("rollout", worker, *span, **about)
        if most is not None and all(count >= most for count in self._made.values()):
            self.write()

    def waiting(self, began: float, ended: float) -> None:
        """Add the wait of the consumer, who requested a batch at `began` and received it at `ended`."""
        if self._left is not None:
            self._span("your code", _CONSUMER, self._left, began)
        self._span("wait", _CONSUMER, began, ended)
        self._left = ended

    def _span(self, name: str, row: int, began: float, ended: float, **about: Any) -> None:
        if len(self._events) == _MOST and not self._written:
            text = "%s is full: it holds the first %s spans; later ones are not recorded"
            _log.warning(text, self.path, f"{_MOST:,}")
            self.write()
        if not self._written:
            times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
            self._events.append({"name": name, "ph": "X", "pid": os.getpid(), "tid": row, **times, "args": about})

    def write(self) -> None:
        """Write the timeline to its file, once."""
        if self._written:
            return
        self._written = True
        rows = {**{worker: f"worker {worker}" for worker in self._wanted}, _CONSUMER: "consumer"}
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": row, "args": {"name": name}}
            for row, name in rows.items()
        ]
        self.path.write_text(json.dumps({"traceEvents": [*names, *self._events]}))
        if self.config.on_trace_ready is not None:
            self.config.on_trace_ready(self.path)
