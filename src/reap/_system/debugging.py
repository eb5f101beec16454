"""Debuggers in child processes, which have no terminal: `breakpoint()` raises an error that says what to do instead.

    breakpoint()       WrongState: the line, and the option that runs workers in the user's own process
    pdb.set_trace()    reads an empty stdin, and raises BdbQuit one line later: reported as the same error

`PYTHONBREAKPOINT` is obeyed where it names a debugger that needs no terminal (`remote_pdb.set_trace`), or none at all.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NoReturn

from reap.errors import WrongState

_HINT = (
    "there is no terminal in this process. Run the workers in your own process while you debug: give the "
    "collector workers='inline' (same data, one worker after another); use SerialEnv instead of ParallelEnv"
)
_OF_A_TERMINAL = ("", "pdb.set_trace", "ipdb.set_trace", "ray.util.rpdb._driver_set_trace")


def refuse_breakpoints() -> None:
    """Make `breakpoint()` in this process raise an error with a hint."""
    if os.environ.get("PYTHONBREAKPOINT", "") in _OF_A_TERMINAL:
        sys.breakpointhook = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    frame = sys._getframe(1)
    raise WrongState(f"breakpoint() at {frame.f_code.co_filename}:{frame.f_lineno}: {_HINT}")


def debugger_left(error: BaseException | None) -> WrongState | None:
    """Return the error for a debugger that found no terminal, if that is what caused `error`."""
    kind: Any = getattr(sys.modules.get("bdb"), "BdbQuit", None)  # it can only have been raised if bdb was imported
    while error is not None and kind is not None:
        if isinstance(error, kind):
            ours = [at for at in traceback.extract_tb(error.__traceback__) if os.path.basename(at.filename) != "bdb.py"]
            place = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "an unknown line"
            return WrongState(f"a debugger was started just before {place}: {_HINT}")
        error = error.__cause__
    return None
