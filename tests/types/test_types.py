"""Editors and type checkers see every option, and find what is misspelt."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reap
from reap.collectors import MultiCollector
from reap.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from reap.collectors.options import Options, option_docs
from tests.types import keywords

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")
MISTAKES = {
    n for n, line in enumerate((HERE / "mistakes.py").read_text().splitlines(), 1) if line.endswith("# mistake")
}


def test_what_type_checkers_read_is_what_options_say():
    assert keywords.PATH.read_text() == keywords.text(), "run python -m tests.types.keywords --write"


@pytest.mark.parametrize(
    "cls", [reap.Collector, reap.MultiSyncCollector, reap.AsyncCollector, reap.AsyncBatchedCollector, RayCollector]
)
def test_signatures_show_every_option_with_its_default(cls):
    shown = inspect.signature(cls).parameters
    assert "options" not in shown
    assert "keywords" not in shown
    assert shown["frames_per_batch"].default is inspect.Parameter.empty
    assert shown["total_frames"].default == -1
    assert shown["max_frames_per_traj"].annotation == "int | None"


def test_signatures_show_what_transports_take():
    assert inspect.signature(RayCollector).parameters["restart"].default is False
    assert inspect.signature(DistributedCollector).parameters["launcher"].default == "mp"
    assert inspect.signature(RPCCollector).parameters["max_weight_update_interval"].default == -1


@pytest.mark.parametrize(
    "cls",
    [
        reap.Collector,
        reap.AsyncBatchedCollector,
        reap.MultiSyncCollector,
        reap.MultiAsyncCollector,
        reap.AsyncCollector,
    ],
)
def test_help_has_the_meaning_of_every_option(cls):
    names = inspect.signature(cls).parameters.keys() & option_docs().keys()
    doc = " ".join(inspect.getdoc(cls).split())
    assert len(names) > 30
    for name in names:
        assert f"{name}: {option_docs()[name]}" in doc
    assert "**options" not in doc
    assert f">>> collector = {cls.__name__}(" in doc
    assert ("cat_results:" in doc) == issubclass(cls, MultiCollector)


def test_every_option_is_documented():
    assert option_docs().keys() == inspect.signature(Options).parameters.keys()


def _run(command: list[str], where: Path) -> str:
    environment = {**os.environ, "MYPYPATH": SOURCE}
    ran = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="no mypy here")
def test_mypy():
    files = [str(HERE / "script.py"), str(HERE / "mistakes.py")]
    checker = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="]
    told = _run([*checker, *files], HERE.parents[1])
    found = {(file, int(line)) for file, line in re.findall(r"(\w+\.py):(\d+): error", told)}
    assert found == {("mistakes.py", line) for line in MISTAKES}, told


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="no pyright here")
def test_pyright(tmp_path):
    for name in ("script.py", "mistakes.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    (tmp_path / "shown.py").write_text(
        "import reap\nfor batch in reap.Collector('CartPole-v1', frames_per_batch=10):\n    reveal_type(batch)\n"
    )
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [SOURCE]}))
    checker = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(tmp_path), "--pythonpath", sys.executable]
    told = json.loads(_run(checker, tmp_path))["generalDiagnostics"]
    wrong = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in told if one["severity"] == "error"}
    assert wrong == {("mistakes.py", line) for line in MISTAKES}, told
    assert [one["message"] for one in told if one["severity"] == "information"] == ['Type of "batch" is "TensorDict"']
