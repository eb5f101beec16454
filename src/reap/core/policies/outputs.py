"""Take what a policy returned apart into values by key.

    {"action": a, "dist": {"loc": l}}       a mapping, a TensorDict, a tensorclass, a named tuple or a dataclass, nested
    ─────────────────────────────────►      in any way: ("action",) and ("dist", "loc")
    (a, v) or a                             by place: the action first, then ("output1",), ("output2",), …

Where each value is found is worked out once, from the first output; after that it takes one look-up per value.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensorclass

from reap.core.assemble import tree_of
from reap.errors import SpecMismatch
from reap.spec import Key, as_key, private, show, show_keys

Getter = Callable[[Any], Any]
_ACTION: tuple[Key, ...] = (("action",),)


def is_named(out: Any) -> bool:
    """Return whether a policy's output names its own parts."""
    if isinstance(out, (Mapping, TensorDictBase)):
        return not is_non_tensor(out)
    fields = isinstance(out, tuple) and hasattr(out, "_fields")
    record = dataclasses.is_dataclass(out) and not isinstance(out, type)
    return (fields or record or is_tensorclass(out)) and not is_non_tensor(out)


def getters(out: Any) -> dict[Key, Getter]:
    """Return by key how to get each value from outputs like this one; None values and private names are left out."""
    found: dict[Key, Getter] = {}
    for name, get in _members(out):
        key = _as_name(name)
        value = get(out)
        if private(key) or value is None:
            continue
        if is_named(value):
            found.update({(*key, *rest): _after(get, inner) for rest, inner in getters(value).items()})
        else:
            found[key] = get
    return found


def _members(out: Any) -> list[tuple[Any, Getter]]:
    if isinstance(out, (Mapping, TensorDictBase)):
        return [(name, operator.itemgetter(name)) for name in out.keys()]  # noqa: SIM118
    names = out._fields if hasattr(out, "_fields") else [field.name for field in dataclasses.fields(out)]
    return [(name, operator.attrgetter(name)) for name in names]


def _as_name(name: Any) -> Key:
    if isinstance(name, str) or (isinstance(name, tuple) and name and all(isinstance(part, str) for part in name)):
        return as_key(name)
    raise SpecMismatch(f"policy returned a value named {name!r}; names must be strings or tuples of strings")


def _after(outer: Getter, inner: Getter) -> Getter:
    return lambda out: inner(outer(out))


def by_name(out: Any, action: Sequence[Key] = _ACTION) -> dict[Key, Any]:
    """Return all values a policy of plain tensors returned, under their names, or by place with the action first."""
    if is_named(out):
        return {key: get(out) for key, get in getters(out).items()}
    values = out if isinstance(out, tuple) else (out,)
    names = [*action, *(as_key(f"output{n}") for n in range(1, len(values) - len(action) + 1))]
    if len(values) < len(action):
        raise SpecMismatch(f"policy returned {len(values)} tensors; {show_keys(action)} are expected")
    return dict(zip(names, values))


def as_tensordict(out: Any, size: Sequence[int]) -> TensorDict:
    """Return a policy's named outputs as a TensorDict of this batch size."""
    try:
        return TensorDict(tree_of(by_name(out)), batch_size=list(size))
    except RuntimeError as cause:
        raise SpecMismatch(
            f"policy returned {_shapes(out)}; all must begin with the dimensions {list(size)}"
        ) from cause


def _shapes(out: Any) -> str:
    shapes = {key: getattr(value, "shape", None) for key, value in by_name(out).items()}
    return ", ".join(f"{show(key)} {list(shape or ())}" for key, shape in shapes.items())
