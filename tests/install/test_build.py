"""The wheel and the sdist install into an empty environment and work from anywhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="no build here"),
]
SMOKE = """
import sys
from pathlib import Path
import reap


def make():
    return reap.SerialEnv(2, lambda: reap.GymEnv("CartPole-v1"))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    assert Path(reap.__file__).is_relative_to(sys.prefix), reap.__file__
    assert (Path(reap.__file__).parent / "py.typed").exists()
    with reap.Collector("CartPole-v1", frames_per_batch=200) as collector, reap.data.record(collector, where / "data"):
        collector.next()
    assert len(reap.data.load(where / "data"))
    with reap.MultiSyncCollector([make] * 2, None, frames_per_batch=40) as collector:
        assert collector.next().numel() == 40
    print("fine")
"""


def test_the_wheel_holds_every_module(built):
    inside = {name for name in zipfile.ZipFile(built[".whl"]).namelist() if name.startswith("reap/")}
    files = [path for kind in ("*.py", "*.html", "py.typed") for path in (ROOT / "src" / "reap").rglob(kind)]
    assert {path.relative_to(ROOT / "src").as_posix() for path in files} == inside


@pytest.mark.parametrize("kind", [".whl", ".gz"], ids=["wheel", "sdist"])
def test_it_installs_and_runs(built, kind, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # Torch and the others from here: what is tried is reap, not the network. A line of a .pth file comes after what is
    # installed, and brings no editable install with it.
    lines = {sysconfig.get_path("purelib"), *(str(Path(m.__file__).parents[1]) for m in map(__import__, ["torch"]))}
    (site / "others.pth").write_text("".join(f"{line}\n" for line in sorted(lines)))
    # The one that some Pythons put into a new environment is too old to build with.
    subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True, timeout=100)
    install = [str(python), "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*install, str(built[kind])], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "smoke.py"
    script.write_text(SMOKE)
    done = subprocess.run(
        [str(python), str(script), str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr
    told = subprocess.run([str(home / "bin" / "reap"), "--version"], capture_output=True, text=True, timeout=100)
    assert told.stdout.startswith("reap 0."), told.stderr
