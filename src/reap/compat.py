"""For scripts that cannot be edited: while installed, TorchRL's collector names are reap's.

    import reap.compat
    reap.compat.install()                                # until uninstall()
    with reap.compat.install(): …                        # for the length of a block

    python -m reap.compat train.py --seed 3              # a whole script

Names are looked up when they are imported: what a script took from TorchRL before `install` stays TorchRL's. Nothing
else of TorchRL is touched; its envs, modules, buffers and losses are what they were.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from types import ModuleType
from typing import Any

import reap.collectors
import reap.collectors.utils
import reap.weight_update
from reap.errors import UsageError, missing

__all__ = ["Installed", "install", "uninstall"]

_ABSENT = object()
_before: list[tuple[ModuleType, str, Any]] = []  # what was there, to be put back


class Installed:
    """What `install` returns: usable as a block, which puts TorchRL's names back at its end."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        uninstall()


def install() -> Installed:
    """Make `torchrl.collectors` and `torchrl.weight_update` name reap's classes, where reap has them.

    >>> with install() as installed:
    ...     from torchrl.collectors import Collector
    >>> Collector.__module__
    'reap.collectors.single'
    """
    try:
        theirs = importlib.import_module("torchrl.collectors")
    except ImportError as cause:
        raise missing("torchrl", "torchrl") from cause
    utils, weights = (importlib.import_module(f"torchrl.{name}") for name in ("collectors.utils", "weight_update"))
    ours: dict[tuple[ModuleType, str], Any] = {
        (theirs, name): getattr(reap.collectors, name) for name in reap.collectors.__all__
    }
    ours |= {(theirs, name): found for name, found in reap.collectors._LEGACY.items()}
    ours |= {(weights, name): getattr(reap.weight_update, name) for name in reap.weight_update.__all__}
    ours[utils, "split_trajectories"] = reap.collectors.utils.split_trajectories
    if not _before:  # else installed already: what is to be put back is known
        for (module, name), found in ours.items():
            _before.append((module, name, getattr(module, name, _ABSENT)))
            setattr(module, name, found)
    return Installed({f"{module.__name__}.{name}": found for (module, name), found in ours.items()})


def uninstall() -> None:
    """Put TorchRL's own names back. May be called twice."""
    while _before:
        module, name, found = _before.pop()
        if found is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, found)


def main(arguments: list[str]) -> None:
    """Run a script with reap's collectors in place of TorchRL's."""
    if not arguments:
        raise UsageError("python -m reap.compat needs a script: python -m reap.compat train.py …")
    sys.argv = arguments
    with install():
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
