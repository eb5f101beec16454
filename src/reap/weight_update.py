"""Weight schemes: which road new weights take to the workers. Without one, the collector chooses.

    SharedMemWeightSyncScheme      one flat block all workers read; the choice wherever every weight is a tensor
    MultiProcessWeightSyncScheme   a parcel for each worker, answered when it has arrived
    NoWeightSyncScheme             none: workers keep what they were built with
    DistributedWeightSyncScheme    one flat parcel per version, broadcast by gloo to workers over torch.distributed
    RPCWeightSyncScheme            one flat parcel per version, packed once, sent over TensorPipe
    RayWeightSyncScheme            one flat object per version, put once, pulled by each actor

>>> MultiSyncCollector([make_env] * 2, policy, frames_per_batch=200,
...                    weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})

TorchRL's own schemes of these names are taken, too.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from reap.errors import UsageError, nearest

__all__ = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "WeightSyncScheme",
]

Road = Literal["shared", "parcel", "none", "distributed", "rpc", "ray"]
_NAMES = {
    "none": "NoWeightSyncScheme",
    "direct": "NoWeightSyncScheme",
    "shared": "SharedMemWeightSyncScheme",
    "thread": "SharedMemWeightSyncScheme",
    "process": "MultiProcessWeightSyncScheme",
    "multiprocessing": "MultiProcessWeightSyncScheme",
    "distributed": "DistributedWeightSyncScheme",
    "rpc": "RPCWeightSyncScheme",
    "ray": "RayWeightSyncScheme",
}


class WeightSyncScheme:
    """How weights travel. `strategy` and `sync` are accepted as in TorchRL; every form of weights works with each."""

    road: ClassVar[Road]

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        if strategy not in ("tensordict", "state_dict"):
            raise UsageError(f"strategy must be 'tensordict' or 'state_dict', got {strategy!r}")
        self.strategy, self.sync = strategy, sync

    @staticmethod
    def from_backend(backend: str, **options: Any) -> WeightSyncScheme:
        """The scheme that goes with a backend."""
        if backend not in _NAMES:
            raise UsageError(
                f"no weight scheme for backend {backend!r}{nearest(str(backend), _NAMES)}; known: {sorted(_NAMES)}"
            )
        scheme: WeightSyncScheme = globals()[_NAMES[backend]](**options)
        return scheme


def as_scheme(given: Any) -> Any:
    """Return reap's scheme for one of TorchRL's own, and anything else as it is.

    A subclass is not taken for the class: what it overrides would never be called.
    """
    kind = type(given)
    if not kind.__module__.startswith("torchrl.weight_update") or kind.__name__ not in _NAMES.values():
        return given
    options = {"per_worker_weights": True} if getattr(given, "per_worker_weights", False) else {}
    return globals()[kind.__name__](given.strategy_str, getattr(given, "sync", True), **options)


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """One flat block in shared memory, written once per update however many workers read it; never torn."""

    road = "shared"

    def __init__(self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False) -> None:
        super().__init__(strategy, sync)
        if per_worker_weights:
            raise UsageError(
                "per_worker_weights: every worker reads one block; MultiProcessWeightSyncScheme sends apart"
            )


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights sent to each worker by itself: for policies that hold more than tensors, or differ between workers."""

    road = "parcel"


class NoWeightSyncScheme(WeightSyncScheme):
    """Workers keep the weights they were built with; an update changes nothing and counts no version."""

    road = "none"


class DistributedWeightSyncScheme(WeightSyncScheme):
    """A broadcast to all workers over torch.distributed; the choice of `DistributedCollector`."""

    road = "distributed"


class RPCWeightSyncScheme(WeightSyncScheme):
    """One parcel for all workers over TensorPipe; the choice of `RPCCollector`."""

    road = "rpc"


class RayWeightSyncScheme(WeightSyncScheme):
    """One object in Ray's store, pulled by every actor; the choice of `RayCollector`."""

    road = "ray"
