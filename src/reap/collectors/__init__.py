"""Collectors: the public classes. Each combines a plan, a backend and an assembler; none has a loop of its own."""

import warnings
from typing import Any

from reap.collectors.base import BaseCollector
from reap.collectors.batched import AsyncBatchedCollector
from reap.collectors.evaluator import Evaluator, record_video
from reap.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from reap.collectors.parts.profiling import ProfileConfig
from reap.collectors.parts.updaters import (
    MultiProcessedWeightUpdater,
    PolicyVersion,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from reap.collectors.single import Collector
from reap.core.policy import RandomPolicy
from reap.failures import WorkerFailure

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "Evaluator",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "PolicyVersion",
    "ProfileConfig",
    "RandomPolicy",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "WorkerFailure",
    "record_video",
]

_LEGACY = {
    "DataCollectorBase": BaseCollector,
    "SyncDataCollector": Collector,
    "aSyncDataCollector": AsyncCollector,
    "MultiSyncDataCollector": MultiSyncCollector,
    "MultiaSyncDataCollector": MultiAsyncCollector,
    "_MultiDataCollector": MultiCollector,
}


def __getattr__(name: str) -> Any:
    """Return a class by its deprecated name, with a warning that says its current one."""
    if name not in _LEGACY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _LEGACY[name]
    warnings.warn(f"{name} is called {found.__name__} now", DeprecationWarning, stacklevel=2)
    return found
