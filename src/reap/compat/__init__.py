"""For scripts that cannot be edited: while installed, TorchRL's collector names are reap's.

    import reap.compat
    reap.compat.install()                                # until uninstall()
    with reap.compat.install(): …                        # for the length of a block

    python -m reap.compat train.py --seed 3              # a whole script
    python -m reap.compat -m package.train --seed 3      # a whole module

    the script            torchrl.collectors.Collector  ──►  reap.collectors.Collector
    TorchRL's own code    torchrl.collectors.Collector  ──►  TorchRL's

TorchRL is imported when the script imports it, not before, and its modules keep their content: whoever asks one of them
for a collector is given reap's, unless it is TorchRL itself that asks. What a script took from TorchRL before `install`
stays TorchRL's. Nothing else of TorchRL is touched; its envs, modules, buffers, losses and weight schemes are what they
were, and reap's collectors take its schemes as they are.
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
_before: dict[str, tuple[ModuleType, type]] = {}  # modules that answer with reap's names, and the class they had


class Installed:
    """What `install` returns: usable as a block, which puts TorchRL's names back at its end."""

    @property
    def names(self) -> dict[str, Any]:
        """What is reap's, by the name that TorchRL has for it."""
        return {f"{path}.{name}": found for path in sorted(_PATHS) for name, found in _ours(path).items()}

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        uninstall()


@functools.cache
def _ours(path: str) -> dict[str, Any]:
    """What reap has for this module of TorchRL's. Imported when it is first asked for: not every process collects."""
    import reap.collectors
    import reap.collectors.utils
    from reap.collectors import distributed

    split = {"split_trajectories": reap.collectors.utils.split_trajectories}
    found = {name: getattr(reap.collectors, name) for name in reap.collectors.__all__} | reap.collectors._LEGACY
    del found["RandomPolicy"]  # TorchRL's is a module like its others, and is known to its envs
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
    """Whether TorchRL's own machinery asks. Its trainers do not belong to it: they check the script's collectors."""
    name = str(caller.f_globals.get("__name__", ""))
    return name.startswith("torchrl.") and not name.startswith("torchrl.trainers")


class _Answering(ModuleType):
    """A module of TorchRL's that gives reap's collectors to everybody but TorchRL."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and not _is_torchrl(sys._getframe(1)):
            ours = _ours(super().__getattribute__("__name__"))
            if name in ours:
                return ours[name]
        return super().__getattribute__(name)


class _WhenImported(MetaPathFinder):
    """Sees TorchRL's modules being imported, and changes them when that is done."""

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

        # On this one loader, which stays what it is to everybody who looks at it.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _WhenImported()


def _replace(module: ModuleType) -> None:
    _before[module.__name__] = (module, module.__class__)
    module.__class__ = _Answering


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
    while _before:
        _, (module, kind) = _before.popitem()
        module.__class__ = kind
