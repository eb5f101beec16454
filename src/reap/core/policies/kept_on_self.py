"""Find state that a policy keeps on itself: attributes that `forward` assigns and that affect the next step.

    self.h = self.cell(observation, self.h)      not reset when an episode ends, and wrong if lanes change places

Only clear cases are found: tensors whose first dimensions are the lanes (or whose second are, as in `nn.LSTM`, after
the layers), on which the answer to the same observation depends. Values kept for inspection, statistics of
observations, counters and registered buffers are not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from reap.core.policies.untouched import stateful_parts, untouched

Attributes = dict[tuple[str, str], Any]  # by the path of a module and the attribute's name
Answer = Callable[[], list[Any]]


def attributes(policy: Any) -> Attributes:
    """Return the plain attributes of a policy and its parts."""
    return {(path, name): value for path, part in stateful_parts(policy).items() for name, value in vars(part).items()}


def assigned(
    policy: Any, before: Attributes, size: tuple[int, ...], observed: Collection[tuple[int, ...]]
) -> Attributes:
    """Return the attributes that hold tensors of all lanes now, and other objects in `before`.

    `observed` are the shapes of one lane's observations: a tensor of such a shape, like their mean, has no lanes.
    """
    return {
        key: value
        for key, value in attributes(policy).items()
        if value is not before.get(key) and _is_per_lane(value, size, observed)
    }


def depends_on(policy: Any, kept: Attributes, answer: Answer) -> bool:
    """Return whether the policy's answer changes if its attributes have the values `kept` from an earlier call."""
    try:
        fresh, again, later = (_answer_with(policy, given, answer) for given in ({}, {}, kept))
        return same_values(fresh, again) and not same_values(fresh, later)
    except Exception:  # such as from a policy that can be called only once; collecting reports what it raises then
        return False


def _answer_with(policy: Any, kept: Attributes, answer: Answer) -> list[Any]:
    with untouched(policy):
        parts = stateful_parts(policy)
        for (path, name), value in kept.items():
            setattr(parts[path], name, value)
        return answer()


def same_values(one: list[Any], other: list[Any]) -> bool:
    """Return whether two answers hold the same numbers."""
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other))


def _is_per_lane(value: Any, size: tuple[int, ...], observed: Collection[tuple[int, ...]]) -> bool:
    tensors = value if isinstance(value, (tuple, list)) and value else [value]
    return all(
        isinstance(one, Tensor)
        and one.is_floating_point()
        and one.ndim > 0
        and size in (tuple(one.shape[: len(size)]), tuple(one.shape[1 : 1 + len(size)]))
        and tuple(one.shape) not in observed
        for one in tensors
    )
