from __future__ import annotations

import multiprocessing.process

import pytest

from reap._system.processes import Child


@pytest.fixture(autouse=True)
def _no_process_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of this folder are about one process; whoever starts another belongs to the folder of its subject.

    Programs (`subprocess`) are not refused: libraries run some when they are imported.
    """

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{request.node.nodeid} starts a process: it belongs elsewhere")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(Child, "__init__", refuse)
