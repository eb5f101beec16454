"""Traces rollouts with torch's profiler, in the worker's process, into one file that Perfetto and Chrome open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


def activities_of(names: Any) -> list[ProfilerActivity]:
    """Return torch's profiler activities by name, without "cuda" if this machine has no CUDA device."""
    there = [name.lower() for name in names if name.lower() != "cuda" or torch.cuda.is_available()]
    return [ACTIVITIES[name] for name in there]


@dataclass(frozen=True)
class TraceSettings:
    """Which rollouts of one worker are traced, with which profiler options, and into which file."""

    path: str
    warmup_rollouts: int
    num_rollouts: int  # including the warm-up
    activities: tuple[str, ...]
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool


class RolloutTracer:
    """Replaces a worker's `fill` until enough rollouts are traced or `end` is called."""

    def __init__(self, worker: Any, settings: TraceSettings) -> None:
        self._worker, self._fill, self._settings = worker, worker.fill, settings
        self._made = 0
        self._profiler: profile | None = None
        worker.fill = self.fill

    def fill(self, slot: Any, *, random: bool = False) -> Any:
        """Collect one rollout, and trace it unless it belongs to the warm-up."""
        settings = self._settings
        self._made += 1
        if self._made > settings.warmup_rollouts and self._profiler is None:
            self._profiler = profile(
                activities=activities_of(settings.activities),
                record_shapes=settings.record_shapes,
                profile_memory=settings.profile_memory,
                with_stack=settings.with_stack,
                with_flops=settings.with_flops,
            )
            self._profiler.start()  # must happen in the thread that collects
        try:
            return self._fill(slot, random=random)
        finally:
            if self._made >= settings.num_rollouts:
                self.end()

    def end(self) -> None:
        """Write the trace and restore the worker's own `fill`. May be called twice."""
        vars(self._worker).pop("fill", None)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            path = Path(self._settings.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
