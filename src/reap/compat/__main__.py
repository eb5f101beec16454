"""`python -m reap.compat train.py …`: run a script with reap's collectors in place of TorchRL's."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

import reap.compat

USAGE = """\
usage: python -m reap.compat script.py [arguments of the script]
       python -m reap.compat -m package.module [arguments of the module]

Runs a script that was written for TorchRL with reap's collectors in place of TorchRL's, in all processes it starts.
"""


def main(arguments: list[str]) -> None:
    """Run the script, or the module after `-m`, as Python would have run it."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return
    module = arguments[:1] == ["-m"]
    arguments = arguments[module:]
    if not arguments or (arguments[0].startswith("-") and not os.path.exists(arguments[0])):
        wrong = (
            f"there is no option {arguments[0]!r}" if arguments else f"give a {'module' if module else 'script'} to run"
        )
        _refuse(f"{wrong}\n{USAGE}")
    reap.compat.install()
    _install_in_children()
    sys.argv = arguments
    if module:
        _run_module(arguments[0])
    elif os.path.isdir(arguments[0]) or arguments[0].endswith((".zip", ".pyz")):
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        _run_script(arguments[0])


def _run_script(script: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # as Python does: for imports of files beside it
    try:
        with open(script, "rb") as file:
            source = file.read()
    except OSError as error:
        _refuse(f"can't open file {script!r}: {error.strerror}\n")
    code = compile(source, script, "exec", dont_inherit=True)
    _run(code, __file__=script, __loader__=SourceFileLoader("__main__", script), __spec__=None, __package__=None)


def _run_module(name: str) -> None:
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        _refuse(f"no module named {name!r} that can be run\n")
    sys.argv[0] = str(spec.origin)
    _run(code, __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # a parent package exists, but fails to import


def _run(code: CodeType, **attributes: Any) -> None:
    """Run this as `__main__`, and leave that module in place, because threads and exit handlers use it, too."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __cached__=None, **attributes)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _refuse(why: str) -> NoReturn:
    sys.stderr.write(f"python -m reap.compat: {why}")
    sys.exit(2)


def _install_in_children() -> None:
    """Install reap.compat in every Python process that the script starts: spawned ones, Ray actors, torchrun ranks."""
    startup = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if startup not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([startup, *filter(None, paths)])


if __name__ == "__main__":
    main(sys.argv[1:])
