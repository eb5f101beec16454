"""State that a policy keeps on itself: what `forward` assigns to an attribute, and acts by at the next step.

    self.h = self.cell(observation, self.h)      never begun anew with an episode, and the lanes in it may change places

Only what is certain is found: tensors with the lanes in front (or behind the layers, as `nn.LSTM` has them), on which
the answer to the same observation depends. What is kept for a look at it, statistics of observations, counters and
registered buffers are not meant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reap.core.policies.untouched import untouched

Attributes = dict[tuple[str, str], Any]  # by the path of a module and the attribute's name
Answer = Callable[[], list[Any]]


def attributes(policy: Any) -> Attributes:
    """What a policy and its parts hold as plain attributes."""
    return {(path, name): value for path, part in _parts(policy).items() for name, value in vars(part).items()}


def assigned(
    policy: Any, before: Attributes, size: tuple[int, ...], observed: Collection[tuple[int, ...]]
) -> Attributes:
    """The attributes that are tensors of so many lanes now and were not the same before.

    `observed` are the shapes of one lane's observations: a mean of them is none of a lane.
    """
    return {
        key: value
        for key, value in attributes(policy).items()
        if value is not before.get(key) and _of_lanes(value, size, observed)
    }


def acts_by(policy: Any, kept: Attributes, answer: Answer) -> bool:
    """Whether the policy answers otherwise where these attributes are as an earlier call has left them."""
    try:
        fresh, again, later = (_answered(policy, given, answer) for given in ({}, {}, kept))
        return _same(fresh, again) and not _same(fresh, later)
    except Exception:  # a policy that can be called once only; what it raises when it acts is told then
        return False


def _answered(policy: Any, kept: Attributes, answer: Answer) -> list[Any]:
    with untouched(policy):
        parts = _parts(policy)
        for (path, name), value in kept.items():
            setattr(parts[path], name, value)
        return answer()


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other))


def _parts(policy: Any) -> Mapping[str, Any]:
    parts = dict(policy.named_modules()) if isinstance(policy, nn.Module) else {"": policy}
    return {
        path: part
        for path, part in parts.items()
        if hasattr(part, "__dict__") and not inspect.isroutine(part) and not inspect.isclass(part)
    }


def _of_lanes(value: Any, size: tuple[int, ...], observed: Collection[tuple[int, ...]]) -> bool:
    tensors = value if isinstance(value, (tuple, list)) and value else [value]
    return all(
        isinstance(one, Tensor)
        and one.is_floating_point()
        and one.ndim > 0
        and size in (tuple(one.shape[: len(size)]), tuple(one.shape[1 : 1 + len(size)]))
        and tuple(one.shape) not in observed
        for one in tensors
    )
