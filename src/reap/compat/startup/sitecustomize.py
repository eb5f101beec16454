"""Run by Python at start-up in every process under `python -m reap.compat`, to install it before torchrl is imported.

A process that never imports torchrl pays for one small module. An interpreter without reap is not changed.
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path) != _here]
_hidden = PathFinder.find_spec("sitecustomize", _others)  # the `sitecustomize` that would have run without us
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))

with contextlib.suppress(ImportError):
    import reap.compat

    reap.compat.install()
