"""Weight updates: bring weights from the learner to the policies that act, in every form that users give them.

learner ─► update_policy_weights_ ─┬─► "policy": the backend, which counts versions; or a legacy updater, which calls us
                                   └─► any other model: by its path, "env.transform[0].module", "postproc.critic"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from reap.collectors.options import Options
from reap.collectors.parts.staleness import StalenessWatch
from reap.collectors.parts.updaters import WeightUpdaterBase
from reap.errors import UsageError, WorkerRaised, warn
from reap.weights.local import by_worker
from reap.weights.strategy import extract

_PLACES = "'env' and 'postproc'"
Workers = int | Sequence[int] | None  # one worker, some, or all


class WeightUpdates:
    """Tracks the weights of a collector's workers: their version, when they were sent, and whether they are stale.

    `interval`: send weights automatically after this many batches; -1: never.
    """

    def __init__(self, options: Options, updater: WeightUpdaterBase | None, interval: int = -1) -> None:
        self._options, self.updater, self._interval = options, updater, interval
        self.version = 0
        self._sent_at = 0  # how many batches had been delivered when weights were last sent
        self.watch: StalenessWatch | None = None  # until all copies that act were sent weights

    def due(self, batches: int) -> bool:
        """Return whether to send weights before the next batch, when this many batches were delivered."""
        return self._options.update_at_each_batch or 0 < self._interval <= batches - self._sent_at

    def watch_policy(self, policy: Any, who: str, remedy: str, workers: int = 1) -> None:
        """From now on, watch whether the policy is trained while its copies keep old weights."""
        options = self._options
        by_itself = options.update_at_each_batch or self.updater is not None or self._interval > 0
        if by_itself or options.weight_transport == "none":
            return
        if not isinstance(policy, nn.Module):
            kind = type(policy).__name__
            remedy = f"A module inside of a {kind} gets no new weights: give the module as policy. {remedy}"
        watch = StalenessWatch(policy, who=who, remedy=remedy, workers=workers)
        self.watch = watch if watch.useful else None

    def sent(self, weights: Any, worker_ids: Workers) -> None:
        """Note that these workers were sent weights; stop watching once all were."""
        if self.watch is not None:
            ids = [worker_ids] if isinstance(worker_ids, int) else list(weights) if by_worker(weights) else worker_ids
            self.watch = self.watch if self.watch.sent(ids) else None

    def published(self, version: int, batches: int) -> None:
        """Note that weights were sent as this version, when this many batches had been delivered."""
        count = getattr(self._options.track_policy_version, "increment_version", None)
        if count is not None and version != self.version:  # else nothing was sent
            count()
        self.version, self._sent_at = version, batches

    def count_rollouts(self, rollouts: int, *, background: bool) -> None:
        """Note that this many more rollouts were collected; warn if the policy is trained but never sent."""
        if self.watch is not None and background:
            self.watch.made_in_background(rollouts)
        elif self.watch is not None:
            self.watch.batch_taken()

    def resume(self, version: int) -> None:
        """Note that a checkpoint was loaded, whose weights the workers have, with this version."""
        self.version = version
        if self.watch is not None:
            self.watch.rebase()


def weights_by_model(
    policy_or_weights: Any,
    weights: Any,
    policy: Any,
    model_id: str | None,
    weights_dict: Mapping[str, Any] | None,
    policy_weights: Any,
) -> dict[str, Any]:
    """Return the weights given to `update_policy_weights_`, by model; None means the model's own weights here."""
    if policy_weights is not None:
        warn("policy_weights is deprecated, use weights", DeprecationWarning)
        weights = policy_weights if weights is None else weights
    named = {
        "policy_or_weights": policy_or_weights,
        "weights": weights,
        "policy": policy,
        "weights_dict": weights_dict,
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise UsageError(f"give the weights once, not as {' and '.join(given)}")
    if weights_dict is not None and model_id is not None:
        raise UsageError("weights_dict already names its models; leave model_id out")
    (chosen,) = given.values() or (None,)
    return {model_id or "policy": chosen} if weights_dict is None else dict(weights_dict)


def root_of_path(path: str) -> str:
    """Return the first part of a model's path, "env" or "postproc"; raise if it is anything else."""
    place = path.replace("[", ".").split(".")[0]
    if place not in ("env", "postproc"):
        raise _unknown(path)
    return place


def load_model(
    path: str,
    weights: Any,
    strategy: Any,
    *,
    find: Callable[[str], Any] | None,
    ask: Callable[[Callable[[], Any]], Any],
    in_workers: Callable[[Any], Any] | None = None,
) -> None:
    """Load weights into a module outside the policy, found by its path in the env or in `postproc`.

    `find` returns the module in this process; None if it is only in the workers. `in_workers` loads the weights into
    the workers' modules; None if there are none. `ask` runs the loading between two batches.
    """
    try:
        module: Any = None if find is None else find(path)
        if weights is None and find is None:
            raise UsageError(f"model {path!r} exists only in the workers; pass its weights")
        given = module if weights is None else weights
        state = _state_of(given) if strategy is None else extract(strategy, given)
        if module is not None and weights is not None:
            load = module.load_state_dict if strategy is None else lambda new: strategy.apply_weights(module, new)
            ask(lambda: load(state))
        if in_workers is not None:
            in_workers(state)
    except (AttributeError, LookupError, WorkerRaised) as cause:
        if isinstance(cause, WorkerRaised) and not isinstance(cause.__cause__, (AttributeError, LookupError)):
            raise  # the module exists and refuses the weights
        raise _unknown(path) from cause


def _state_of(weights: Any) -> Any:
    """Return weights, given in any form, in the form that a module's `load_state_dict` takes."""
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    if isinstance(weights, TensorDictBase):
        return dict(weights.flatten_keys(".").items())
    return weights


class _UnknownModel(UsageError, KeyError):
    __str__ = UsageError.__str__  # KeyError would print the message in quotes


def _unknown(path: str) -> UsageError:
    """Return the error for a path that leads to no model."""
    return _UnknownModel(
        f"this collector has no model {path!r}; it has 'policy', and models by their path in {_PLACES}"
    )
