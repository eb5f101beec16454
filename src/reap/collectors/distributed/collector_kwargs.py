"""`collector_kwargs`: options for all workers or, as a list, for each one, merged with the collector's own options.

As with TorchRL, an option given to the collector itself overrides the same one in `collector_kwargs`. For hooks,
`trust_policy`, `no_cuda_sync` and `trajs_per_batch` it is the other way round, and two `postproc`s are called one after
the other.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from reap.errors import UsageError, WrongArgument

# Options for which `collector_kwargs` overrides the collector itself.
_KWARGS_WIN = ("pre_collect_hook", "post_collect_hook", "trust_policy", "no_cuda_sync", "trajs_per_batch")
# Options in which workers can differ: what their envs, policies and loops are made from.
_MAY_DIFFER = (
    "create_env_kwargs",
    "policy_factory",
    "device",
    "policy_device",
    "env_device",
    "storing_device",
    "max_frames_per_traj",
    "exploration_type",
    "reset_at_each_iter",
    "trust_policy",
    "compile_policy",
    "cudagraph_policy",
)
_MISSING = object()


def merge_options(
    options: Mapping[str, Any], given: Any, own: Collection[str]
) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """Return the options for all workers, and a list with the options in which the workers differ (None: in none).

    `own` names arguments of the collector itself, which `collector_kwargs` must not hold.
    """
    if given is None:
        return dict(options), None
    several = isinstance(given, (list, tuple))
    for one in given if several else [given]:
        if not isinstance(one, Mapping):
            raise WrongArgument(f"collector_kwargs must be a mapping, or a list of mappings, got {type(one).__name__}")
        for key in one:
            if key in own:
                raise UsageError(f"collector_kwargs holds {key!r}, which is an argument of the collector itself")
    if not several:
        return _merge(options, given), None
    if not given:
        raise UsageError("collector_kwargs is an empty list; give a mapping for each worker, or leave it out")
    common = {
        key: value for key, value in given[0].items() if all(_same(one.get(key, _MISSING), value) for one in given)
    }
    each: list[dict[str, Any]] = []
    for w, one in enumerate(given):
        apart = {key: value for key, value in one.items() if key not in common}
        for key in apart:
            if key not in _MAY_DIFFER:
                raise UsageError(
                    f"collector_kwargs[{w}] holds {key!r}, which must be the same for all workers; "
                    f"they may differ in {', '.join(_MAY_DIFFER)}"
                )
        each.append({key: value for key, value in _merge(options, apart).items() if key in apart})
    return _merge(options, common), each


def _merge(options: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(options)
    for key, value in theirs.items():
        ours = options.get(key)
        if ours is None or key in _KWARGS_WIN:
            out[key] = value
        elif key == "postproc" and value is not None:
            out[key] = functools.partial(_call_both, value, ours)
        elif not _same(ours, value):
            warnings.warn(
                f"collector_kwargs holds {key}={value!r}, but the collector itself was given {key}={ours!r}, which "
                f"takes precedence",
                stacklevel=5,
            )
    return out


def _call_both(first: Any, second: Any, batch: Any) -> Any:
    return second(first(batch))


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # arrays and the like
        return False
