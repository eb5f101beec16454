"""Weight updates: how weights come from the learner to whoever acts, in every form users give them.

learner ─► update_policy_weights_ ─┬─► "policy": the backend, which counts versions; or a legacy updater, which asks us
                                   └─► any other model: by its path, "env.transform[0].module", "postproc.critic"
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from reap.backends.base import Backend
from reap.collectors.options import Options
from reap.collectors.staleness import StalenessWatch
from reap.collectors.updaters import WeightUpdaterBase
from reap.core.attribute_path import get_attribute
from reap.errors import UsageError, WorkerRaised
from reap.weights.local import by_worker
from reap.weights.strategy import extract

_PLACES = "'env' and 'postproc'"


class WeightUpdates:
    """The part of a collector that hands weights on."""

    options: Options
    _backend: Backend
    _version: int
    _updater: WeightUpdaterBase | None
    _watch: StalenessWatch | None = None  # while copies act, and nobody has sent them weights yet
    _runner: Any
    _open: Callable[[], None]
    _ask: Callable[..., Any]
    map_fn: Callable[..., Any]

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Give the acting policy new weights.

        Without an argument: those of the policy the collector was made with (where that very module acts, nothing has
        to be copied and only the version is counted). Else a module, a TensorDict of parameters, a state dict, a nested
        dict, or one of these per worker, `{0: …}`.
        """
        self._open()
        if policy_weights is not None:
            warnings.warn("policy_weights is deprecated, use weights", DeprecationWarning, stacklevel=2)
            weights = policy_weights if weights is None else weights
        given = {
            name: value
            for name, value in {
                "policy_or_weights": policy_or_weights,
                "weights": weights,
                "policy": policy,
                "weights_dict": weights_dict,
            }.items()
            if value is not None
        }
        if len(given) > 1:
            raise UsageError(f"give the weights once, not as {' and '.join(given)}")
        if weights_dict is not None and model_id is not None:
            raise UsageError("weights_dict names its models; leave model_id out")
        (chosen,) = given.values() or (None,)
        models = {model_id or "policy": chosen} if weights_dict is None else dict(weights_dict)
        for name, one in models.items():
            if name != "policy":
                self._load_model(name, one)
            elif self._updater is not None:
                self._updater.push_weights(one, worker_ids)
            else:
                self._take_weights(one, worker_ids)

    def _watch_policy(self, policy: Any, who: str, remedy: str) -> None:
        """From now on, look whether the policy is trained and its copies are left behind."""
        chosen = self.options.update_at_each_batch or self._updater is not None or self.options.transport == "none"
        if chosen:
            return
        if not isinstance(policy, nn.Module):
            kind = type(policy).__name__
            remedy = f"A module inside of a {kind} gets no new weights: give the module as policy. {remedy}"
        watch = StalenessWatch(policy, who=who, remedy=remedy, workers=getattr(self, "num_workers", 1))
        self._watch = watch if watch.useful else None

    def _batch_watched(self, rollouts: int = 1) -> None:
        """So many more rollouts; who trains without sending weights is told."""
        if self._watch is not None and self._runner is None:
            self._watch.batch_taken()
        elif self._watch is not None:
            self._watch.made_in_background(rollouts)

    def _take_weights(self, weights: Any, worker_ids: int | Sequence[int] | None) -> None:
        if self._watch is not None:
            ids = [worker_ids] if isinstance(worker_ids, int) else list(weights) if by_worker(weights) else worker_ids
            self._watch = self._watch if self._watch.sent(ids) else None
        self._version = self._ask(lambda: self._publish(weights, worker_ids))
        count = getattr(self.options.track_policy_version, "increment_version", None)
        if count is not None:
            count()

    def _load_model(self, path: str, weights: Any) -> None:
        """New weights for a module elsewhere than in the policy, by its path: in the env, or in `postproc`."""
        head = path.replace("[", ".").split(".")[0]
        if head not in ("env", "postproc"):
            raise _UnknownModel(f"model {path!r} is not here; this collector has 'policy', and paths in {_PLACES}")
        here = head == "postproc" or not hasattr(self, "num_workers")
        try:
            module: Any = get_attribute(self, path) if here else None
            if weights is None and not here:
                raise UsageError(f"model {path!r} needs weights; it is in the workers only, nobody here has its own")
            given, strategy = module if weights is None else weights, self.options.strategy(path)
            state = _state_of(given) if strategy is None else extract(strategy, given)
            if module is not None and weights is not None and strategy is None:
                self._ask(lambda: module.load_state_dict(state))
            elif module is not None and weights is not None:
                self._ask(lambda: strategy.apply_weights(module, state))
            # Workers that write to a buffer have a postproc of their own.
            if not here or getattr(self, "_direct", False):
                self._load_in_workers(path, state, strategy)
        except (AttributeError, LookupError, WorkerRaised) as cause:
            if isinstance(cause, WorkerRaised) and not isinstance(cause.__cause__, (AttributeError, LookupError)):
                raise  # it is here, and refuses them
            raise _UnknownModel(
                f"model {path!r} is not here; this collector has 'policy', and paths in {_PLACES}"
            ) from cause

    def _load_in_workers(self, path: str, state: Any, strategy: Any) -> None:
        self.map_fn(f"{path}.load_state_dict", [(state,)] * getattr(self, "num_workers", 1))

    def _publish(self, weights: Any, worker_ids: int | Sequence[int] | None) -> int:
        """Hand weights on to the only worker, of which per-worker weights name at most its own."""
        ids = [worker_ids] if isinstance(worker_ids, int) else [0] if worker_ids is None else list(worker_ids)
        if not ids:
            return self._version
        if ids != [0]:
            raise UsageError(f"worker_ids {ids}: this collector has worker 0 only")
        if by_worker(weights):
            if list(weights) != [0]:
                raise UsageError(f"weights are given for workers {list(weights)}: this collector has worker 0 only")
            weights = weights[0]
        return self._backend.publish(weights)

    @property
    def policy_version(self) -> int:
        """How often weights were updated; 0 is the policy as constructed."""
        return self._version

    def get_policy_version(self) -> int:
        """`policy_version`, as a call."""
        return self._version

    def increment_version(self) -> None:
        """Say that the policy was changed: its weights are handed on, as a new version."""
        self.update_policy_weights_()


def _state_of(weights: Any) -> Any:
    """Weights in any form, as a module's `load_state_dict` takes them."""
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    if isinstance(weights, TensorDictBase):
        return dict(weights.flatten_keys(".").items())
    return weights


class _UnknownModel(UsageError, KeyError):
    __str__ = UsageError.__str__  # KeyError would print the message in quotes
