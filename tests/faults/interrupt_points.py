"""Ctrl-C at a chosen moment: all of them, one after another, in place of some of them by chance."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import GeneratorType

import reap

OURS = str(Path(reap.__file__).parent)
PYTHONS = os.path.dirname(os.__file__)


class Moment:
    """Inside, Ctrl-C comes at moment number `at` of reap's code and of what it uses of Python's library.

    Python lets a signal in when a function of Python begins and when one of C has returned: these are the moments, and
    the ones at which `sys.setprofile` calls. Loops that call nothing are the rest.
    """

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.where, self.swallowed = at, 0, "", []
        self.no_moment = False  # whether it could not have come then

    def __enter__(self) -> Moment:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._swallow
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.unraisablehook = self._hook

    def _swallow(self, what) -> None:
        if isinstance(what.object, GeneratorType):  # one that is closed: Python lets no signal in there
            self.no_moment = True
        else:
            self.swallowed.append(what)

    @property
    def came(self) -> bool:
        """Whether there were so many moments."""
        return self.seen >= self.at

    def _look(self, frame, event, called) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "c_return") or "site-packages" in name or not name.startswith((OURS, PYTHONS)):
            return
        if frame.f_code is Moment.__exit__.__code__:
            return
        self.seen += 1
        if self.seen == self.at:
            sys.setprofile(None)
            self.where = f"{event} {name}:{frame.f_lineno} {frame.f_code.co_name} {getattr(called, '__name__', '')}"
            handler = signal.getsignal(signal.SIGINT)
            handler(signal.SIGINT, frame)
