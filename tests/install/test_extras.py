"""Each extra brings what it is for: the wheel with this extra alone, in an environment of its own.

Needs a package index, and 2 GB of disk at a time. Torch and what all extras share is installed once; each extra begins
with hard links to it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("extras.py")
LINES = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
EXTRAS = {name: ast.literal_eval(needs) for name, needs in re.findall(r"^(\w+) = (\[.*\])$", LINES, re.M)}
UNIONS = {  # nothing but other extras
    name: re.findall(r"\w+", needs[0])[1:]
    for name, needs in EXTRAS.items()
    if len(needs) == 1 and needs[0].startswith("reap[")
}
slow = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="no build here"),
]


def pip(python: Path, *arguments: str, timeout: float = 1500) -> subprocess.CompletedProcess[str]:
    # As a module: the script `pip` of a copied environment belongs to the one it was copied from.
    return subprocess.run([str(python), "-m", "pip", *arguments], capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def base(built, tmp_path_factory):
    """An environment with the wheel and what it needs without any extra."""
    home = tmp_path_factory.mktemp("base") / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    reached = pip(python, "download", "-q", "--no-deps", "-d", str(home.parent), "typing-extensions", timeout=300)
    if reached.returncode:
        pytest.skip(f"no package index can be reached: {reached.stderr[-300:]}")
    done = pip(python, "install", "-q", "-c", str(ROOT / "constraints.txt"), str(built[".whl"]))
    assert done.returncode == 0, done.stderr
    yield home
    shutil.rmtree(home)


@pytest.fixture
def copy(base, tmp_path):
    """A copy of it that shares its files: pip replaces files, and never writes into them."""
    home = tmp_path / "venv"
    shutil.copytree(base, home, symlinks=True, copy_function=os.link)
    yield home
    shutil.rmtree(home)


def tried(names: str, home: Path, where: Path) -> subprocess.CompletedProcess[str]:
    script = where / "extras.py"
    shutil.copy(SMOKE, script)
    quiet = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSTARTUP")}
    return subprocess.run(
        [str(home / "bin" / "python"), str(script), names, str(where), str(ROOT)],
        cwd=where,
        env=quiet,
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_every_extra_is_tried():
    functions = {*re.findall(r"^def (\w+)\(where, root\)", SMOKE.read_text(), re.M)}
    assert functions == {*EXTRAS} - {*UNIONS}
    assert {*UNIONS} == {"all"}


@pytest.mark.parametrize("extra", [pytest.param(name, marks=slow) for name in EXTRAS])
def test_an_extra_alone(extra, built, copy, tmp_path):
    python = copy / "bin" / "python"
    wheel = f"{built['.whl']}[{extra}]"
    done = pip(python, "install", "-q", "-c", str(ROOT / "constraints.txt"), wheel)
    assert done.returncode == 0, done.stderr
    names = UNIONS.get(extra, [extra])
    done = tried(",".join(names), copy, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count(" is fine\n") >= len(names)
    whole = pip(python, "check")
    assert whole.returncode == 0, whole.stdout
