"""`python -m reap.compat train.py …`: a whole script with reap's collectors in place of TorchRL's."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import NoReturn

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
        wrong = f"there is no option {arguments[0]!r}" if arguments else f"which {'module' if module else 'script'}?"
        _refuse(f"{wrong}\n{USAGE}")
    reap.compat.install()
    _hand_on()
    sys.argv = arguments
    if module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    if os.path.isdir(script) or script.endswith((".zip", ".pyz")):
        runpy.run_path(script, run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # as Python does: what lies beside it can be imported
    _run(script)


def _run(script: str) -> None:
    """Run the file as `__main__`, and leave it there: threads and what runs at the exit look for it, too."""
    try:
        with open(script, "rb") as file:
            source = file.read()
    except OSError as error:
        _refuse(f"can't open file {script!r}: {error.strerror}\n")
    main = ModuleType("__main__")
    main.__file__ = script
    main.__loader__ = SourceFileLoader("__main__", script)
    vars(main).update(__builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    exec(compile(source, script, "exec", dont_inherit=True), vars(main))


def _refuse(why: str) -> NoReturn:
    sys.stderr.write(f"python -m reap.compat: {why}")
    sys.exit(2)


def _hand_on() -> None:
    """Let every Python process that the script starts do the same: spawned ones, Ray's actors, torchrun's ranks."""
    startup = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if startup not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([startup, *filter(None, paths)])


if __name__ == "__main__":
    main(sys.argv[1:])
