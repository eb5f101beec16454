"""WeightStrategy: takes weights out of a model and puts them into one, including extra states.

module ──► extract_weights ──► TensorDict, with "__extra_state__" where a module has one  ──► apply_weights ──► module
                          └──► state dict

Collectors call a user's own strategy (a subclass, or any object with the two methods) too: `extract_weights` where
`update_policy_weights_` is called, `apply_weights` in each worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor, nn

from reap.errors import SpecMismatch, UsageError, WrongArgument
from reap.weights.local import EXTRA_STATE, as_named, by_worker, load


class WeightStrategy:
    """How weights are taken from a model and given to one.

    >>> strategy = WeightStrategy("tensordict")
    >>> strategy.apply_weights(other, strategy.extract_weights(policy))

    Args:
        extract_as: "tensordict", or "state_dict" for a flat dict. `apply_weights` accepts both in either case.
    """

    def __init__(self, extract_as: Literal["tensordict", "state_dict"] = "tensordict") -> None:
        if extract_as not in ("tensordict", "state_dict"):
            raise UsageError(f"strategy must be 'tensordict' or 'state_dict', got {extract_as!r}")
        self.extract_as = extract_as

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extract_as!r})"

    def extract_weights(self, source: Any) -> Any:
        """Return the weights of a module, a TensorDict or a state dict."""
        if not isinstance(source, (nn.Module, TensorDictBase, Mapping)):
            raise WrongArgument(
                f"weights come from a module, a TensorDict or a state dict, got {type(source).__name__}"
            )
        if self.extract_as == "state_dict":
            return source.state_dict() if isinstance(source, nn.Module) else as_named(source)
        if isinstance(source, TensorDictBase):
            return source
        if isinstance(source, Mapping):
            return _nested(as_named(source))
        weights = TensorDict.from_module(source)
        extra = {name: value for name, value in source.state_dict().items() if name.endswith("_extra_state")}
        if extra:
            weights = weights.copy().unlock_()
        for name, value in extra.items():
            weights.set((*name.split(".")[:-1], EXTRA_STATE), _as_td(value))
        return weights

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Write `weights` into a module, a TensorDict or a state dict; entries that they leave out are unchanged.

        `inplace=False` replaces tensors instead of writing to them.
        """
        if weights is None:
            return
        named = as_named(weights)
        if isinstance(destination, nn.Module):
            if inplace:
                try:
                    load(destination, named, needed=())
                except SpecMismatch as error:
                    raise _Unfitting(str(error)) from error
            else:
                destination.load_state_dict(named, strict=False, assign=True)
        elif isinstance(destination, TensorDictBase):
            given = _nested(named)
            with torch.no_grad():
                destination.update_(given) if inplace else destination.update(given)
        elif isinstance(destination, dict):
            for name, value in named.items():
                if inplace and isinstance(destination.get(name), Tensor):
                    destination[name].data.copy_(value)
                else:
                    destination[name] = value
        else:
            raise WrongArgument(f"weights go to a module, a TensorDict or a dict, got {type(destination).__name__}")


@dataclass(frozen=True)
class Extracted:
    """Weights extracted by a user's own strategy, which only that strategy can apply."""

    weights: Any


def as_strategy(given: Any) -> Any:
    """Return the strategy with this name, or the given strategy; TorchRL's own is replaced by reap's equivalent."""
    if isinstance(given, str):
        return WeightStrategy(given)  # type: ignore[arg-type]
    if not all(callable(getattr(given, name, None)) for name in ("extract_weights", "apply_weights")):
        raise WrongArgument(
            f"strategy must be 'tensordict', 'state_dict', or have extract_weights and apply_weights; got {given!r}"
        )
    kind = type(given)
    if kind.__name__ == "WeightStrategy" and kind.__module__.startswith("torchrl."):
        return WeightStrategy(given.extract_as)
    return given


def own_strategy(strategy: Any) -> Any:
    """Return the strategy if it is a user's own; None for reap's, whose weights can be sent as plain tensors."""
    found = as_strategy(strategy)
    return None if type(found) is WeightStrategy else found


def extract(strategy: Any, source: Any) -> Any:
    """Return `source` if it is a TensorDict or dict of weights, else the weights that a strategy extracts from it."""
    return source if isinstance(source, (TensorDictBase, Mapping)) else strategy.extract_weights(source)


def extracted(strategy: Any, given: Any) -> Any:
    """Extract weights with a user's own strategy for workers: one `Extracted` for all, or a dict of them by worker."""
    if by_worker(given):
        known = {id(one): Extracted(extract(strategy, one)) for one in given.values()}
        return {worker: known[id(one)] for worker, one in given.items()}
    return Extracted(extract(strategy, given))


class _Unfitting(SpecMismatch, KeyError):
    __str__ = SpecMismatch.__str__  # KeyError would print the message in quotes


def _nested(named: Mapping[str, Any]) -> TensorDict:
    return TensorDict({tuple(name.split(".")): value for name, value in named.items()})


def _as_td(extra: Any) -> Any:
    """Return an extra state as an entry of a TensorDict."""
    if isinstance(extra, Mapping) and all(isinstance(value, Tensor) for value in extra.values()):
        return TensorDict(dict(extra))
    return NonTensorData(extra)
