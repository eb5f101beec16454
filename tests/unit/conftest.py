from __future__ import annotations

import multiprocessing.process
import subprocess
import sys

import pytest

from reap.children import Child


@pytest.fixture(autouse=True)
def _no_process_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of this folder are about one process; whoever starts another belongs to the folder of its subject."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{request.node.nodeid} starts a process: it belongs elsewhere")

    start = subprocess.Popen.__init__

    def popen(self: object, args: object, *more: object, **options: object) -> None:
        if isinstance(args, list) and args[0] == sys.executable:
            refuse()
        start(self, args, *more, **options)  # of libraries, which ask for compilers and the like

    monkeypatch.setattr(subprocess.Popen, "__init__", popen)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(Child, "__init__", refuse)
