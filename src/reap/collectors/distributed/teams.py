"""What runs inside a far worker: one loop, or a collector's processes."""

from __future__ import annotations

from typing import Any

from reap.backends.team import Team
from reap.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.single import Collector
from reap.errors import UsageError, nearest

_KINDS: dict[Any, str] = {
    Collector: "single",
    MultiSyncCollector: "sync",
    MultiAsyncCollector: "async",
    AsyncCollector: "async",
}


def team_for(collector_class: Any, workers: Any) -> Team | None:
    """What `collector_class` and `num_workers_per_collector` ask for; None: a worker and nothing else."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"num_workers_per_collector must be a whole number ≥ 1, got {workers!r}")
    kind = collector_class or "single"
    if isinstance(kind, type):
        kind = _KINDS.get(kind, kind)
    if kind not in ("single", "sync", "async"):
        names = {found.__name__: found for found in _KINDS}
        if not isinstance(kind, str) or kind not in names:
            raise UsageError(
                f"collector_class must be 'single', 'sync', 'async' or one of {sorted(names)}, which are what a worker "
                f"can run, got {kind!r}{nearest(str(kind), [*names, 'single', 'sync', 'async'])}"
            )
        kind = _KINDS[names[kind]]
    if kind == "single":
        if workers > 1:
            raise UsageError(
                f"num_workers_per_collector={workers} needs processes inside each worker: give collector_class='sync' "
                f"or 'async'; or lanes, SerialEnv({workers}, …), or more workers"
            )
        return None
    return Team(workers, kind == "sync")
