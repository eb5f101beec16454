from __future__ import annotations

import multiprocessing.process
import subprocess

import pytest

from reap.children import Child

STARTS = [(Child, "__init__"), (multiprocessing.process.BaseProcess, "start"), (subprocess.Popen, "__init__")]


@pytest.fixture(autouse=True)
def _no_process_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of this folder are about one process; whoever starts another belongs to the folder of its subject."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{request.node.nodeid} starts a process: it belongs elsewhere")

    for owner, name in STARTS:
        monkeypatch.setattr(owner, name, refuse)
