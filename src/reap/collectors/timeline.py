"""Timeline: when each worker collected and when you learned, as one file that Perfetto (ui.perfetto.dev) opens.

    worker 0   ███ rollout ███      ███ rollout ███
    worker 1   ██ rollout ██        ████ rollout ████
    consumer        wait │ █ your code █ │ wait │ █ your code █

Clocks of all processes of a machine are one (CLOCK_MONOTONIC), so the rows lie true to each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reap.errors import UsageError, WrongArgument, WrongState, nearest

_TORCHS = {"activities", "record_shapes", "profile_memory", "with_stack", "with_flops"}
_CONSUMER = 1_000_000  # its row, below those of the workers


@dataclass
class ProfileConfig:
    """What `enable_profile` was told.

    Args:
        workers: whose rollouts are recorded; None: everybody's.
        num_rollouts: how many rollouts of each worker, warm-up included.
        warmup_rollouts: how many of them are left out at the beginning.
        save_path: the file; None: `collector_profile.json` here.
        on_trace_ready: called with the path when it is written.
    """

    workers: Sequence[int] | None = None
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    on_trace_ready: Callable[[Path], Any] | None = None
    ignored: dict[str, Any] = field(default_factory=dict)  # settings of torch's profiler, which is not used

    def __post_init__(self) -> None:
        if self.num_rollouts <= self.warmup_rollouts:
            raise UsageError(
                f"num_rollouts ({self.num_rollouts}) must be above warmup_rollouts ({self.warmup_rollouts})"
            )


class Profiled:
    """The part of a collector that keeps a timeline."""

    _timeline: Timeline | None = None
    _backend: Any
    _batches: int

    def enable_profile(
        self,
        *,
        workers: Sequence[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        on_trace_ready: Callable[[Path], Any] | None = None,
        **ignored: Any,
    ) -> None:
        """Record when each worker collects, and when you learn; see `ProfileConfig`. Before the first batch.

        What TorchRL's profiler is further told (`activities`, `record_shapes`, …) is accepted and changes nothing.
        """
        unknown = sorted(ignored.keys() - _TORCHS)
        if unknown:
            raise WrongArgument(f"enable_profile has no option {unknown[0]!r}{nearest(unknown[0], _TORCHS)}")
        if self._batches:
            raise WrongState("enable_profile comes before the first batch")
        config = ProfileConfig(workers, num_rollouts, warmup_rollouts, save_path, on_trace_ready, ignored)
        self._timeline = Timeline(config, getattr(self, "num_workers", 1))
        self._backend.on_rollout = self._timeline.rollout

    def disable_profile(self) -> None:
        """Stop recording; what was recorded is written."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            self._backend.on_rollout = None
            timeline.write()

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What `enable_profile` was told; None: nothing is recorded."""
        return None if self._timeline is None else self._timeline.config


class Timeline:
    """Collects spans; writes them when every worker has made its rollouts, or the collector ends."""

    def __init__(self, config: ProfileConfig, workers: int) -> None:
        self.config = config
        self.path = Path(config.save_path or "collector_profile.json")
        known = range(workers)
        self._wanted = list(known if config.workers is None else config.workers)
        unknown = [worker for worker in self._wanted if worker not in known]
        if unknown:
            raise UsageError(f"workers names {unknown[0]}; there are 0 to {workers - 1}")
        self._made = dict.fromkeys(self._wanted, 0)
        self._events: list[dict[str, Any]] = []
        self._left: float | None = None  # when the consumer last got a batch
        self._written = False

    def rollout(self, worker: int, span: tuple[float, float], **about: Any) -> None:
        """One worker's rollout, from when to when."""
        made = self._made.get(worker)
        if made is None or made >= self.config.num_rollouts:
            return
        self._made[worker] = made + 1
        if made >= self.config.warmup_rollouts:
            self._span("rollout", worker, *span, **about)
        if all(count >= self.config.num_rollouts for count in self._made.values()):
            self.write()

    def waiting(self, began: float, ended: float) -> None:
        """The consumer asked for a batch at `began` and had it at `ended`."""
        if self._left is not None:
            self._span("your code", _CONSUMER, self._left, began)
        self._span("wait", _CONSUMER, began, ended)
        self._left = ended

    def _span(self, name: str, row: int, began: float, ended: float, **about: Any) -> None:
        if not self._written:
            times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
            self._events.append({"name": name, "ph": "X", "pid": os.getpid(), "tid": row, **times, "args": about})

    def write(self) -> None:
        """The file, once."""
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
