"""reap: experience for reinforcement learning on PyTorch, at the speed of a hand-written loop.

>>> import reap
>>> for batch in reap.Collector("CartPole-v1", frames_per_batch=100, total_frames=1000):
...     ...

The names that most scripts need are here, imported on first access; everything else is in `reap.collectors`,
`reap.envs`, `reap.data`, `reap.modules`, `reap.loggers`, `reap.weight_update`, `reap.checkpoint` and `reap.testing`.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for editors and type checkers
    from reap.collectors import AsyncBatchedCollector as AsyncBatchedCollector
    from reap.collectors import AsyncCollector as AsyncCollector
    from reap.collectors import Collector as Collector
    from reap.collectors import Evaluator as Evaluator
    from reap.collectors import MultiAsyncCollector as MultiAsyncCollector
    from reap.collectors import MultiSyncCollector as MultiSyncCollector
    from reap.collectors import RandomPolicy as RandomPolicy
    from reap.collectors import record_video as record_video
    from reap.data import LazyMemmapStorage as LazyMemmapStorage
    from reap.data import LazyTensorStorage as LazyTensorStorage
    from reap.data import ReplayBuffer as ReplayBuffer
    from reap.envs import GymEnv as GymEnv
    from reap.envs import ParallelEnv as ParallelEnv
    from reap.envs import SerialEnv as SerialEnv
    from reap.modules import InferenceServer as InferenceServer

_PLACES = {
    "AsyncBatchedCollector": "collectors",
    "AsyncCollector": "collectors",
    "Collector": "collectors",
    "Evaluator": "collectors",
    "GymEnv": "envs",
    "InferenceServer": "modules",
    "LazyMemmapStorage": "data",
    "LazyTensorStorage": "data",
    "MultiAsyncCollector": "collectors",
    "MultiSyncCollector": "collectors",
    "ParallelEnv": "envs",
    "RandomPolicy": "collectors",
    "ReplayBuffer": "data",
    "SerialEnv": "envs",
    "record_video": "collectors",
}
_MODULES = ("checkpoint", "collectors", "data", "envs", "loggers", "modules", "testing", "weight_update")
__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """Import a name on first access: `reap.Collector`, and modules such as `reap.data`."""
    import importlib

    if name in _PLACES:
        return getattr(importlib.import_module(f"reap.{_PLACES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"reap.{name}")
    raise AttributeError(f"module 'reap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES, *_MODULES])
