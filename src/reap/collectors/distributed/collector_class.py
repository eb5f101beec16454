"""`collector_class`: what runs inside a remote worker, a single loop or several worker processes."""

from __future__ import annotations

from typing import Any

from reap.arguments import count
from reap.backends.nested_workers import NestedWorkers
from reap.errors import UsageError, WrongArgument, nearest

# By the names of reap's and TorchRL's classes.
_KINDS = {
    "Collector": "single",
    "MultiSyncCollector": "sync",
    "MultiAsyncCollector": "async",
    "AsyncCollector": "async",
    "SyncDataCollector": "single",
    "aSyncDataCollector": "async",
    "MultiSyncDataCollector": "sync",
    "MultiaSyncDataCollector": "async",
}


def nested_workers_for(collector_class: Any, workers: Any) -> NestedWorkers | None:
    """Return the processes that `collector_class` and its number ask for inside each worker; None: a single loop."""
    count("num_workers_per_collector", workers)
    kind = _mode("single" if collector_class is None else collector_class)
    if kind == "single":
        if workers > 1:
            raise UsageError(
                f"num_workers_per_collector={workers} needs processes inside each worker: give collector_class='sync' "
                f"or 'async'; or use lanes, SerialEnv({workers}, …), or more workers"
            )
        return None
    return NestedWorkers(workers, kind == "sync")


def _mode(given: Any) -> str:
    """Return "single", "sync" or "async", for one of these words or for a collector class of reap's or TorchRL's."""
    if isinstance(given, type):
        for base in given.__mro__:
            if base.__module__.startswith(("reap.", "torchrl.")) and base.__name__ in _KINDS:
                _check_no_own_methods(given, base)
                return _KINDS[base.__name__]
    elif isinstance(given, str) and given in ("single", "sync", "async"):
        return given
    elif isinstance(given, str) and given in _KINDS:
        return _KINDS[given]
    hint = nearest(str(given), [*_KINDS, "single", "sync", "async"])
    raise WrongArgument(
        f"collector_class must be 'single', 'sync', 'async' or one of {', '.join(map(repr, _KINDS))}, which are what a "
        f"worker can run, got {given!r}{hint}"
    )


def _check_no_own_methods(given: type, base: type) -> None:
    """Raise if a user's subclass adds methods: workers would run its base instead, and never call them."""
    own = {
        name
        for kind in given.__mro__[: given.__mro__.index(base)]
        for name, value in vars(kind).items()
        if callable(value)
    }
    if own:
        raise UsageError(
            f"collector_class {given.__name__} defines {', '.join(sorted(own))}, which workers would never call: "
            f"they run reap's loop; use hooks (hooks_in_workers=True), postproc or init_fn"
        )
