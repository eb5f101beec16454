"""For scripts that cannot be edited: while installed, the names of TorchRL's collectors give reap's classes.

    import reap.compat
    reap.compat.install()                                # until uninstall()
    with reap.compat.install(): …                        # inside a block

    python -m reap.compat train.py --seed 3              # a whole script
    python -m reap.compat -m package.train --seed 3      # a whole module

    the script            torchrl.collectors.Collector  ──►  reap.collectors.Collector
    TorchRL's own code    torchrl.collectors.Collector  ──►  TorchRL's

TorchRL is imported when the script imports it, not before, and its modules keep their contents: code that reads a
collector from one of them gets reap's, unless the code is TorchRL's own. Names that a script imported before `install`
stay TorchRL's. Nothing else of TorchRL changes: its envs, modules, buffers, losses and weight schemes are untouched,
and reap's collectors accept its schemes.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

__all__ = ["Installed", "install", "uninstall"]

_ROOT = "torchrl.collectors"
_PATHS = frozenset(
    {_ROOT}
    | {f"{_ROOT}.{name}" for name in ("collectors", "utils", "weight_update", "distributed")}
    | {f"{_ROOT}.distributed.{name}" for name in ("generic", "ray", "rpc", "sync", "utils")}
)
_replaced: dict[str, tuple[ModuleType, type]] = {}  # replaced modules, and the class they had


class Installed:
    """The result of `install`: a context manager that calls `uninstall` at its end."""

    @property
    def names(self) -> dict[str, Any]:
        """The objects of reap, by the full names that TorchRL has for them."""
        return {f"{path}.{name}": found for path in sorted(_PATHS) for name, found in _replacements(path).items()}

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        uninstall()


@functools.cache
def _replacements(path: str) -> dict[str, Any]:
    """Return reap's objects for this TorchRL module. Imported on first use, since not every process collects."""
    import reap.collectors
    import reap.collectors.utils
    from reap.collectors import distributed

    split = {"split_trajectories": reap.collectors.utils.split_trajectories}
    found = {name: getattr(reap.collectors, name) for name in reap.collectors.__all__} | reap.collectors._LEGACY
    del found["RandomPolicy"]  # TorchRL's own is a module that its envs know
    remote = {name: getattr(distributed, name) for name in distributed.__all__}
    names = {
        _ROOT: found,
        f"{_ROOT}.collectors": found | split,
        f"{_ROOT}.utils": split,
        f"{_ROOT}.weight_update": {name: value for name, value in found.items() if "Updater" in name},
        f"{_ROOT}.distributed": remote,
    }
    if path in names:
        return names[path]
    there = vars(sys.modules[path]) if path in sys.modules else {}
    return {name: value for name, value in remote.items() if name in there}


def _is_torchrl(caller: FrameType) -> bool:
    """Return whether TorchRL's own code calls. Its trainers do not count: they check the script's collectors."""
    name = str(caller.f_globals.get("__name__", ""))
    return name.startswith("torchrl.") and not name.startswith("torchrl.trainers")


class _ReplacedModule(ModuleType):
    """A TorchRL module whose attributes are reap's collectors for all code but TorchRL's."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and not _is_torchrl(sys._getframe(1)):
            ours = _replacements(super().__getattribute__("__name__"))
            if name in ours:
                return ours[name]
        return super().__getattribute__(name)


class _ImportHook(MetaPathFinder):
    """An import hook that replaces the collector names of TorchRL's modules after their import."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _PATHS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                _replace(module)

        # Patch this one loader object, so that its type stays the same for all code that inspects it.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _ImportHook()


def _replace(module: ModuleType) -> None:
    _replaced[module.__name__] = (module, module.__class__)
    module.__class__ = _ReplacedModule


def install() -> Installed:
    """Make `torchrl.collectors` and its submodules name reap's classes, where reap has them.

    >>> with install():
    ...     from torchrl.collectors import Collector
    >>> Collector.__module__
    'reap.collectors.single'
    """
    if importlib.util.find_spec("torchrl") is None:
        from reap.errors import missing

        raise missing("torchrl", "torchrl")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        for path in sorted(_PATHS & sys.modules.keys()):
            _replace(sys.modules[path])
    return Installed()


def uninstall() -> None:
    """Put TorchRL's own names back. May be called twice."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _replaced:
        _, (module, kind) = _replaced.popitem()
        module.__class__ = kind
