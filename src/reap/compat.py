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
import os
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


def _names() -> dict[str, dict[str, Any]]:
    """What is reap's, by the public module of TorchRL it is imported from; TorchRL's own code keeps to private ones."""
    all_of_them = {name: getattr(reap.collectors, name) for name in reap.collectors.__all__} | reap.collectors._LEGACY
    split = {"split_trajectories": reap.collectors.utils.split_trajectories}
    schemes = {name: getattr(reap.weight_update, name) for name in reap.weight_update.__all__}
    return {
        "collectors": all_of_them,
        "collectors.collectors": all_of_them | split,
        "collectors.utils": split,
        "collectors.weight_update": {name: found for name, found in all_of_them.items() if "Updater" in name},
        "weight_update": schemes,
        "weight_update.weight_sync_schemes": schemes,
    }


def _module(path: str) -> ModuleType | None:
    """A module that other versions of TorchRL may not have."""
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


def install() -> Installed:
    """Make `torchrl.collectors` and `torchrl.weight_update` name reap's classes, where reap has them.

    >>> with install() as installed:
    ...     from torchrl.collectors import Collector
    >>> Collector.__module__
    'reap.collectors.single'
    """
    try:
        importlib.import_module("torchrl.collectors")
    except ImportError as cause:
        raise missing("torchrl", "torchrl") from cause
    ours = {
        (module, name): found
        for path, names in _names().items()
        if (module := _module(f"torchrl.{path}")) is not None
        for name, found in names.items()
    }
    if not _before:  # else installed already: what is to be put back is known
        for (module, name), found in ours.items():
            _before.append((module, name, vars(module).get(name, _ABSENT)))
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
    script = os.path.realpath(arguments[0])
    if os.path.isfile(script) and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(script)  # as Python does: what lies beside the script can be imported
    with install():
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
