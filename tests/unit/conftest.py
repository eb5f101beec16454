from __future__ import annotations

import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from reap._system.processes import Child

STARTS = (
    (subprocess.Popen, "__init__"),
    (os, "fork"),
    (os, "posix_spawn"),
    (multiprocessing.process.BaseProcess, "start"),
    (Child, "__init__"),
)


@pytest.fixture(autouse=True)
def _no_process_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of this folder are about one process; whoever starts another belongs to the folder of its subject.

    Libraries may start some while they are imported.
    """

    def refused(start: Callable[..., Any]) -> Callable[..., Any]:
        def starts(*arguments: object, **options: object) -> object:
            if not _is_importing():
                raise AssertionError(f"{request.node.nodeid} starts a process: it belongs elsewhere")
            return start(*arguments, **options)

        return starts

    for owner, name in STARTS:
        monkeypatch.setattr(owner, name, refused(getattr(owner, name)))


def _is_importing() -> bool:
    """Whether a module is being imported in this thread."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
