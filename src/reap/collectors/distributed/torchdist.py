"""DistributedCollector: workers over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from reap.backends.far import FarBackend
from reap.backends.torchdist import GlooBackend
from reap.collectors.distributed.far import FarCollector
from reap.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from reap.errors import UsageError, nearest

_LAUNCHERS = ("mp",)


class DistributedCollector(FarCollector):
    """Collects with workers that are reached by torch.distributed (gloo); a slot is one tensor, weights a broadcast.

    >>> collector = DistributedCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:
    ...     collector.update_policy_weights_()

    Nothing listens but on the loopback address. A trainer's own process group is left alone. See `FarCollector`.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        sync: True: a batch holds a rollout of every worker. False (the default): of one, first come first served.
        **options: `backend` "gloo"; `launcher` "mp"; `tcp_port` (any, by default); further see `FarCollector`.
    """

    _own = {"backend": "gloo", "launcher": "mp", "tcp_port": None}

    def __new__(
        cls, create_env_fn: Any = None, policy: Any = None, *, sync: bool | None = None, **options: Any
    ) -> Self:
        if cls is DistributedCollector:
            return object.__new__(DistributedSyncCollector if sync else DistributedAsyncCollector)  # type: ignore[return-value]
        return object.__new__(cls)

    def _make_far(self, plans: Sequence[Any], **options: Any) -> FarBackend:
        backend, launcher, port = self._given["backend"], self._given["launcher"], self._given["tcp_port"]
        if backend != "gloo":
            raise UsageError(f"backend must be 'gloo', which carries what is in a CPU's memory, got {backend!r}")
        if launcher not in _LAUNCHERS:
            raise UsageError(f"launcher must be 'mp', got {launcher!r}{nearest(str(launcher), _LAUNCHERS)}")
        if port is not None and not (isinstance(port, (int, str)) and str(port).isdigit() and int(port) < 2**16):
            raise UsageError(f"tcp_port must be a port number, got {port!r}")
        return GlooBackend(plans, port=None if port is None else int(port), **options)


class DistributedSyncCollector(DistributedCollector, MultiSyncCollector):
    """Every batch holds a rollout of each worker, all made by the same weights. See `DistributedCollector`."""


class DistributedAsyncCollector(DistributedCollector, MultiAsyncCollector):
    """Every batch is one worker's rollout; workers go on while the consumer works. See `DistributedCollector`."""
