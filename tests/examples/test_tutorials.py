"""The tutorials learn what their pages say: each script as it stands, at its full length."""

from __future__ import annotations

import subprocess
import sys

import pytest
from benchmarks.tutorials import DOCS, LINE, LINES, curve, script

LEAST = {
    "atari": 800,
    "dqn": 200,
    "multi-agent": -15,
    "offline": 400,
    "ppo-plain-torch": 300,
    "ppo-torchrl": 400,
    "ray": 400,
    "recurrent": 350,
    "sac": -250,
}


def test_every_tutorial_has_a_curve():
    pages = {path.stem for path in (DOCS / "tutorials").glob("*.md")} - {"index"}
    assert pages == {*LEAST}
    for page in LEAST:
        assert "(../images/curve-" + page + ".svg)" in (DOCS / "tutorials" / f"{page}.md").read_text()
        assert LINE.sub("", script(page)) == script(page)  # what it prints is a line of its output, not of its code


def test_a_curve_is_drawn_inside_its_picture():
    drawn = curve("title & more", [(1000.0, -5.0), (2000.0, 3.0)], "frames")
    assert "title &amp; more" in drawn
    assert 'points="338.0,222.0 620.0,' in drawn


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", LEAST)
def test_a_tutorial_learns(page, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LINES + script(page)], cwd=tmp_path, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stderr
    assert float(LINE.findall(done.stdout)[-1][2]) >= LEAST[page], done.stdout
