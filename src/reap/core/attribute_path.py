"""Attribute paths: nested attributes named by text.   policy.module[0].weight   env.envs[2]   policy.extra['scale']"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reap.errors import UsageError

_STEP = re.compile(r"""\.?(?P<name>[^\W\d]\w*) | \[(?P<at>-?\d+)\] | \[(?P<q>['"])(?P<key>.*?)(?P=q)\]""", re.VERBOSE)


def get_attribute(root: Any, path: str) -> Any:
    """Return the object at `path`, starting from `root`.

    A missing attribute, index or key raises the same error as the Python expression would.
    """
    found, at = root, 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None or (at == 0 and step["name"] is None):
            raise UsageError(f"{path!r} is not a path like policy.module[0].weight, from {path[at:]!r} on")
        if step["name"] is not None:
            found = getattr(found, step["name"])
        else:
            found = found[step["key"] if step["at"] is None else int(step["at"])]
        at = step.end()
    return found


def arguments_per_worker(
    count: int, args: Sequence[Sequence[Any]] | None, kwargs: Sequence[Mapping[str, Any]] | None
) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Return (args, kwargs) of one call for each of `count` workers, empty ones if none are given."""
    for given in (args, kwargs):
        if given is not None and len(given) != count:
            raise UsageError(f"arguments are given for {len(given)} workers, there are {count}")
    return list(zip(args or [()] * count, kwargs or [{}] * count))
