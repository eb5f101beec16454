"""Weight updaters and version counters of TorchRL's older API: thin classes over `update_policy_weights_`.

    collector.update_policy_weights_() ──► updater.push_weights ──► _get_server_weights ──► _maybe_map_weights
                                                                └─► _sync_weights_with_worker, for each worker

A subclass overrides any of the three: where weights come from, how they are converted, how they get to a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict
from torch import nn

from reap.errors import UsageError, WrongArgument, WrongState, warn


class WeightUpdaterBase:
    """Sends weights to the workers of a collector.

    >>> collector = Collector(env, policy, frames_per_batch=100, weight_updater=MyUpdater())
    """

    _collector: Any = None

    def __init__(self) -> None:
        self.post_hooks: list[Callable[[], Any]] = []

    def register_collector(self, collector: Any) -> None:
        """Set the collector whose workers are updated; the collector calls this itself."""
        self._collector = collector

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Receive the arguments of `collector.init_updater`; subclasses override this if they need them."""

    @property
    def collector(self) -> Any:
        """The collector this updater belongs to."""
        if self._collector is None:
            raise WrongState(f"{type(self).__name__} belongs to no collector yet; give it as weight_updater")
        return self._collector

    def push_weights(self, policy_or_weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send new weights to all workers, or to `worker_ids`."""
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if isinstance(weights, nn.Module):
            weights = TensorDict.from_module(weights).data
        weights = self._maybe_map_weights(weights)
        ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        for worker in self.all_worker_ids() if ids is None else ids:
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker, weights)
        for hook in getattr(self, "post_hooks", ()):
            hook()

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Call this function after each update."""
        self.post_hooks.append(hook)

    def all_worker_ids(self) -> Sequence[int]:
        """Return the numbers of all workers."""
        return list(range(getattr(self.collector, "num_workers", 1)))

    def _get_server_weights(self) -> Any:
        return self.collector.policy

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        return server_weights

    def _skip_update(self, worker_id: int) -> bool:
        return False

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> None:
        self.collector._take_weights(server_weights, [worker_id])


class VanillaWeightUpdater(WeightUpdaterBase):
    """Sends the weights a getter returns, for a collector in this process."""

    def __init__(self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any = None) -> None:
        super().__init__()
        self._getter = weight_getter

    def _get_server_weights(self) -> Any:
        return self.collector.policy if self._getter is None else self._getter()


class MultiProcessedWeightUpdater(VanillaWeightUpdater):
    """Sends the weights a getter returns, for a collector with worker processes."""

    def __init__(self, *, get_server_weights: Callable[[], Any] | None = None, policy_weights: Any = None) -> None:
        super().__init__(weight_getter=get_server_weights)


class PolicyVersion:
    """Counts the weight updates of a collector that gets it as `track_policy_version`."""

    def __init__(self, version_type: Any = int) -> None:
        if version_type not in (int, "int"):
            raise UsageError(f"version_type must be int, got {version_type!r}")
        self.version = 0

    def increment_version(self) -> None:
        """Count one more update."""
        self.version += 1


def as_updater(given: Any) -> WeightUpdaterBase | None:
    """Return the updater that was given as `weight_updater`, or that the given factory makes."""
    if given is None:
        return None
    warn("weight_updater is deprecated; update_policy_weights_() needs none", DeprecationWarning)
    made = isinstance(given, type) or (callable(given) and not hasattr(given, "push_weights"))
    try:
        updater = given() if made else given
    except TypeError as cause:
        raise WrongArgument(f"weight_updater must be made without arguments, got {given!r}: {cause}") from cause
    if not hasattr(updater, "push_weights"):
        raise WrongArgument(
            f"weight_updater must have push_weights(), or be a function that returns such an object; got "
            f"{type(given).__name__}"
        )
    return updater  # type: ignore[no-any-return]
