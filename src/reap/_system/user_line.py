"""Warnings that point at the user's own line, however deep in reap they are found."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_REAP = f"{Path(__file__).parents[1]}/"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the nearest line on the stack that is not reap's."""
    frame, depth = sys._getframe(1), 2  # a level of 1 would be the line below
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_REAP):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, category, stacklevel=depth)
